"""What each way to the gradient of a leaf costs, and which one to take."""

import math
from typing import NamedTuple

import jax

from .leaves import SiteSizes, Way, sets_of_uses, site_sizes
from .sites import contraction, lookup
from .taps import Site, Survey

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


def leaf_cost(found: Survey, leaf: int, parameter: jax.Array) -> LeafCost:
    """Chooses the way of one leaf. It depends on shapes alone."""
    size = parameter.size
    if leaf in found.whole:
        return LeafCost((), "whole", 2 * size, 2 * size, 4 * size, found.whole[leaf])
    sites = [site for _, site in found.of(leaf)]
    if not sites:
        return LeafCost((), "unused", 0, 0, 0, "the loss does not depend on it")
    kinds = tuple(site.kind.name for site in sites)
    held = sum(_bytes(site.tap) + _bytes(site.kept) for site in sites)
    sets = sets_of_uses(sites, jax.ShapeDtypeStruct(parameter.shape, parameter.dtype))
    if sets is None:
        reason = (
            f"{len(sites)} uses: their gradients are added up"
            if len(sites) > 1
            else "no larger than what it meets"
        )
        forming = sum(2 * math.prod(site.tap.shape) for site in sites)
        return LeafCost(kinds, "kept", 2 * size, forming + 2 * size, held + 4 * size, reason)
    of_sets = [[(site_sizes(sites[m.use]), m.turned) for m in members] for members in sets]
    only_rows = all(site.kind is lookup for site in sites)
    entries = sum(math.prod(first.matrices) for (first, _), *_ in of_sets)
    forming = sum(use.outer for uses in of_sets for use, _ in uses)
    inner = sum(map(_inner_products, of_sets))
    if only_rows or inner <= 3 * MOVE * entries:
        reason = (
            "only the rows that were looked up count"
            if only_rows
            else f"{_told(sites)}: |x| |g| is the norm"
            if inner == 0
            else f"{_told(sites)}: their inner products are cheaper than {entries:,} entries"
        )
        # Where there is one outer product, its norm is that of its two factors.
        first = [use.matrices for (use, _), *_ in of_sets]
        of_factors = sum(2 * groups * (x + g) for groups, x, g in first)
        return LeafCost(kinds, "inner_products", inner or of_factors, forming, held, reason)
    reason = f"{_told(sites)}: forming {entries:,} entries is cheaper than inner products of steps"
    held += 4 * entries
    return LeafCost(kinds, "kept", 2 * entries, forming + 2 * entries, held, reason)


def num_steps(found: Survey, leaf: int) -> int:
    """How many vectors of data a leaf meets at most, the tokens of a sequence, say.

    It is 0 where the leaf is not used in contractions and lookups alone.
    """
    sites = [site for _, site in found.of(leaf)]
    if any(site.kind is not contraction and site.kind is not lookup for site in sites):
        return 0
    return max((site_sizes(site).steps for site in sites), default=0)


def _told(sites: list[Site]) -> str:
    uses = f"{len(sites)} uses, " if len(sites) > 1 else ""
    total = sum(site_sizes(site).steps for site in sites)
    return f"{uses}{'one step' if total == 1 else f'{total} steps'}"


def _inner_products(uses: list[tuple[SiteSizes, bool]]) -> int:
    """Floating-point operations for the inner products of all terms of uses that overlap."""
    if all(use.is_lookup for use, _ in uses):
        terms = sum(use.steps for use, _ in uses)
        first, _ = uses[0]
        groups, _, entry = first.matrices
        return 2 * groups * terms**2 * entry
    if sum(use.steps for use, _ in uses) == 1:
        return 0
    flops = 0
    for i, (one, one_turned) in enumerate(uses):
        for other, turned in uses[: i + 1]:
            # Rows of a lookup are compared, or picked from the other side: next to nothing.
            sides = zip(_widths(one, one_turned), _widths(other, turned), strict=True)
            width = sum(min(pair) for pair in sides)
            flops += 2 * one.matrices[0] * one.steps * other.steps * width
    return flops


def _widths(use: SiteSizes, turned: bool) -> tuple[int, int]:
    _, features_in, features_out = use.matrices
    features_in = 0 if use.is_lookup else features_in
    return (features_out, features_in) if turned else (features_in, features_out)


def _bytes(shapes: object) -> int:
    return sum(
        math.prod(s.shape) * s.dtype.itemsize
        for s in jax.tree.leaves(shapes)
        if isinstance(s, jax.ShapeDtypeStruct)
    )
