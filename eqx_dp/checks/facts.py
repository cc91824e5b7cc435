"""What is known of a value of a training step. What is not proven is not there.

| kind | what the value is made of |
|---|---|
| `Kind.PUBLIC` | public arguments, constants, random bits, and what left through noise |
| `Kind.SUM` | clipped sums, by linear operations of known norms, and public values |
| `Kind.PRIVATE` | private arguments, and all of which nothing else was proven |

All other fields say more, and are empty unless it was proven, but for `varies` and `draws`, which
are bounds from above: they hold all that a value may depend on.
"""

import enum
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import numpy as np

from ..trees import is_key
from .keys import Key, Number

Path: TypeAlias = tuple[Hashable, ...]


class Kind(enum.IntEnum):
    """What a value is made of; of several, the largest counts."""

    PUBLIC = 0
    SUM = 1
    PRIVATE = 2


class Ref(NamedTuple):
    """A dimension, 0 or 1, of the private arguments that belong together, row by row.

    Attributes:
        group: the length of their first dimension.
        dim: which of their dimensions.
    """

    group: int
    dim: int


class Cut(NamedTuple):
    """Along one dimension of private arguments, a part alone: in each turn of a loop one entry
    (`"loop"`, its path), one entry (`"at"`, which), or what a device has (`"devices"`, axes)."""

    ref: Ref
    how: str
    where: Hashable


class Alike(NamedTuple):
    """Along a dimension, each entry has its own of the independent entries of a draw.

    Attributes:
        dim: the dimension.
        draw: which draw.
        of: the dimension of what was drawn.
    """

    dim: int
    draw: Path
    of: int


class Term(NamedTuple):
    """A linear function of one leaf of a clipped sum.

    Attributes:
        leaf: the call of the engine, the group of leaves with one clip norm, and the leaf; or what
            a loop carries.
        gain: a bound on the function's norm; where it is `plain`, the factor itself.
        is_plain: whether the function is a multiplication by `gain`.
        is_fixed: whether the function is the same in each turn of the loops around.
    """

    leaf: Any
    gain: float
    is_plain: bool = True
    is_fixed: bool = True


Row: TypeAlias = frozenset[Term]


class Constant:
    """A value that follows from constants alone. JAX computes it when it is needed."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    @functools.cached_property
    def value(self) -> Any:
        """The value; None if it cannot be computed."""
        try:
            with jax.ensure_compile_time_eval():
                return self._compute()
        except Exception:  # whatever it is, the value is not known then
            return None


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        kind: see above.
        constant: the value, if it follows from constants.
        number: of integers, what they count.
        key: the key of random numbers that the value is (typed, or its words).
        even: dimensions along which all entries are the same.
        alike: dimensions along which entries are made of independent draws of one distribution.
        refs: for each dimension of a private value, the dimension of the arguments that it is:
            its entry i depends on entry i of the arguments alone.
        cuts: parts of the arguments that a private value is made of, where `refs` speaks of parts.
        indexes: of integers of private arguments, how they can serve as indices.
        rows: of a sum, linear functions whose results stand side by side; a bound on all.
        over: mesh axes; the sum over their devices is meant, of which this is a device's part.
        varies: loops whose turns, and mesh axes whose devices, may have other values.
        draws: random draws that the value may depend on.
        releases: what left through noise that the value may depend on, for the table.
        is_noised: whether noise was drawn by hand and added.
        reason: why a value is private; a key of `verdict.REASONS`.
        where: the source line of that.
    """

    kind: Kind = Kind.PUBLIC
    constant: Constant | None = None
    number: Number | None = None
    key: Key | None = None
    even: frozenset[int] = frozenset()
    alike: frozenset[Alike] = frozenset()
    refs: tuple[Ref | None, ...] = ()
    cuts: frozenset[Cut] = frozenset()
    indexes: tuple[Any, ...] = ()
    rows: tuple[Row, ...] = ()
    over: frozenset[str] = frozenset()
    varies: frozenset[Hashable] = frozenset()
    draws: frozenset[Path] = frozenset()
    releases: frozenset[Path] = frozenset()
    is_noised: bool = False
    reason: str = ""
    where: str = ""

    @property
    def is_public(self) -> bool:
        """Whether nothing private is in it."""
        return self.kind is Kind.PUBLIC


def of_array(value: Any) -> Fact:
    """What is known of a constant of the program."""
    shape = tuple(np.shape(value))
    constant = Constant(lambda: value)
    if isinstance(value, jax.Array) and is_key(value):
        words = np.asarray(jax.random.key_data(value))
        return Fact(constant=constant, key=Key(None if shape else ("constant", words.tobytes())))
    even = frozenset[int]()
    if 0 < np.size(value) <= _LARGE:
        array = np.asarray(value)
        even = frozenset(d for d in range(array.ndim) if bool((array == array.take([0], d)).all()))
    number = None
    if not shape and np.issubdtype(np.result_type(value), np.integer):
        number = Number(None, int(value))
    return Fact(constant=constant, number=number, even=even)


