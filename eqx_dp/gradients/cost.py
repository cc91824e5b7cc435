"""What each way costs, which one to take, and how many examples to take at once."""

import math
from typing import NamedTuple

import jax

from .leaves import Way, has_ghost, matrix_sizes
from .sites import lookup
from .taps import Survey

# What moving one number to or from memory costs, in floating-point operations, on a CPU.
_MOVE = 16
# A CPU program that needs more temporary memory than the first goes through its batch in parts that
# need about the second: fresh pages cost more than the loop does.
_CPU_LARGE, _CPU_TARGET = 64 * 2**20, 32 * 2**20
# The share of an accelerator's memory that per-example parts may take.
_ACCELERATOR_SHARE = 0.4


class LeafCost(NamedTuple):
    """How one leaf is treated, and what that costs for one example.

    Attributes:
        kinds: the kinds of its sites.
        way: ``"ghost"``, ``"kept"``, ``"whole"``, or ``"unused"``.
        flops: floating-point operations for norm and weighted sum.
        bytes: what is held for it until the clip factor is known.
        reason: why this way.
    """

    kinds: tuple[str, ...]
    way: Way
    flops: float
    bytes: int
    reason: str


def leaf_cost(found: Survey, leaf: int, parameter: jax.Array) -> LeafCost:
    """Chooses the way of one leaf. It depends on shapes alone."""
    size = parameter.size
    if leaf in found.whole:
        return LeafCost((), "whole", 4 * size, 4 * size, found.whole[leaf])
    sites = [site for _, site in found.of(leaf)]
    if not sites:
        return LeafCost((), "unused", 0, 0, "the loss does not depend on it")
    kinds = tuple(site.kind.name for site in sites)
    held = sum(_bytes(site.tap) + _bytes(site.kept) for site in sites)
    if not has_ghost(sites):
        reason = (
            f"{len(sites)} uses: their gradients are added up"
            if len(sites) > 1
            else "no larger than what it meets"
        )
        flops = sum(2 * math.prod(site.tap.shape) for site in sites) + 4 * size
        return LeafCost(kinds, "kept", flops, held + 4 * size, reason)
    (site,) = sites
    if site.kind is lookup:
        rows = math.prod(site.kept.shape)
        entries = math.prod(site.tap.shape) // max(rows, 1)
        flops = 2 * rows * rows * entries + 2 * rows * entries
        return LeafCost(kinds, "ghost", flops, held, "only the rows that were looked up count")
    groups, time, features_in, features_out = matrix_sizes(site)
    outer = 2 * groups * time * features_in * features_out
    entries = groups * features_in * features_out
    gram = 2 * groups * time**2 * (features_in + features_out) if time > 1 else 0
    if gram <= 3 * _MOVE * entries:
        reason = (
            "one step: |x| |g| is the norm"
            if time == 1
            else f"{time} steps: their inner products are cheaper than {entries:,} entries"
        )
        return LeafCost(kinds, "ghost", outer + gram, held, reason)
    reason = f"{time} steps: forming {entries:,} entries is cheaper than inner products of steps"
    return LeafCost(kinds, "kept", outer + 4 * entries, held + 4 * entries, reason)


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
    costs: list[LeafCost], num_examples: int, method: str, microbatch_size: int | None
) -> Choice:
    """The method and the microbatch, from what was asked for and from what is held for each."""
    if method != "auto":
        return Choice(method, microbatch_size, "as asked for")
    held = max(1, sum(cost.bytes for cost in costs))
    reason = f"{held / 2**20:.2f} MiB are held for an example until its clip factor is known"
    if microbatch_size is None:
        microbatch_size = _microbatch_size(held, num_examples)
    return Choice("book_keeping", microbatch_size, reason)


def _microbatch_size(held: int, num_examples: int) -> int | None:
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        large, target = _CPU_LARGE, _CPU_TARGET
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit", 0)
        large = target = int(memory * _ACCELERATOR_SHARE) or held * num_examples
    if held * num_examples <= large:
        return None
    return min(num_examples, 2 ** int(math.log2(max(1, target // held))))
