"""Facts about a value of a training step, one field for each subject.

A fact that is not proven is absent. Each subject has a small lattice and a module with its rules:

| subject | field | rules |
|---|---|---|
| where private values go | `reach` | here |
| rows: what an entry of a value depends on | `places`, `turns` | `rows.py` |
| masks and indices: arguments as they came | `role` | `roles.py` |
| clipped sums, and how far one example moves them | `sum` | `sums.py` |
| streams of noise, keys of losses | `token` | `streams.py` |
"""

import enum
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

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


ANY = "*"
EVEN: Final = "even"
Place: TypeAlias = Row | str | None
"""What an entry along a dimension depends on: a row; `EVEN`, of public values: all entries are the
same; None: anything."""


def met(places: Iterable[Place]) -> Place:
    """What an entry depends on that is computed from entries of several values."""
    found: Place = EVEN
    for place in places:
        if found == EVEN:
            found = place
        elif place != EVEN and place != found:
            found = _indexed(found, place)
    return found


def _indexed(one: Place, other: Place) -> Place:
    """Rows by an index and their mask."""
    if not isinstance(one, Row) or not isinstance(other, Row):
        return None
    index = other.chosen_by if one.chosen_by == ANY else one.chosen_by
    is_met = (
        ANY in (one.chosen_by, other.chosen_by) and one._replace(chosen_by=other.chosen_by) == other
    )
    return one._replace(chosen_by=index) if is_met else None


# Clipped sums.


class Term(NamedTuple):
    """A linear function of one leaf of a clipped sum.

    Attributes:
        leaf: the call of the engine and the group of leaves with one clip norm; and the leaf.
        gain: a bound on the function's norm.
    """

    leaf: tuple[Hashable, int]
    gain: float


Terms: TypeAlias = frozenset[Term]


class Sum(NamedTuple):
    """Linear functions of clipped sums whose results are side by side.

    Attributes:
        rows: each of them, as a sum of terms.
        is_exact: whether the bounds are reached.
        over: the loop over whose turns this is a part of a sum; None if it is whole.
    """

    rows: tuple[Terms, ...]
    is_exact: bool = True
    over: Hashable = None

    @property
    def is_whole(self) -> bool:
        """Whether it is of all rows."""
        return self.over is None

    def scaled(self, factor: float, is_exact: bool = True) -> "Sum":
        """After a linear function whose norm is at most `factor`."""
        rows = (frozenset(Term(t.leaf, t.gain * factor) for t in row) for row in self.rows)
        return self._replace(rows=tuple(rows), is_exact=self.is_exact and is_exact)


# Where private values go.


class Kind(enum.IntEnum):
    """What a value is computed from; of several kinds, the largest counts."""

    PUBLIC = 0
    SUM = 1
    PRIVATE = 2


class Reach(NamedTuple):
    """What private values have reached a value.

    Attributes:
        kind: `PUBLIC`: nothing private; `SUM`: a linear function of clipped sums alone, whose bound
            is known; `PRIVATE`: anything else.
        is_drawn: whether random numbers of the step's own are in it.
        is_noised: whether a release is in it.
        reason: why it is private; a key of `record.REASONS`.
        where: the source line of the reason.
    """

    kind: Kind = Kind.PUBLIC
    is_drawn: bool = False
    is_noised: bool = False
    reason: str = ""
    where: str = ""


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        reach: what private values have reached it.
        places: for each dimension, what an entry along it depends on.
        turns: loops in whose turns it may differ, beside what its rows are.
        role: what a mask, an index or a running total stands for.
        sum: for a clipped sum, how far one example moves it.
        token: the stream of noise, the key or the counter that it is.
        value: computes the value, if it depends only on constants; see `value_of`.
    """

    reach: Reach = Reach()
    places: tuple[Place, ...] = ()
    turns: frozenset[Hashable] = frozenset()
    role: tuple[Any, ...] = ()
    sum: Sum | None = None
    token: Any = None
    value: Callable[[], Any] | None = None

    @property
    def is_public(self) -> bool:
        """Whether nothing private has reached it."""
        return self.reach.kind is Kind.PUBLIC


def private(reason: str, where: str = "") -> Fact:
    """A private value of which nothing else is known."""
    return Fact(Reach(Kind.PRIVATE, reason=reason, where=where))


def reached(facts: Iterable[Fact], reason: str = "unknown", where: str = "") -> Reach:
    """What has reached an unknown function of values."""
    every = [fact.reach for fact in facts]
    lost = [reach for reach in every if reach.kind is not Kind.PUBLIC]
    is_drawn, is_noised = (any(reach[i] for reach in every) for i in (1, 2))
    if not lost:
        return Reach(Kind.PUBLIC, is_drawn, is_noised)
    before = next((reach for reach in lost if reach.kind is Kind.PRIVATE), None)
    if before is not None and (before.reason != "rows" or reason == "unknown"):
        reason, where = before.reason, before.where or where
    return Reach(Kind.PRIVATE, is_drawn, is_noised, reason, where)


def either(facts: Sequence[Fact]) -> Fact:
    """The fact about a value that is one of several."""
    first, *others = facts
    if all(fact == first for fact in others):
        return first
    turns = frozenset[Hashable]().union(*(fact.turns for fact in facts))
    places = [fact.places for fact in facts]
    is_like = len({len(one) for one in places}) == 1
    return Fact(
        reached(facts),
        tuple(map(met, zip(*places, strict=True))) if is_like else (),
        turns,
        first.role if all(fact.role == first.role for fact in others) else (),
        token=first.token if all(fact.token == first.token for fact in others) else None,
    )


# Constants.

_LARGE = 1 << 20


def of_array(value: Any) -> Fact:
    """The fact about a constant of the program."""
    places: list[Place] = [None] * np.ndim(value)
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended) if places else False
    if 0 < np.size(value) <= _LARGE and places and not is_key:
        array = np.asarray(value)
        first = [array == array.take([0], dim) for dim in range(array.ndim)]
        places = [EVEN if bool(is_same.all()) else None for is_same in first]
    return Fact(places=tuple(places), value=lambda: value)


def evaluated(equation: JaxprEqn, inputs: Sequence[Fact]) -> Callable[[], Any] | None:
    """Computes the result of an equation whose operands are small constants."""
    size = int(np.prod(getattr(equation.outvars[0].aval, "shape", ())))
    is_known = all(fact.value for fact in inputs) and size <= _LARGE
    if not is_known or len(equation.outvars) != 1 or equation.effects:
        return None
    return functools.cache(
        lambda: equation.primitive.bind(*map(value_of, inputs), **equation.params)
    )


def value_of(fact: Fact) -> Any:
    """The value, if it depends only on constants and can be computed; otherwise None."""
    try:
        with jax.ensure_compile_time_eval():
            return fact.value and fact.value()
    except Exception:  # after any error the value is unknown
        return None


def whole_number(fact: Fact) -> int | None:
    """A whole number that is a constant of the program; otherwise None."""
    value = value_of(fact)
    if value is None or np.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        return None
    return int(value)
