"""Which leaves are factored, which are formed, and what that costs.

A leaf of n entries whose uses meet T vectors each of lengths a and b is factored if

    T^2 (a + b) operations + 11 numbers moved for each one met < 6 numbers moved for each entry,

for its norm is found from inner products of all vectors with all, while a gradient that is formed
is written, read for its norm and read for the sum. Measured on two CPU cores.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from ..device import is_cpu
from ..programs import CHEAP, REARRANGED, Call, Scan, inside, interpret
from .leaves import Member, overlaps
from .taps import Uses
from .uses import ParamUse, contraction, lookup

Way: TypeAlias = Literal["factored", "formed", "unused"]

# Numbers moved for an entry of a gradient that is formed (where it is many, copies are made to sum
# it; where it stays in the cache of a core, only operations count), and for a number that a use
# meets (scaled, masked, weighted).
_OF_FORMED, _OF_MANY, _OF_CACHED, _MET = 6, 12, 3, 11
_CACHE = 2**15


def move() -> int:
    """What moving one number to or from memory costs, in floating-point operations."""
    return 16 if is_cpu() else 64


class LeafCost(NamedTuple):
    """How one leaf is treated, and what that costs for one example.

    Attributes:
        kinds: the kinds of its uses, one an equation.
        way: whether it is factored or formed.
        norm_flops: floating-point operations for the norm.
        sum_flops: the same for the weighted sum.
        bytes: what is held for it until the clip factor is known.
        reason: why this way.
        steps: see `num_steps`.
    """

    kinds: tuple[str, ...]
    way: Way
    norm_flops: float
    sum_flops: float
    bytes: int
    reason: str
    steps: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations for norm and weighted sum."""
        return float(self.norm_flops + self.sum_flops)

    @property
    def moved(self) -> float:
        """Numbers moved for one example, beside those that an ordinary gradient moves."""
        return self.bytes / 4 * {"factored": _MET, "formed": _OF_MANY, "unused": 0}[self.way]

    def forming(self, size: int) -> "LeafCost":
        """The same where each example's gradient of so many entries is formed."""
        if self.way == "unused":
            return self
        reason = "each example's gradient is formed by the backward pass itself"
        reason = self.reason if self.way == "formed" else reason
        return LeafCost(self.kinds, "formed", 2 * size, 2 * size, 4 * size, reason)


def leaf_costs(found: Uses, sizes: list[int]) -> tuple[Uses, list[LeafCost]]:
    """Chooses the way of every leaf, by shapes and platform alone; the uses of those factored."""
    costs = [_leaf_cost(found, leaf, size) for leaf, size in enumerate(sizes)]
    costs = [cost._replace(steps=num_steps(found, leaf)) for leaf, cost in enumerate(costs)]
    formed = {leaf: cost.reason for leaf, cost in enumerate(costs) if cost.way == "formed"}
    return found.forming(formed), costs