_LARGE = 1 << 20


def evaluated(equation: jex_core.JaxprEqn, inputs: Sequence[Fact]) -> Constant | None:
    """The result of an equation whose operands are constants, and small."""
    known = [fact.constant for fact in inputs]
    if not all(known) or len(equation.outvars) != 1 or equation.effects:
        return None

    def compute() -> Any:
        values = [one.value for one in known if one is not None]
        if any(value is None for value in values):
            return None
        return equation.primitive.bind(*values, **equation.params)

    size = int(np.prod(getattr(equation.outvars[0].aval, "shape", ())))
    return Constant(compute) if size <= _LARGE else None


def made_of(facts: Sequence[Fact], reason: str = "unknown", where: str = "") -> Fact:
    """Of a value that may be anything made of values: whether it is private, and why."""
    kind = Kind.PRIVATE if any(not fact.is_public for fact in facts) else Kind.PUBLIC
    before = next((fact for fact in facts if fact.kind is Kind.PRIVATE), None)
    if before is not None and (before.reason != "rows" or reason == "unknown"):
        reason, where = before.reason, before.where or where
    found = Fact(
        kind=kind,
        varies=union(fact.varies for fact in facts),
        draws=union(fact.draws for fact in facts),
        releases=union(fact.releases for fact in facts),
        is_noised=any(fact.is_noised for fact in facts),
    )
    return found._replace(reason=reason, where=where) if kind is Kind.PRIVATE else found


def union(sets: Any) -> frozenset[Any]:
    """The union of several sets."""
    return frozenset[Any]().union(*sets)


def either(facts: Sequence[Fact], where: str = "") -> Fact:
    """What is known of a value that is one of several, by a choice that is public."""
    first, *others = facts
    if all(fact == first for fact in others):
        return first
    found = made_of(facts, where=where)
    kinds = {fact.kind for fact in facts}
    common: dict[str, Any] = {
        "constant": first.constant if all(f.constant is first.constant for f in facts) else None,
        "number": first.number if all(f.number == first.number for f in facts) else None,
        "even": frozenset.intersection(*(f.even for f in facts)),
        "alike": frozenset.intersection(*(f.alike for f in facts)),
    }
    if any(fact.key for fact in facts):
        common["key"] = first.key if all(f.key == first.key for f in facts) else Key(None)
    if kinds == {Kind.PUBLIC}:
        return found._replace(**common)
    if Kind.PRIVATE not in kinds:
        sums = [fact for fact in facts if fact.kind is Kind.SUM]
        if len({fact.over for fact in sums}) > 1:
            return found
        rows: tuple[Row, ...] = ()
        for one in sums:
            rows = larger(rows, one.rows)
        return found._replace(kind=Kind.SUM, rows=rows, over=sums[0].over, reason="", where="")
    private = [fact for fact in facts if fact.kind is Kind.PRIVATE]
    if Kind.SUM in kinds or len({fact.cuts for fact in private}) > 1:
        return found
    refs = tuple(
        ref if all(_fits(fact, d, ref) for fact in facts) else None
        for d, ref in enumerate(private[0].refs)
    )
    return found._replace(refs=refs, cuts=private[0].cuts)


def _fits(fact: Fact, dim: int, ref: Ref | None) -> bool:
    """Whether a value's entry i along a dimension depends on entry i of the arguments at most."""
    if fact.kind is Kind.PRIVATE:
        return ref is not None and dim < len(fact.refs) and fact.refs[dim] == ref
    return ref is not None and dim in fact.even


def larger(a: tuple[Row, ...], b: tuple[Row, ...]) -> tuple[Row, ...]:
    """A bound on both of two sums of which one is there, by a choice that may vary."""
    gains: dict[Hashable, float] = {}
    for rows in (a, b):
        for leaf, gain in column_norms(rows).items():
            gains[leaf] = max(gain, gains.get(leaf, 0.0))
    row = frozenset(Term(leaf, gain, False, False) for leaf, gain in gains.items())
    return (row,)


def column_norms(rows: tuple[Row, ...]) -> dict[Hashable, float]:
    """For each leaf a bound on how far it moves all rows together."""
    squares: dict[Hashable, float] = {}
    for row in rows:
        for term in row:
            squares[term.leaf] = squares.get(term.leaf, 0.0) + term.gain**2
    return {leaf: square**0.5 for leaf, square in squares.items()}
