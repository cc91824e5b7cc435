"""What each way costs, which one to take, and how many examples to take at once."""

import math
import os
from typing import NamedTuple

import jax

from .leaves import SiteSizes, Way, sets_of_uses, site_sizes
from .sites import lookup
from .taps import Site, Survey

# What moving one number to or from memory costs, in floating-point operations, on a CPU.
_MOVE = 16
# What a CPU program may hold at once, by estimates from above: beyond, fresh pages and missed
# caches cost more than going through the batch in parts, each with one more pass over the sums.
_CPU_SHARE = 64 * 2**20
# The share of all gradients that book-keeping has to save example by example to be worth it.
_LITTLE = 0.1
# The share of memory that per-example parts may take.
_MEMORY_SHARE = 0.4


class LeafCost(NamedTuple):
    """How one leaf is treated, and what that costs for one example.

    Attributes:
        kinds: the kinds of its sites.
        way: ``"ghost"``, ``"kept"``, ``"whole"``, or ``"unused"``.
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

    @property
    def is_ghost(self) -> bool:
        """Whether its gradient is never formed example by example."""
        return self.way == "ghost"


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
    if only_rows or inner <= 3 * _MOVE * entries:
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
        return LeafCost(kinds, "ghost", inner or of_factors, forming, held, reason)
    reason = f"{_told(sites)}: forming {entries:,} entries is cheaper than inner products of steps"
    held += 4 * entries
    return LeafCost(kinds, "kept", 2 * entries, forming + 2 * entries, held, reason)


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


class Choice(NamedTuple):
    """What the engine does with a batch."""

    method: str
    microbatch_size: int | None
    reason: str


def choose(
    costs: list[LeafCost],
    params: list[jax.Array],
    activations: int,
    num_examples: int,
    method: str,
    microbatch_size: int | None,
) -> Choice:
    """The method and the microbatch, from what was asked for and from what is held for each.

    Args:
        costs: of every leaf.
        params: every leaf.
        activations: bytes that one example's forward pass leaves for its backward pass.
        num_examples: the batch.
        method: as asked for.
        microbatch_size: as asked for.
    """
    if method != "auto":
        return Choice(method, microbatch_size, "as asked for")
    memory = _memory()
    if _forms_nearly_all(costs, params):
        chosen, why = "per_example", "nearly all gradients are formed by either method"
        held = sum(4 * param.size for param in params) + activations
    else:
        chosen, why = "book_keeping", "most of it is never formed example by example"
        held = max(1, activations, sum(cost.bytes for cost in costs))
    reason = f"{why}; {held / 2**20:.2f} MiB are held for an example"
    if memory is not None and held > _MEMORY_SHARE * memory:
        reason = f"{held / 2**20:.0f} MiB an example, of {memory / 2**20:.0f}, is too much to hold"
        chosen, held = "ghost", max(1, activations)
    if microbatch_size is None:
        microbatch_size = _microbatch_size(held, num_examples, memory)
    return Choice(chosen, microbatch_size, reason)


def _forms_nearly_all(costs: list[LeafCost], params: list[jax.Array]) -> bool:
    """Whether book-keeping has little to save: it forms each example's gradient of most leaves.

    It does so in the accumulate dtype, which is worth its price where gradients are narrower.
    """
    avoided = sum(param.size for cost, param in zip(costs, params, strict=True) if cost.is_ghost)
    is_wide = all(param.dtype.itemsize >= 4 for param in params)
    return is_wide and avoided <= _LITTLE * sum(param.size for param in params)


def _memory() -> int | None:
    """Bytes of memory of the device, or of the host where it is the device; None if unknown."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no such question on this system
        return None


def _microbatch_size(held: int, num_examples: int, memory: int | None) -> int | None:
    if jax.local_devices()[0].platform == "cpu":
        available = _CPU_SHARE
    else:
        available = held * num_examples if memory is None else int(_MEMORY_SHARE * memory)
    if held * num_examples <= available:
        return None
    return 2 ** int(math.log2(max(1, available // held)))