def _leaf_cost(found: Uses, leaf: int, size: int) -> LeafCost:
    uses = tuple(found.of[leaf].values())
    kinds = tuple(use.name for use in uses)
    formed = LeafCost(kinds, "formed", 2 * size, 2 * size, 4 * size, found.formed.get(leaf, ""))
    if formed.reason:
        return formed
    if not uses:
        return LeafCost((), "unused", 0, 0, 0, "the loss does not depend on it")
    sets = overlaps(uses)
    if sets is None:
        return formed._replace(reason=f"{len(uses)} uses: their parts of it overlap")
    steps = sum(use.steps for use in uses)
    told = "one step" if steps == 1 else f"{steps} steps"
    held = sum(_bytes((use.result, use.residuals)) for use in uses)
    inner = sum(_inner_products(uses, members) for members in sets)
    forming = sum(_outer_products(use) for use in uses)
    factored = LeafCost(kinds, "factored", inner or 2 * held // 4, forming, held, "")
    if all(use.kind is lookup for use in uses):
        return factored._replace(reason="only the rows that were looked up count")
    if inner == 0:
        return factored._replace(reason=f"{told}: |x| |g| is the norm")
    entries = sum(math.prod(uses[members[0].use].matrices) for members in sets)
    if 4 * entries <= _CACHE:
        is_cheaper = inner <= move() * _OF_CACHED * entries
    else:
        is_cheaper = inner + move() * _MET * held / 4 <= move() * _OF_FORMED * entries
    if is_cheaper:
        reason = f"{told}: their inner products are cheaper than {entries:,} entries"
        return factored._replace(reason=reason)
    reason = f"{told}: forming {entries:,} entries is cheaper than their inner products"
    return formed._replace(reason=reason)


def num_steps(found: Uses, leaf: int) -> int:
    """How many vectors of data a leaf meets at most, the tokens of a sequence, say.

    It is 0 where the leaf is not used in contractions and lookups alone.
    """
    uses = found.of[leaf].values()
    if any(use.kind is not contraction and use.kind is not lookup for use in uses):
        return 0
    return max((use.steps for use in uses), default=0)


def _outer_products(use: ParamUse) -> int:
    """Floating-point operations for adding up all outer products."""
    groups, features_in, features_out = use.matrices
    return 2 * groups * use.steps * (1 if use.kind is lookup else features_in) * features_out


def _inner_products(uses: tuple[ParamUse, ...], members: tuple[Member, ...]) -> int:
    """Floating-point operations for the inner products of all steps of uses that overlap."""
    its = [uses[member.use] for member in members]
    steps = sum(use.steps for use in its)
    if steps == 1 and all(use.kind is not lookup for use in its):
        return 0
    groups, features_in, features_out = its[0].matrices
    # Rows of a lookup are compared, or picked from the other side: next to nothing.
    rows = 0 if any(use.kind is lookup for use in its) else features_in
    return 2 * groups * steps**2 * (rows + features_out) // 2


def _bytes(shapes: object) -> int:
    return sum(
        math.prod(s.shape) * s.dtype.itemsize
        for s in jax.tree.leaves(shapes)
        if isinstance(s, jax.ShapeDtypeStruct)
    )


_FOUND_AGAIN = REARRANGED | CHEAP


def activation_bytes(jaxpr: jex_core.Jaxpr, of_example: Sequence[bool]) -> int:
    """A crude estimate: all float results that depend on the example, but for cheap arithmetic.

    A scan's count as often as it runs, and a checkpoint's not at all.

    Args:
        jaxpr: the loss of one example.
        of_example: of each of its inputs whether it is the example's.
    """
    return _held(jaxpr, of_example)[0]


def _held(jaxpr: jex_core.Jaxpr, of_example: Sequence[bool]) -> tuple[int, list[bool]]:
    """The bytes, and which results depend on the example."""
    held = [0]

    def of_equation(equation: jex_core.JaxprEqn, inputs: list[bool]) -> list[bool]:
        if not any(inputs):
            return [False] * len(equation.outvars)
        match inside(equation):
            case Call(wrapper, body) if len(body.jaxpr.invars) == len(inputs):
                size, results = _held(body.jaxpr, inputs)
                held[0] += size if wrapper != "remat" else _size(equation.invars)
                return results
            case Scan() as scan:
                held[0] += scan.length * _held(scan.body.jaxpr, [True] * len(inputs))[0]
            case _ if equation.primitive.name not in _FOUND_AGAIN:
                held[0] += _size(equation.outvars)
            case _:
                pass
        return [True] * len(equation.outvars)

    consts = [False] * len(jaxpr.constvars)
    results = interpret(jaxpr, consts, of_example, of_equation, lambda _: False)
    return held[0], results


def _size(variables: Sequence[Any]) -> int:
    avals = [variable.aval for variable in variables]
    return sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in avals
        if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)
    )
