"""Facts about a value of a training step. A fact that is not proven is absent.

| kind | what the value is computed from |
|---|---|
| `Kind.PUBLIC` | public arguments, constants, random bits, and sums after noise |
| `Kind.SUM` | clipped sums, by linear operations of known norms, and public values |
| `Kind.PRIVATE` | private arguments, and every value without another proven kind |

All other fields are empty unless their content was proven.
"""

import enum
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from ..trees import is_key
from .keys import Key, Number

Path: TypeAlias = tuple[Hashable, ...]


class Kind(enum.IntEnum):
    """What a value is computed from; of several kinds, the largest counts."""

    PUBLIC = 0
    SUM = 1
    PRIVATE = 2


class Ref(NamedTuple):
    """A dimension of private arguments whose rows belong together.

    Attributes:
        length: of their first dimension.
        dim: which of their dimensions: 0 or 1.
        loops: each of their turns takes one entry along the first dimension.
        axes: the mesh axes that it is spread over.
    """

    length: int
    dim: int
    loops: tuple[Hashable, ...] = ()
    axes: frozenset[str] = frozenset()


class Term(NamedTuple):
    """A linear function of one leaf of a clipped sum.

    Attributes:
        leaf: the call of the engine and the group of leaves with one clip norm; and the leaf.
        gain: a bound on the function's norm.
    """

    leaf: tuple[Hashable, int]
    gain: float


Row: TypeAlias = frozenset[Term]


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        kind: see above.
        constant: computes the value, if it depends only on constants; see `value_of`.
        number: for integers, what they count.
        key: the key of random numbers that the value is (typed, or its words).
        even: dimensions along which all entries of a public value are the same.
        refs: for each dimension of a private value, the matching dimension of the arguments: its
            entry i depends only on entry i of the arguments.
        indexes: for integers from private arguments, how they can serve as indices.
        rows: for a sum, linear functions whose results are concatenated; a bound on all.
        is_exact: whether the bounds are reached.
        over: mesh axes; this is a device's part of the sum over their devices.
        is_random: whether a public value contains random numbers, or a sum has some added.
        past: of noise that a privatizer keeps for later steps, as it is: where it was added, and
            its place among what is kept for the next step.
        reason: why a value is private; a key of `marked.REASONS`.
        where: the source line of the reason.
    """

    kind: Kind = Kind.PUBLIC
    constant: Callable[[], Any] | None = None
    number: Number | None = None
    key: Key | None = None
    even: frozenset[int] = frozenset()
    refs: tuple[Ref | None, ...] = ()
    indexes: tuple[Any, ...] = ()
    rows: tuple[Row, ...] = ()
    is_exact: bool = False
    over: frozenset[str] = frozenset()
    is_random: bool = False
    past: Path = ()
    reason: str = ""
    where: str = ""

    @property
    def is_public(self) -> bool:
        """Whether it contains nothing private."""
        return self.kind is Kind.PUBLIC


PAST = Fact(Kind.PRIVATE, reason="past")
"""The fact about noise that a privatizer keeps: as secret as a key, and an operand of noise."""

_LARGE = 1 << 20


def of_array(value: Any) -> Fact:
    """The facts about a constant of the program."""
    shape, constant = tuple(np.shape(value)), lambda: value
    if isinstance(value, jax.Array) and is_key(value):
        return Fact(constant=constant, key=Key(None if shape else ("constant", key_bytes(value))))
    even = frozenset[int]()
    if 0 < np.size(value) <= _LARGE:
        array = np.asarray(value)
        even = frozenset(d for d in range(array.ndim) if bool((array == array.take([0], d)).all()))
    is_number = not shape and np.issubdtype(np.result_type(value), np.integer)
    number = Number(None, int(value)) if is_number else None
    return Fact(constant=constant, number=number, even=even)


def key_bytes(keys: Any) -> bytes:
    """What keys are made of, typed or as words."""
    return np.asarray(jax.random.key_data(keys) if is_key(keys) else keys).tobytes()


def evaluated(equation: JaxprEqn, inputs: Sequence[Fact]) -> Callable[[], Any] | None:
    """Computes the result of an equation whose operands are small constants."""
    size = int(np.prod(getattr(equation.outvars[0].aval, "shape", ())))
    is_known = all(fact.constant for fact in inputs) and size <= _LARGE
    if not is_known or len(equation.outvars) != 1 or equation.effects:
        return None
    return functools.cache(
        lambda: equation.primitive.bind(*map(value_of, inputs), **equation.params)
    )


def value_of(fact: Fact) -> Any:
    """The value, if it depends only on constants and can be computed; otherwise None."""
    try:
        with jax.ensure_compile_time_eval():
            return fact.constant and fact.constant()
    except Exception:  # after any error the value is unknown
        return None


def made_of(facts: Iterable[Fact], reason: str = "unknown", where: str = "") -> Fact:
    """The fact about an unknown function of values: whether it is private, and why."""
    facts = list(facts)
    lost = [fact for fact in facts if not fact.is_public]
    if not lost:
        return Fact(is_random=any(fact.is_random for fact in facts))
    before = next((fact for fact in lost if fact.kind is Kind.PRIVATE), None)
    if before is not None and (before.reason != "rows" or reason == "unknown"):
        reason, where = before.reason, before.where or where
    is_random = any(fact.is_random for fact in lost)
    return Fact(Kind.PRIVATE, is_random=is_random, reason=reason, where=where)


def either(facts: Sequence[Fact], where: str = "") -> Fact:
    """The facts about a value that is one of several, by a public choice."""
    first, *others = facts
    if all(fact == first for fact in others):
        return first
    found = made_of(facts, where=where)
    if any(fact.key for fact in facts):
        found = found._replace(key=first.key if len({f.key for f in facts}) == 1 else Key(None))
    if not found.is_public:
        return found
    number = first.number if all(fact.number == first.number for fact in others) else None
    return found._replace(
        number=number, even=frozenset.intersection(*(fact.even for fact in facts))
    )
