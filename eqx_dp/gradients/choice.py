"""Which method a batch goes through, and how many examples of it at once.

`auto` is a formula of shapes, platform, memory and the sampling probability, never of data. It
takes book-keeping, unless one example would hold too much memory: then ghost. Of the microbatches
that fit it takes that of least expected work,

    work = examples x (3 F + N + move x M) + microbatches x (move x 6 D + kernels x start).

F are the operations of the loss's contractions (5 F for ghost's two passes), N those of the norms,
M the numbers that are moved for norms and sums (`LeafCost`), D the trained entries that the loss
uses. A microbatch reads the parameters twice, writes its sums, and adds them to the totals.

| | CPU | others |
|---|---|---|
| `move`: one number | 16 | 64: 16 operations a byte |
| `start`: one kernel | 1e5 | 1e8: 2 us at 50e12 operations a second |
| one example at once | 1.25 times the operations | no more |
| memory for a microbatch | 30 MiB less the sums, or two examples | 0.4 of the device's |

The figures of the CPU are measured on two cores: above 32 MiB the C library gives temporary memory
back to the system after each call, and the next call pays for fresh pages. Those of others are
data sheets'; nothing of them was measured.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..device import device_memory, is_cpu
from ..privacy import SampleSize
from .cost import LeafCost, move

# Bytes for a microbatch and the sums of all gradients on a CPU, unless two examples need more.
_CPU_SHARE = 30 * 2**20
# How many times as long as in a larger microbatch an example takes on a CPU that is alone in one.
_ALONE = 1.25
# The share of memory that per-example parts may take.
_MEMORY_SHARE = 0.4
# Numbers moved for an entry and a microbatch. Measured on two CPU cores: 3 (CNN) to 8 (MLP).
_MOVED_BY_A_PASS = 6
# Kernels for a leaf: forward, backward, norm, sum.
_KERNELS = 10
# What one normal number costs (20 rounds of threefry, and the inverse error function).
_NORMAL = 500
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


class Work(NamedTuple):
    """What a device is expected to do in a step, in floating-point operations (or equivalents).

    Attributes:
        gradient: for the examples that there are, with what norms and weighted sum add.
        padding: for the slots that are left over in microbatches that hold an example.
        passes: for adding up the sums of microbatches.
        noise: for drawing it.
    """

    gradient: float
    padding: float
    passes: float
    noise: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(self))


class Choice(NamedTuple):
    """What the engine does with a batch.

    Attributes:
        method: the method.
        microbatch_size: how many examples at once on a device; None for all slots.
        reason: why.
        held: bytes that are held for an example until its clip factor is known, by estimate.
        batch: the batch of a device.
        work: what it is expected to do.
    """

    method: str
    microbatch_size: int | None
    reason: str
    held: int
    batch: DeviceBatch
    work: Work


def choose(
    costs: list[LeafCost],
    sizes: list[int],
    flops: float,
    activations: int,
    batch: DeviceBatch,
    method: str,
    microbatch_size: int | None,
) -> Choice:
    """The method and the microbatch, from what was asked for and from what is held for each.

    Args:
        costs: of every leaf.
        sizes: entries of every leaf.
        flops: of all contractions in one example's loss and the gradient of that.
        activations: bytes that its forward pass leaves for its backward pass.
        batch: the batch of a device.
        method: as asked for, as the microbatch is.
        microbatch_size: examples at once on a device.
    """
    chosen, memory = "book_keeping" if method == "auto" else method, device_memory()
    held = max(1, activations, sum(cost.bytes for cost in costs))
    reason = "as asked for"
    if method == "auto":
        reason = f"{held / 2**20:.2f} MiB are held for an example, activations among them"
        if memory is not None and held > _MEMORY_SHARE * memory:
            share = f"{held / 2**20:.0f} MiB an example, of {memory / 2**20:.0f}"
            chosen, reason = "ghost", f"{share}, is too much to hold"
    if chosen == "per_example":
        costs = [cost.forming(size) for cost, size in zip(costs, sizes, strict=True)]
        held = max(1, activations, sum(cost.bytes for cost in costs))
    elif chosen == "ghost":
        flops, held = 5 / 3 * flops, max(1, activations)
    its = _Method(costs, sizes, flops, held)
    if method == "auto" and microbatch_size is None:
        microbatch_size = _best_size(its, batch, _fitting(its, batch.slots, memory))
    return Choice(chosen, microbatch_size, reason, held, batch, its.work(batch, microbatch_size))


class _Method(NamedTuple):
    """What a method does for each example.

    Attributes:
        costs: of every leaf, by this method.
        sizes: entries of every leaf.
        flops: of all contractions.
        held: bytes that are held for an example until its clip factor is known.
    """

    costs: list[LeafCost]
    sizes: list[int]
    flops: float
    held: int

    def work(self, batch: DeviceBatch, size: int | None) -> Work:
        """What is expected by a microbatch size: whole microbatches, as many as are needed."""
        size = min(size or max(1, batch.slots), max(1, batch.slots))
        of_one = float(self.flops + sum(cost.norm_flops for cost in self.costs))
        of_one += move() * sum(cost.moved for cost in self.costs)
        of_one *= _ALONE if size == 1 and is_cpu() else 1
        leaves = zip(self.costs, self.sizes, strict=True)
        used = [entries for cost, entries in leaves if cost.way != "unused"]
        starting = _KERNELS * len(used) * (1e5 if is_cpu() else 1e8)
        count, real = batch.microbatches(size), batch.real
        return Work(
            of_one * real,
            of_one * (size * count - real),
            (move() * _MOVED_BY_A_PASS * sum(used) + starting) * count,
            float(_NORMAL * sum(self.sizes)),
        )


def _best_size(method: _Method, batch: DeviceBatch, most: int) -> int | None:
    """The microbatch of least work, of those that fit; None for all slots."""
    sizes = _sizes(most, batch.slots)
    best = min(sizes, key=lambda size: method.work(batch, size).total, default=batch.slots)
    return best if best < batch.slots else None


def _sizes(most: int, slots: int) -> Iterator[int]:
    """Sizes to choose from: few, multiples of 8, even parts of the batch, and most."""
    yield from (2**i for i in range(int(math.log2(_ALIGNED))) if 2**i <= most)
    yield from range(_ALIGNED, most + 1, _ALIGNED)
    yield from (n for n in range(2, most + 1, 2) if slots % n == 0)
    if most > 0:
        yield most


def _fitting(method: _Method, slots: int, memory: int | None) -> int:
    """The largest microbatch whose parts fit."""
    held = method.held
    available = held * slots if memory is None else int(_MEMORY_SHARE * memory)
    if is_cpu():
        available = min(available, max(_CPU_SHARE - 4 * sum(method.sizes), 2 * held))
    if held * slots <= available:
        return slots
    return 2 ** int(math.log2(max(1, available // held)))
