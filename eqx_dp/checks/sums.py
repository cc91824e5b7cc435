"""Linear functions of clipped sums, and their sensitivity to one example."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..privacy import Banded
from ..programs import ENTRY_BY_ENTRY, UNCHANGED, named
from .facts import Fact, Kind, Row, Term, made_of, value_of
from .flow import Context, dtype_of, size_of

_PLAIN = UNCHANGED | {"convert_element_type", "neg"}
_MOVED = named("reshape transpose squeeze rev slice")


class Source(NamedTuple):
    """A clipped sum.

    Attributes:
        bound: the largest L2 norm by which one example moves it.
        loops: those in whose turns it is of other batches.
    """

    bound: float
    loops: frozenset[Hashable]


class Release(NamedTuple):
    """Noise on clipped sums.

    Attributes:
        rows: the sums that the noise was added to, leaf by leaf.
        stddev: of the noise; of correlated noise, what a step adds to that of steps before.
        correlation: how noise depends on that of steps before.
        is_exact: whether the bounds of the rows are reached.
        loops: in whose turns it is of other batches.
        context: where.
        is_certified: whether the noise is the one that is proven.
    """

    rows: tuple[Row, ...]
    stddev: float
    correlation: Banded
    is_exact: bool
    loops: frozenset[Hashable]
    context: Context
    is_certified: bool


def linear(context: Context, equation: JaxprEqn, inputs: list[Fact]) -> Fact:
    """The result of an equation on clipped sums and public values."""
    name, first = equation.primitive.name, inputs[0]
    found = made_of(inputs, "linear", context.line)
    sums = [fact for fact in inputs if fact.kind is Kind.SUM]
    if len({fact.over for fact in sums}) > 1:
        return found._replace(reason="devices")
    size, sizes = size_of(equation.outvars[0]), [size_of(v) for v in equation.invars]
    is_beside = all(fact.is_public or n == size for fact, n in zip(inputs, sizes, strict=True))
    is_random, is_exact = any(fact.is_random for fact in sums), all(fact.is_exact for fact in sums)
    rows = tuple(row for fact in inputs for row in fact.rows)
    if name in _PLAIN:
        before, after = dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
        if before != after and jnp.promote_types(before, after) != after:
            return found._replace(reason="rounded")
        is_exact = is_exact and name != "neg"
    elif name in _MOVED or name == "concatenate" or (name == "pad" and inputs[1].is_public):
        is_exact = is_exact and name != "slice"
    elif name == "broadcast_in_dim":
        ratio = size / max(1, sizes[0])
        rows, is_exact = scaled(rows, math.sqrt(ratio)), is_exact and ratio == 1
    elif name in ("add", "add_any", "sub") and is_beside:
        is_random = any(fact.is_random for fact in inputs)
        is_exact = is_exact and (len(sums) == 1 or (len(rows) == 2 and name != "sub"))
        rows = added([fact.rows for fact in sums])
    elif name in ("mul", "div") and len(sums) == 1 and is_beside:
        factor = _factor(inputs, name)
        if factor is None:
            is_nonlinear = name == "div" and first.kind is not Kind.SUM
            return found._replace(reason="nonlinear" if is_nonlinear else "factor")
        rows, is_exact = scaled(rows, factor[0]), is_exact and factor[1]
    else:
        is_nonlinear = name in ENTRY_BY_ENTRY - {"select_n"} and is_beside
        return found._replace(reason="nonlinear" if is_nonlinear else "linear")
    of_sum = {"rows": rows, "over": sums[0].over, "is_exact": is_exact, "is_random": is_random}
    return found._replace(kind=Kind.SUM, reason="", where="", **of_sum)


def scaled(rows: tuple[Row, ...], factor: float) -> tuple[Row, ...]:
    """Rows after a linear function whose norm is at most `factor`."""
    return tuple(frozenset(Term(term.leaf, term.gain * factor) for term in row) for row in rows)


def added(found: Sequence[tuple[Row, ...]]) -> tuple[Row, ...]:
    """A bound on the sum of several: for each leaf, the bound on all rows together."""
    if len(found) == 1:
        return found[0]
    gains = defaultdict[Any, float](float)
    for rows in found:
        squares = defaultdict[Any, float](float)
        for term in (term for row in rows for term in row):
            squares[term.leaf] += term.gain**2
        for leaf, square in squares.items():
            gains[leaf] += math.sqrt(square)
    return (frozenset(Term(leaf, gain) for leaf, gain in gains.items()),)


def _factor(inputs: list[Fact], name: str) -> tuple[float, bool] | None:
    """The largest factor of a sum, and whether all its entries have it."""
    other = inputs[0 if inputs[1].kind is Kind.SUM else 1]
    value = value_of(other)
    if value is None or not np.size(value) or (name == "div" and other is inputs[0]):
        return None
    with np.errstate(divide="ignore"):
        values = np.asarray(value).astype(np.float64) ** (-1 if name == "div" else 1)
    most = float(np.abs(values).max())
    return (most, bool(values.min() == most)) if math.isfinite(most) else None


# The sensitivity of releases.


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
        if loop.path in release.loops:
            others *= loop.length or 0
        else:
            again *= loop.length or math.inf
    return others, again
