"""Choices that follow from shapes: factored or formed, the method, the microbatch.

A leaf of n entries whose uses meet T vectors each of lengths a and b is factored if

    T^2 (a + b) operations + 11 numbers moved for each one met < 6 numbers moved for each entry,

because its norm comes from inner products of all pairs of vectors, while a formed gradient is
written, read for its norm and read for the sum. Measured on two CPU cores. Ghost forms only leaves
whose gradient takes no more memory than the vectors that the backward pass holds anyway.

`auto` is a formula of shapes, device, memory and the sampling probability, never of data. On CPUs
it takes book-keeping, or ghost if one example would need too much memory; on GPUs and TPUs the
method of least expected work of those by which one example fits. Where no microbatch size is given,
any method takes the one of least expected work of those that fit in memory,

    work = examples x (3 F + N + move x M) + microbatches x (move x (6 D + 12 S) + kernels x start).

F are the operations of the loss's contractions (4 F for ghost, with two passes back), N those of
the norms, M the numbers that are moved for norms and sums (`LeafCost`), D the trained entries that
the loss uses. A microbatch reads the parameters twice, writes its sums, and adds them to the
totals. S are the numbers that a microbatch holds beyond a core's share of the cache.

| | CPU | others |
|---|---|---|
| `move`: four bytes | 16 | the products in that time: an H100 80, in 16 bits 1,181 |
| `start`: one kernel | 1e5 | likewise, in 2 us, or 0.5 us of a TPU |
| kernels for a leaf | 10 | 23 if factored, 9 if formed |
| passes of ghost over N, M, kernels | 1 | 2 |
| one example at once | 1.25 times the operations | no more |
| cache | 12 MiB | none |
| memory for a microbatch | 256 MiB, or two examples | 0.4 of the device's |

The figures of the CPU are measured on two cores with 1 MiB of second-level cache each, for MLPs of
1 to 100 million parameters and the models of `tests.benchmarks`. Those of others are data sheets'
(`chips.toml`), kernels are counted in compiled programs; nothing of them was measured.
"""

import functools
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ..device import device_kind, device_memory, is_cpu, platform
from ..privacy import SampleSize
from .arguments import METHODS, Configuration
from .blocks import BLOCK
from .uses import Member, ParamUse, Uses, overlaps, parts_of_uses

Way: TypeAlias = Literal["factored", "formed", "unused"]

# Numbers moved for an entry of a formed gradient (many examples are copied for the sum; if they
# stay in the cache of a core, only operations count), and for a number that a use multiplies
# (scaled, masked, weighted).
_OF_FORMED, _OF_MANY, _OF_CACHED, _MET = 6, 12, 3, 11
_CACHE = 2**15


class Chip(NamedTuple):
    """Peaks of one accelerator by its data sheet, without sparsity.

    Attributes:
        flops_16: of products of 16 bits, in FLOP/s.
        flops_8: of products of float8; those of 16 bits where there are none.
        flops_32: of products of float32 at the highest precision: on a TPU six passes of bfloat16.
        memory: bytes.
        bandwidth: of memory, bytes/s.
        links: between devices, bytes/s one way.
        start: of a kernel, seconds.
        wait: of the host for a flag on the device, seconds.
    """

    flops_16: float
    flops_8: float
    flops_32: float
    memory: float
    bandwidth: float
    links: float
    start: float
    wait: float


_SHEETS = Path(__file__).with_name("chips.toml").read_text(encoding="utf-8")
CHIPS = {name: Chip(**its) for name, its in tomllib.loads(_SHEETS).items()}
"""Data sheets, by a part of JAX's `device_kind`; `chips.toml` names their sources."""


def chip() -> Chip:
    """The accelerator that programs are made for; another of its platform if it is not known."""
    known = (its for name, its in CHIPS.items() if name in device_kind())
    return next(known, CHIPS["TPU v5 lite" if platform() == "tpu" else "A100"])


