"""What each way to the gradient of a leaf costs, and which one to take."""

import math
from typing import NamedTuple

import jax

from .cross_terms import overlaps
from .leaves import Way
from .taps import Uses
from .uses import ParamUse, contraction, lookup

MOVE = 16
"""What moving one number to or from memory costs, in floating-point operations, on a CPU."""


class LeafCost(NamedTuple):
    """How one leaf is treated, and what that costs for one example.

    Attributes:
        kinds: the kinds of its uses, one an equation.
        way: how its norm and its sum are found, as in `Row`.
        norm_flops: floating-point operations for the norm.
        sum_flops: the same for the weighted sum, with what forms the gradients that it adds up.
        bytes: what is held for it until the clip factor is known.
        reason: why this way.
    """

    kinds: tuple[str, ...]
    way: Way
    norm_flops: float
    sum_flops: float
    bytes: int
    reason: str

    @property
    def flops(self) -> float:
        """Floating-point operations for norm and weighted sum."""
        return float(self.norm_flops + self.sum_flops)

    def differentiated(self, size: int) -> "LeafCost":
        """The same where each example's gradient of so many entries is differentiated anyway."""
        if self.way == "unused":
            return self
        reason = "each example's gradient is formed by the backward pass itself"
        reason = self.reason if self.way == "whole" else reason
        return LeafCost(self.kinds, "whole", 2 * size, 2 * size, 4 * size, reason)


def leaf_cost(found: Uses, leaf: int, parameter: jax.Array) -> LeafCost:
    """Chooses the way of one leaf. It depends on shapes alone."""
    size = parameter.size
    if leaf in found.whole:
        return LeafCost((), "whole", 2 * size, 2 * size, 4 * size, found.whole[leaf])
    uses = tuple(found.of[leaf].values())
    if not uses:
        return LeafCost((), "unused", 0, 0, 0, "the loss does not depend on it")
    kinds = tuple(use.kind.name for use in uses)
    held = sum(_bytes((use.result, use.residuals)) for use in uses)
    sets = overlaps(uses, parameter.shape)
    if sets is None:
        reason = (
            f"{len(uses)} uses: their gradients are added up"
            if len(uses) > 1
            else "no larger than what it meets"
        )
        forming = sum(2 * math.prod(use.result.shape) for use in uses)
        return LeafCost(kinds, "kept", 2 * size, forming + 2 * size, held + 4 * size, reason)
    of_sets = [[(_sizes(uses[m.use]), m.transposed) for m in members] for members in sets]
    only_rows = all(use.kind is lookup for use in uses)
    entries = sum(math.prod(first.matrices) for (first, _), *_ in of_sets)
    forming = sum(use.outer for of_set in of_sets for use, _ in of_set)
    inner = sum(map(_inner_products, of_sets))
    if only_rows or inner <= 3 * MOVE * entries:
        reason = (
            "only the rows that were looked up count"
            if only_rows
            else f"{_told(uses)}: |x| |g| is the norm"
            if inner == 0
            else f"{_told(uses)}: their inner products are cheaper than {entries:,} entries"
        )
        # Where there is one outer product, its norm is that of its two factors.
        first = [use.matrices for (use, _), *_ in of_sets]
        of_factors = sum(2 * groups * (x + g) for groups, x, g in first)
        return LeafCost(kinds, "inner_products", inner or of_factors, forming, held, reason)
    reason = f"{_told(uses)}: forming {entries:,} entries is cheaper than inner products of steps"
    held += 4 * entries
    return LeafCost(kinds, "kept", 2 * entries, forming + 2 * entries, held, reason)


def num_steps(found: Uses, leaf: int) -> int:
    """How many vectors of data a leaf meets at most, the tokens of a sequence, say.

    It is 0 where the leaf is not used in contractions and lookups alone.
    """
    uses = found.of[leaf].values()
    if any(use.kind is not contraction and use.kind is not lookup for use in uses):
        return 0
    return max((use.steps for use in uses), default=0)


class _Sizes(NamedTuple):
    """What one example's gradient is made of at a use of matrices.

    Attributes:
        matrices: its shape: groups, features in and out.
        steps: how many outer products there are in each group.
        is_lookup: whether these are rows, each added where it was looked up.
    """

    matrices: tuple[int, ...]
    steps: int
    is_lookup: bool

    @property
    def outer(self) -> int:
        """Floating-point operations for adding up all outer products."""
        groups, features_in, features_out = self.matrices
        return 2 * groups * self.steps * (1 if self.is_lookup else features_in) * features_out


def _sizes(use: ParamUse) -> _Sizes:
    assert use.matrices is not None
    return _Sizes(use.matrices.shape, use.steps, use.kind is lookup)


def _told(uses: tuple[ParamUse, ...]) -> str:
    count = f"{len(uses)} uses, " if len(uses) > 1 else ""
    total = sum(use.steps for use in uses)
    return f"{count}{'one step' if total == 1 else f'{total} steps'}"


def _inner_products(uses: list[tuple[_Sizes, bool]]) -> int:
    """Floating-point operations for the inner products of all steps of uses that overlap."""
    if all(use.is_lookup for use, _ in uses):
        steps = sum(use.steps for use, _ in uses)
        first, _ = uses[0]
        groups, _, entry = first.matrices
        return 2 * groups * steps**2 * entry
    if sum(use.steps for use, _ in uses) == 1:
        return 0
    flops = 0
    for i, (one, one_transposed) in enumerate(uses):
        for other, transposed in uses[: i + 1]:
            # Rows of a lookup are compared, or picked from the other side: next to nothing.
            sides = zip(_widths(one, one_transposed), _widths(other, transposed), strict=True)
            width = sum(min(pair) for pair in sides)
            flops += 2 * one.matrices[0] * one.steps * other.steps * width
    return flops


def _widths(use: _Sizes, transposed: bool) -> tuple[int, int]:
    _, features_in, features_out = use.matrices
    features_in = 0 if use.is_lookup else features_in
    return (features_out, features_in) if transposed else (features_in, features_out)


def _bytes(shapes: object) -> int:
    return sum(
        math.prod(s.shape) * s.dtype.itemsize
        for s in jax.tree.leaves(shapes)
        if isinstance(s, jax.ShapeDtypeStruct)
    )
