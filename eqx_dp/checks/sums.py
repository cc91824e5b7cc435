"""Clipped sums: linear functions of them, and how far one example moves a release."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from ..privacy import Banded
from ..programs import ENTRY_BY_ENTRY, UNCHANGED, Context, named
from .facts import Fact, Sum, reached, turns_of
from .variables import dtype_of, size_of

_MOVED = UNCHANGED | named(
    "convert_element_type neg reshape rev transpose squeeze broadcast_in_dim"
)
ADDITIONS = named("add add_any")


def linear(context: Context, equation: JaxprEqn, inputs: list[Fact]) -> Fact:
    """The fact about the result of an equation on clipped sums and public values."""
    found, is_nonlinear = _linear(equation, inputs), equation.primitive.name in _NONLINEAR
    why = f"a clipped sum is in it, through '{equation.primitive.name}'"
    reach = reached(inputs, why, context.line, is_nonlinear)
    if found is not None:
        reach = reach._replace(why="", where="")
    return Fact(reach, turns=turns_of(inputs), sum=found)


_NONLINEAR = ENTRY_BY_ENTRY - named("select_n mul div add add_any sub convert_element_type")


def _linear(equation: JaxprEqn, inputs: list[Fact]) -> Sum | None:
    """The sum; None if no bound of it is known."""
    name = equation.primitive.name
    sums = [fact.sum for fact in inputs if fact.sum is not None]
    sizes, result = [size_of(v) for v in equation.invars], size_of(equation.outvars[0])
    if len({found.over for found in sums}) > 1:
        return None
    if name == "concatenate":  # side by side
        return sums[0]._replace(terms=tuple(term for one in sums for term in one.terms))
    if not all(fact.is_public or n == result for fact, n in zip(inputs, sizes, strict=True)):
        return None
    if name in _MOVED:
        before, after = dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
        return sums[0] if jnp.promote_types(before, after) == after else None
    if name in ADDITIONS or name == "sub":
        return added(sums)
    if name in ("mul", "div"):
        factor = _factor(inputs, name)
        return None if factor is None else sums[0].scaled(factor)
    return None


def _factor(inputs: list[Fact], name: str) -> float | None:
    """The factor of a sum, if it is a constant of the program."""
    first, second = inputs
    factor = second.value if first.sum is not None else first.value
    if factor is None or (name == "div" and (first.sum is None or not factor)):
        return None
    factor = abs(1 / factor if name == "div" else factor)
    return factor if math.isfinite(factor) else None


def added(sums: Sequence[Sum]) -> Sum | None:
    """The sum of several: bounds add up. Leaves of one clipped sum are not added to each other."""
    terms = [term for one in sums for term in one.terms]
    leaves = {term.leaf for term in terms}
    is_apart = len(leaves) == len({name for name, _ in leaves})
    return sums[0]._replace(terms=tuple(terms)) if is_apart else None


def is_added_to(body: Jaxpr, start: int, end: int) -> bool:
    """Whether a loop does nothing with a value that it carries but add something to it once.

    Neither the value before nor the value after is read by anything else.

    Args:
        body: of the loop.
        start: which of its arguments the value is, at the beginning of a turn.
        end: which of its results it is, at the end.
    """
    before, after = body.invars[start], body.outvars[end]
    additions = [one for one in body.eqns if one.primitive.name in ADDITIONS]
    results = [one.outvars for one in additions if before in one.invars]
    read = [*body.outvars, *(variable for one in body.eqns for variable in one.invars)]
    return results == [[after]] and read.count(before) == read.count(after) == 1


class Source(NamedTuple):
    """A clipped sum.

    Attributes:
        bound: the largest L2 norm by which one example moves it.
        batches: the loops in whose turns it is of other batches.
        unit: of what the clip norm is: `dp.Users`, or None for single rows.
        line: the source line.
    """

    bound: float
    batches: frozenset[Hashable]
    unit: Any
    line: str


class Release(NamedTuple):
    """Noise on clipped sums.

    Attributes:
        sums: those that the noise was added to, leaf by leaf.
        stddev: of the noise; of correlated noise, what a step adds to that of steps before.
        correlation: how noise depends on that of steps before.
        batches: in whose turns it is of other batches.
        context: where.
    """

    sums: tuple[Sum, ...]
    stddev: float
    correlation: Banded
    batches: frozenset[Hashable]
    context: Context


def noise_multiplier(releases: Sequence[Release], sources: Mapping[Any, Source]) -> float:
    """The noise multiplier of several releases together; infinite without any.

    Let M be the matrix of the effect of one example on all released numbers, each divided by the
    standard deviation of its noise. The result is 1 / max |M x|. Arrays of the same clipped sums
    are taken together, and the others add in squares. By Minkowski, |M x| is at most the sum over
    clipped sums of the norm of their columns times their bound. Each array is of one leaf of a
    clipped sum, or several of them side by side, so that norm is the largest of a leaf.
    """
    squares = defaultdict[frozenset[Any], defaultdict[Any, float]](lambda: defaultdict(float))
    for release in releases:
        times = math.sqrt(turns(release)[1]) / release.stddev
        for one in release.sums:
            gains = defaultdict[Any, float](float)
            for term in one.terms:
                gains[term.leaf] += term.gain and times * term.gain
            for leaf, gain in gains.items():
                squares[frozenset(name for name, _ in gains)][leaf] += gain**2
    parts = list[float]()
    for names, of_leaves in squares.items():
        norms = dict.fromkeys(names, 0.0)
        for (name, _), square in of_leaves.items():
            norms[name] = max(norms[name], math.sqrt(square))
        parts.append(sum(norm and norm * sources[name].bound for name, norm in norms.items()))
    total = math.hypot(*parts)
    return 1 / total if total else math.inf


def turns(release: Release) -> tuple[int, float]:
    """How often a release is made: on other batches, and on the same one again."""
    others, again = 1, 1.0
    for loop in release.context.loops:
        if loop.path in release.batches:
            others *= loop.length or 0
        else:
            again *= loop.length or math.inf
    return others, again


def is_tight(releases: Sequence[Release], sources: Mapping[Any, Source]) -> bool:
    """Whether the noise multiplier is certainly no larger: of one clipped sum, each leaf once."""
    leaves = [term.leaf for one in releases for each in one.sums for term in each.terms]
    return len(sources) == len(releases) == 1 and len({*leaves}) == len(leaves)