def move(is_narrow: bool = False) -> float:
    """The cost of moving four bytes to or from memory, in floating-point operations of products."""
    return 16 if is_cpu() else 4 / chip().bandwidth * _peak(is_narrow)


def _peak(is_narrow: bool) -> float:
    return chip().flops_16 if is_narrow else chip().flops_32


class LeafCost(NamedTuple):
    """How one leaf is treated, and what that costs for one example.

    Attributes:
        uses: the kinds of its uses, one an equation.
        way: whether it is factored or formed.
        norm_flops: floating-point operations for the norm.
        sum_flops: the same for the weighted sum.
        bytes: memory that is held for it until the clip factor is known.
        reason: why this way.
    """

    uses: tuple[str, ...]
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
    def moved(self) -> float:
        """Numbers moved for one example, besides those that an ordinary gradient moves."""
        of_formed = _OF_MANY if is_cpu() else _OF_FORMED
        return self.bytes / 4 * {"factored": _MET, "formed": of_formed, "unused": 0}[self.way]


def leaf_costs(
    uses: Uses, sizes: list[int], is_spread: list[bool], method: str
) -> tuple[Uses, list[LeafCost]]:
    """The uses of the factored leaves, and how a method treats every leaf: by shapes and platform.

    Args:
        uses: of all leaves.
        sizes: entries of every leaf.
        is_spread: whether a device holds a part of it over example axes.
        method: the method.
    """
    leaves = range(len(sizes))
    costs = [_leaf_cost(uses, leaf, sizes[leaf], is_spread[leaf], method) for leaf in leaves]
    formed = {leaf: cost.reason for leaf, cost in enumerate(costs) if cost.way == "formed"}
    return uses.forming(formed), costs


