"""Clipped sums: linear functions of them, and how far one example moves a release."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..privacy import Banded
from ..programs import ENTRY_BY_ENTRY, UNCHANGED, named
from .facts import Fact, Kind, Sum, Term, Terms, reached, value_of
from .flow import Context, dtype_of, size_of

_PLAIN = UNCHANGED | {"convert_element_type", "neg"}
_MOVED = named("reshape transpose squeeze rev slice split unstack")
ADDITIONS = named("add add_any")


def linear(context: Context, equation: JaxprEqn, inputs: list[Fact]) -> Fact:
    """The fact about the result of an equation on clipped sums and public values."""
    found = _linear(equation, inputs)
    turns = frozenset[Any]().union(*(fact.turns for fact in inputs))
    if isinstance(found, str):
        return Fact(reached(inputs, found, context.line), turns=turns)
    reach = reached(inputs)._replace(kind=Kind.SUM, reason="", where="")
    return Fact(reach, turns=turns, sum=found)


def _linear(equation: JaxprEqn, inputs: list[Fact]) -> Sum | str:
    """The sum, or the reason why its bound is not known."""
    name = equation.primitive.name
    sums = [fact.sum for fact in inputs if fact.sum is not None]
    one = sums[0]
    if len({found.over for found in sums}) > 1:
        return "loop"
    size, sizes = size_of(equation.outvars[0]), [size_of(v) for v in equation.invars]
    is_beside = all(fact.is_public or n == size for fact, n in zip(inputs, sizes, strict=True))
    is_exact = all(found.is_exact for found in sums)
    rows = tuple(row for found in sums for row in found.rows)
    if name in _PLAIN:
        before, after = dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
        is_wide = before == after or jnp.promote_types(before, after) == after
        return one._replace(is_exact=is_exact and name != "neg") if is_wide else "rounded"
    if name in _MOVED:
        return one._replace(is_exact=is_exact and name not in ("slice", "split", "unstack"))
    if name == "concatenate" or (name == "pad" and inputs[1].is_public):
        return one._replace(rows=rows, is_exact=is_exact)
    if name == "broadcast_in_dim":
        ratio = size / max(1, sizes[0])
        return one.scaled(math.sqrt(ratio), ratio == 1)
    if name in (*ADDITIONS, "sub") and is_beside:
        is_exact &= len(sums) == 1 or (len(rows) == 2 and name != "sub")
        return one._replace(rows=added(sums), is_exact=is_exact)
    if name in ("mul", "div") and len(sums) == 1 and is_beside:
        factor = _factor(inputs, name)
        if factor is not None:
            return one.scaled(*factor)
        return "nonlinear" if name == "div" and inputs[0].sum is None else "factor"
    is_nonlinear = name in ENTRY_BY_ENTRY - {"select_n"} and is_beside
    return "nonlinear" if is_nonlinear else "linear"


def _factor(inputs: list[Fact], name: str) -> tuple[float, bool] | None:
    """The largest factor of a sum, and whether all its entries have it."""
    other = inputs[0 if inputs[1].sum is not None else 1]
    value = value_of(other)
    if value is None or not np.size(value) or (name == "div" and other is inputs[0]):
        return None
    with np.errstate(divide="ignore"):
        values = np.asarray(value).astype(np.float64) ** (-1 if name == "div" else 1)
    most = float(np.abs(values).max())
    return (most, bool(values.min() == most)) if math.isfinite(most) else None


def added(found: Sequence[Sum]) -> tuple[Terms, ...]:
    """A bound on the sum of several: for each leaf, the bound on all rows together."""
    if len(found) == 1:
        return found[0].rows
    gains = defaultdict[Any, float](float)
    for one in found:
        squares = defaultdict[Any, float](float)
        for term in (term for row in one.rows for term in row):
            squares[term.leaf] += term.gain**2
        for leaf, square in squares.items():
            gains[leaf] += math.sqrt(square)
    return (frozenset(Term(leaf, gain) for leaf, gain in gains.items()),)


class Source(NamedTuple):
    """A clipped sum.

    Attributes:
        bound: the largest L2 norm by which one example moves it.
        batches: the loops in whose turns it is of other batches.
        rows: which private arguments it is of, by their length.
        unit: of what the clip norm is: `dp.Users`, or None for single rows.
        line: the source line.
    """

    bound: float
    batches: frozenset[Hashable]
    rows: int
    unit: Any
    line: str


class Release(NamedTuple):
    """Noise on clipped sums.

    Attributes:
        rows: the sums that the noise was added to, leaf by leaf.
        stddev: of the noise; of correlated noise, what a step adds to that of steps before.
        correlation: how noise depends on that of steps before.
        is_exact: whether the bounds of the rows are reached.
        batches: in whose turns it is of other batches.
        context: where.
    """

    rows: tuple[Terms, ...]
    stddev: float
    correlation: Banded
    is_exact: bool
    batches: frozenset[Hashable]
    context: Context


def noise_multiplier(releases: Sequence[Release], sources: Mapping[Any, Source]) -> float:
    """The noise multiplier of several releases together; infinite without any.

    Let M be the matrix of the effect of one example on all released numbers, each divided by the
    standard deviation of its noise. The result is 1 / max |M x|. Rows of M of the same clipped sums
    are taken together, and the others add in squares. By Minkowski, |M x| is at most the sum over
    clipped sums of the norm of their columns times their bound.
    """
    of_sums: defaultdict[frozenset[Any], list[dict[Any, float]]] = defaultdict(list)
    for release in releases:
        times = math.sqrt(turns(release)[1]) / release.stddev
        for row in release.rows:
            names = frozenset(term.leaf[0] for term in row)
            of_sums[names].append({t.leaf: t.gain and times * t.gain for t in row})
    total = 0.0
    for names, rows in of_sums.items():
        norms = {name: _norm(rows, name) for name in names}
        total += sum(norm and norm * sources[name].bound for name, norm in norms.items()) ** 2
    return math.inf if total == 0 else 1 / math.sqrt(total)


def _norm(rows: list[dict[Any, float]], name: Hashable) -> float:
    """A bound on the norm of the columns of one clipped sum.

    The square of a matrix's norm is at most the largest sum of a row of its square.
    """
    sums = defaultdict[Any, float](float)
    for row in rows:
        own = {leaf: value for leaf, value in row.items() if leaf[0] == name}
        for leaf, value in own.items():
            sums[leaf] += value * sum(own.values())
    return math.sqrt(max(sums.values(), default=0.0))


def turns(release: Release) -> tuple[int, float]:
    """How often a release is made: on other batches, and on the same one again."""
    others, again = 1, 1.0
    for loop in release.context.loops:
        if loop.path in release.batches:
            others *= loop.length or 0
        else:
            again *= loop.length or math.inf
    return others, again
