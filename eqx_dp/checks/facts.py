"""Facts about a value of a training step, one field for each subject.

A fact that is not proven is absent. Each subject has a small lattice and a module with its rules:

| subject | field | rules |
|---|---|---|
| where private values go | `reach` | here |
| rows: what an entry of a value depends on | `places`, `turns` | `rows.py` |
| clipped sums, and how far one example moves them | `sum` | `sums.py` |
| what a value stands for: a mask, an index, a running total | `token` | `roles.py` |
| the same: a stream of noise, a key of a loss, a counter | `token` | `streams.py` |
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

# Rows.


class Row(NamedTuple):
    """A dimension of a private value: entry i depends on row i of private arguments alone.

    Attributes:
        length: of the arguments' first dimension. Arguments of one length belong together.
        dim: which of their dimensions it is: 0, or 1 of a stack of batches.
        part: if rows were reshaped to (n, m): (n, m, 0) for the first, (n, m, 1) for the second.
        turns: loops that take one entry along the other dimension in each turn.
        chosen_by: the integer argument that chose the rows; "" if none did, `ANY` for a mask.
    """

    length: int
    dim: int
    part: tuple[int, ...] = ()
    turns: tuple[Hashable, ...] = ()
    chosen_by: str = ""

    @property
    def is_one_dimension(self) -> bool:
        """Whether rows are along it alone, the loops around it aside."""
        return len(self.turns) == (self.dim == 1) + bool(self.part)


ANY: Final = "any index"
EVEN: Final = "even"
Place: TypeAlias = Row | str | None
"""What an entry along a dimension depends on: a row; `EVEN`, of public values: all entries are the
same; None: anything."""


def met(places: Iterable[Place]) -> Place:
    """What an entry depends on that is computed from entries of several values.

    A mask goes with rows that any index chose.
    """
    others = {place for place in places if place != EVEN}
    rows = {place for place in others if isinstance(place, Row) and place.chosen_by != ANY}
    if len(rows) == 1:
        (row,) = rows
        others.discard(row._replace(chosen_by=ANY))
    return EVEN if not others else others.pop() if len(others) == 1 else None


# Clipped sums.


class Term(NamedTuple):
    """How far one example moves an array, through a leaf of a clipped sum.

    Attributes:
        leaf: which clipped sum, and which of its leaves.
        gain: at most this many times as far as the leaf.
    """

    leaf: tuple[Hashable, int]
    gain: float


class Sum(NamedTuple):
    """A linear function of clipped sums.

    Attributes:
        terms: whose norms bound it, added up.
        over: the loop over whose turns this is a part of a sum; None if it is whole.
    """

    terms: tuple[Term, ...]
    over: Hashable = None

    def scaled(self, factor: float) -> "Sum":
        """After a linear function whose norm is at most `factor`."""
        return self._replace(terms=tuple(Term(t.leaf, t.gain * factor) for t in self.terms))


# Where private values go.


class Reach(NamedTuple):
    """What private values have reached a value.

    Attributes:
        why: in words; empty if nothing private has reached it, or clipped sums alone.
        where: the source line.
        is_proven: whether it certainly depends on them.
        is_random: whether noise, or random numbers of the step's own, are in it.
    """

    why: str = ""
    where: str = ""
    is_proven: bool = False
    is_random: bool = False


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        reach: what private values have reached it.
        places: for each dimension, what an entry along it depends on.
        turns: loops in whose turns it may differ, beside what its rows are.
        sum: for a clipped sum, how far one example moves it.
        token: what it stands for.
        value: the number that all its entries are, if that is a constant of the program.
    """

    reach: Reach = Reach()
    places: tuple[Place, ...] = ()
    turns: frozenset[Hashable] = frozenset()
    sum: Sum | None = None
    token: Any = None
    value: Any = None

    @property
    def is_public(self) -> bool:
        """Whether nothing private has reached it."""
        return not self.reach.why and self.sum is None

    @property
    def is_proven(self) -> bool:
        """Whether it is a violation that it leaves: no noise at all is in it."""
        return (self.reach.is_proven or self.sum is not None) and not self.reach.is_random


CONSTANT = ("constant",)
DATA = "private data is in it"


def private(why: str, where: str = "", is_proven: bool = False) -> Fact:
    """A private value of which nothing else is known."""
    return Fact(Reach(why, where, is_proven))


def reached(facts: Iterable[Fact], why: str, where: str = "", is_proven: bool = False) -> Reach:
    """What has reached an unknown function of values; `why` is said of clipped sums."""
    every = list(facts)
    is_random = any(fact.reach.is_random for fact in every)
    found = next((fact.reach for fact in every if fact.reach.why), Reach())
    if not found.why and any(fact.sum for fact in every):
        found = Reach(why, where, is_proven)
    return found._replace(where=found.where or (where if found.why else ""), is_random=is_random)


def turns_of(facts: Iterable[Fact]) -> frozenset[Hashable]:
    """Loops in whose turns a function of values may differ."""
    return frozenset[Hashable]().union(*(fact.turns for fact in facts))


def either(facts: Sequence[Fact], where: str = "") -> Fact:
    """The fact about a value that is one of several."""
    tokens = [fact.token for fact in facts]
    return Fact(
        reached(facts, "one of several values, a clipped sum among them, is in it", where),
        tuple(map(met, zip_longest(*(fact.places for fact in facts)))),
        turns_of(facts),
        token=tokens[0] if all(token == tokens[0] for token in tokens) else None,
    )


# Constants.

_LARGE = 1 << 20


def of_array(array: Any) -> Fact:
    """The fact about a constant of the program."""
    places: list[Place] = [None] * np.ndim(array)
    is_key = jnp.issubdtype(jnp.result_type(array), jax.dtypes.extended)
    value, is_mutable = None, isinstance(array, jax.Ref)
    if not is_mutable and not is_key and 0 < np.size(array) <= _LARGE:
        entries = np.asarray(array)
        first = [entries == entries.take([0], dim) for dim in range(entries.ndim)]
        places = [EVEN if bool(is_same.all()) else None for is_same in first]
        value = entries.flat[0].item() if None not in places else None
    return Fact(places=tuple(places), token=CONSTANT, value=value)