def _leaf_cost(of_all: Uses, leaf: int, size: int, is_spread: bool, method: str) -> LeafCost:
    uses = tuple(of_all.of[leaf].values())
    kinds = tuple(use.name for use in uses)
    formed = LeafCost(kinds, "formed", 2 * size, 2 * size, 4 * size, of_all.formed.get(leaf, ""))
    if formed.reason:
        return formed
    if not uses:
        return LeafCost((), "unused", 0, 0, 0, "the loss does not depend on it")
    if method == "per_example":
        return formed._replace(reason="this method forms every leaf")
    sets = overlaps(uses)
    if sets is None:
        return formed._replace(reason=f"{len(uses)} uses: of parts that may overlap")
    terms = sum(use.terms for use in uses)
    count = "one step" if terms == 1 else f"{terms} steps"
    held = sum(use.bytes for use in uses)
    inner = sum(_inner_products(uses, members) for members in sets)
    forming = sum(_outer_products(use) for use in uses)
    factored = LeafCost(kinds, "factored", inner or 2 * held // 4, forming, held, "")
    if all(use.kind.always for use in uses):
        return factored._replace(reason=uses[0].kind.always)
    if inner == 0:
        return factored._replace(reason=f"{count}: |x| |g| is the norm")
    entries = sum(math.prod(uses[members[0].use].matrices) for members in sets)
    if is_cpu() and 4 * entries <= _CACHE:
        is_cheaper = inner <= move() * _OF_CACHED * entries
    else:
        moving = move(parts_of_uses(uses, np.dtype(np.float32)) > 0)
        is_cheaper = inner + moving * factored.moved <= moving * _OF_FORMED * entries
    if is_cheaper:
        reason = f"{count}: their inner products are cheaper than {entries:,} entries"
        return factored._replace(reason=reason)
    is_small = uses[0].is_held and not is_spread and formed.bytes <= held
    if method == "ghost" and len(uses) == 1 and not uses[0].is_repeated and not is_small:
        norm_flops = min(inner, forming + 2 * entries)
        reason = f"{count}: measured where it is used, on the way back"
        return factored._replace(norm_flops=norm_flops, reason=reason)
    if is_spread:
        return factored._replace(reason=f"{count}: no device holds {entries:,} entries")
    reason = f"{count}: forming {entries:,} entries is cheaper than their inner products"
    return formed._replace(reason=reason)


def _outer_products(use: ParamUse) -> int:
    """Floating-point operations for adding up all outer products."""
    groups, _, _ = use.matrices
    of_data, of_cotangent = use.lengths
    return 2 * groups * use.terms * max(1, of_data) * of_cotangent


def _inner_products(uses: tuple[ParamUse, ...], members: tuple[Member, ...]) -> int:
    """Floating-point operations for the inner products of all terms of uses that overlap."""
    overlapping = [uses[member.use] for member in members]
    terms = sum(use.terms for use in overlapping)
    if terms == 1:
        return 0
    groups, _, _ = overlapping[0].matrices
    # Rows of a lookup are compared, or picked from the other side, which costs almost nothing.
    of_data = 0 if any(use.kind.is_one_hot for use in overlapping) else overlapping[0].lengths[0]
    return 2 * groups * terms**2 * (of_data + overlapping[0].lengths[1]) // 2


# What a microbatch holds on a CPU beyond so many bytes is written to memory and read again: so many
# numbers moved for each.
_CACHED, _MOVED_BY_SPILLING = 12 * 2**20, 12
# More memory, or more than two examples need, costs the system as much time as the work: 64 formed
# gradients of 32 MiB took twice as long at once as 8 at a time.
_MOST_ON_CPU = 256 * 2**20
# How many times as long as in a larger microbatch an example takes on a CPU that is alone in one.
_ALONE = 1.25
# The share of memory that per-example data may take.
_MEMORY_SHARE = 0.4
# Numbers moved for an entry and a microbatch. Measured on two CPU cores: 3 (CNN) to 8 (MLP).
_MOVED_BY_A_PASS = 6
# Kernels for a leaf: forward, backward, norm, sum. On accelerators, read from compiled programs.
_KERNELS_ON_CPU = 10
_KERNELS = {"factored": 23, "formed": 9, "unused": 0}
# XLA divides work between cores by the leading axis: odd sizes leave some of them idle.
_ALIGNED = 8


class DeviceBatch(NamedTuple):
    """The batch of a device.

    Attributes:
        slots: how many examples there is room for.
        sample: how many examples the batch of all devices holds; None if every slot holds one.
    """

    slots: int
    sample: SampleSize | None = None

    def microbatches(self, size: int) -> float:
        """The expected number of microbatches that hold an example."""
        if self.sample is None:
            return float(-(-self.slots // size))
        return self.sample.microbatches(size, self.slots)

    @property
    def real(self) -> float:
        """The expected number of examples; of the device that has most."""
        return self.microbatches(1)


class Choice(NamedTuple):
    """How the engine processes a batch.

    Attributes:
        method: the method.
        microbatch_size: how many examples at once on a device; None for all slots.
        reason: why.
        held: bytes that are held for an example until its clip factor is known, by estimate.
        batch: the batch of a device.
        work: the expected work, in floating-point operations.
    """

    method: str
    microbatch_size: int | None
    reason: str
    held: int
    batch: DeviceBatch
    work: float


def choose(
    costs: dict[str, list[LeafCost]],
    sizes: list[int],
    flops: float,
    activations: int,
    batch: DeviceBatch,
    options: Configuration,
    is_narrow: bool,
) -> Choice:
    """The method and the microbatch, from the options and the memory that each method needs.

    Args:
        costs: of every leaf, by each method.
        sizes: entries of every leaf.
        flops: of all contractions in one example's loss and the gradient of that.
        activations: bytes that its forward pass leaves for its backward pass.
        batch: the batch of a device.
        options: the method, and how many examples at once on a device; None to choose it.
        is_narrow: whether products are in 16 bits.
    """
    is_auto = options.method == "auto"
    memory = device_memory() or (math.inf if is_cpu() else chip().memory)
    if is_auto and not is_cpu():
        given = costs, sizes, flops, activations, batch
        ways = [choose(*given, options._replace(method=way), is_narrow) for way in METHODS]
        fitting = [its for its in ways if its.held <= _MEMORY_SHARE * memory]
        best = min(fitting or ways, key=lambda its: its.work if fitting else its.held)
        return best._replace(reason=f"the least time by data sheets, for {device_kind()}")
    chosen = "book_keeping" if is_auto else options.method
    held = max(1, activations, sum(cost.bytes for cost in costs[chosen]))
    reason = "as asked for"
    if is_auto:
        reason = f"{held / 2**20:.2f} MiB are held for an example, activations among them"
        if held > _MEMORY_SHARE * memory:
            share = f"{held / 2**20:.0f} MiB an example, of {memory / 2**20:.0f}"
            chosen, reason = "ghost", f"{share}, is too much to hold"
    if chosen == "ghost":
        formed = sum(cost.bytes for cost in costs[chosen] if cost.way == "formed")
        flops, held = 4 / 3 * flops, max(1, activations, formed)
    found = Choice(chosen, None, reason, held, batch, 0)
    work = functools.partial(_work, costs[chosen], sizes, flops, found, is_narrow)
    size = options.microbatch_size
    if size is None:
        possible = _sizes(_fitting(held, batch.slots, memory), batch.slots)
        best = min(possible, key=work, default=batch.slots)
        size = best if best < batch.slots else None
    return found._replace(microbatch_size=size, work=work(size or max(1, batch.slots)))


def _work(
    costs: list[LeafCost], sizes: list[int], flops: float, way: Choice, is_narrow: bool, size: int
) -> float:
    """The expected work with a microbatch size: whole microbatches, as many as needed.

    Args:
        costs: of every leaf, by the method.
        sizes: entries of every leaf.
        flops: of all contractions.
        way: the method, what it holds, and the batch.
        is_narrow: whether products are in 16 bits.
        size: of a microbatch.
    """
    passes = 2 if way.method == "ghost" and not is_cpu() else 1
    of_one = float(flops + passes * sum(cost.norm_flops for cost in costs))
    of_one += passes * move(is_narrow) * sum(cost.moved for cost in costs)
    of_one *= _ALONE if size == 1 and is_cpu() else 1
    used = [its for cost, its in zip(costs, sizes, strict=True) if cost.way != "unused"]
    if is_cpu():
        starting = _KERNELS_ON_CPU * len(used) * 1e5
    else:
        kernels = passes * sum(_KERNELS[cost.way] for cost in costs)
        starting = kernels * chip().start * _peak(is_narrow)
    spilled = max(0, size * way.held - _CACHED) / 4 if is_cpu() else 0
    moved = _MOVED_BY_A_PASS * sum(used) + _MOVED_BY_SPILLING * spilled
    of_pass = size * of_one + move(is_narrow) * moved + starting
    return of_pass * way.batch.microbatches(size)


def _sizes(most: int, slots: int) -> Iterator[int]:
    """Sizes to choose from: few, multiples of 8 or of a block, even parts of the batch, most."""
    yield from (2**i for i in range(int(math.log2(_ALIGNED))) if 2**i <= most)
    yield from range(_ALIGNED, min(most, BLOCK) + 1, _ALIGNED)
    yield from range(2 * BLOCK, most + 1, BLOCK)
    yield from (n for n in range(2, min(most, 2 * BLOCK) + 1, 2) if slots % n == 0)
    if most > 0:
        yield most


def _fitting(held: int, slots: int, memory: float) -> int:
    """The largest microbatch that fits in memory."""
    available = min(_MEMORY_SHARE * memory, held * slots)
    if is_cpu():
        available = min(available, max(_MOST_ON_CPU, 2 * held))
    return min(slots, max(1, int(available // held)))
