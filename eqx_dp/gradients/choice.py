"""Which method a batch goes through, and how many examples of it at once.

`auto` is a formula of shapes, platform, memory and the sampling probability. It takes the method
and the microbatch whose expected work is least, of those that fit. Work is counted in
floating-point operations; moving a number and starting a kernel count as so many of them.

    work = examples x (3 F + N + move x M(b)) + microbatches x (move x 6 D + kernels x start)

F are the operations of the loss's contractions, and D are the trained entries that the loss uses. N
are the operations of the norms and M the numbers that are moved for them and for the weighted sum,
leaf by leaf (`LeafCost`), with b examples at once. Ghost goes back twice: it computes 5 F in the
place of 3 F. A microbatch reads the parameters twice (forward, backward), writes its sums, and adds
them to the totals (three more).

| | CPU | others |
|---|---|---|
| `move`: one number | 16 | 64: 16 operations a byte |
| `start`: one kernel | 1e5 | 1e8: 2 us at 50e12 operations a second |
| one example at once | 1.25 times the operations | no more |
| memory for a microbatch | 30 MiB less the sums, or two examples | 0.4 of the device's |

The figures of the CPU are measured on two cores. Above 32 MiB the C library gives temporary memory
back to the system after each call, and the next call pays for fresh pages. CPU time, beside that of
the microbatch that is chosen, with the temporary memory of the compiled program:

| | half of it | chosen | twice as many |
|---|---|---|---|
| vision transformer | | 4 (14 MiB) | 1.4 (33 MiB) |
| U-Net | 1.04 (13 MiB) | 4 (26 MiB) | 1.24 (53 MiB) |
| MLP mixer | 0.99 (11 MiB) | 8 (20 MiB) | 1.15 (50 MiB) |
| GPT of haliax blocks | 1.02 (15 MiB) | 4 (30 MiB) | 1.17 (61 MiB) |
| small GPT, 64 tokens | 0.99 (14 MiB) | 8 (29 MiB) | |
| mixture of experts | 0.97 (14 MiB) | 16 (27 MiB) | |
| BERT, by book-keeping | | 2 (24 MiB) | 1.03 to 1.13 (32 MiB) |

What is held for an example is the larger of its activations (`activations.py`) and its gradients,
which come where activations were. A gradient is there twice if a scan stacks it, or if it is found
through another value (`LeafCost.copies`). Compiled programs of 24 models that hold more than 0.3
MiB an example hold 0.8 to 1.4 times as much. Beside a microbatch there are the sums of all
gradients: 15 of BERT's 24 MiB.

Two at once are taken however large they are: one by one, each example takes longer, by more than
what fresh pages cost. Beyond, the pages count. Of a GPT with 512 tokens (41 MiB an example) two at
once take 0.73 to 0.93 of the time of one by one (0.87 of the CPU time), four 0.87 to 0.95, eight
1.05 to 1.45; with 1024 tokens (135 MiB) two take 0.7 to 0.97 (0.84), four 1.05.

Those of others are data sheets': float32 operations outside of tensor cores over bytes of memory,
in a second, are 12 (A100), 20 (H100) and 14 (H200). Nothing of them was measured.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from ..device import device_memory, is_cpu
from ..privacy import SampleSize
from .cost import LeafCost, move

# Bytes for a microbatch and the sums of all gradients on a CPU, unless two examples need more.
_CPU_SHARE = 30 * 2**20
# How many times as long as in a larger microbatch an example takes on a CPU that is alone in one:
# 1.25 (GPT), 1.4 (an MLP of 5.8 million entries, example by example), 1.5 (U-Net).
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
    params: list[jax.Array],
    flops: float,
    activations: int,
    batch: DeviceBatch,
    method: str,
    microbatch_size: int | None,
) -> Choice:
    """The method and the microbatch, from what was asked for and from what is held for each.

    Args:
        costs: of every leaf.
        params: every leaf.
        flops: of all contractions in one example's loss and the gradient of that.
        activations: bytes that its forward pass leaves for its backward pass.
        batch: the batch of a device.
        method: as asked for, as the microbatch is.
        microbatch_size: examples at once on a device.
    """
    sizes = [param.size for param in params]
    formed = [cost.differentiated(size) for cost, size in zip(costs, sizes, strict=True)]
    of_leaves, of_formed = (sum(cost.bytes for cost in its) for its in (costs, formed))
    methods = {
        "book_keeping": _Method(costs, sizes, flops, max(1, activations, of_leaves)),
        "per_example": _Method(formed, sizes, flops, max(1, activations, of_formed)),
        "ghost": _Method(costs, sizes, 5 / 3 * flops, max(1, activations)),
    }
    if method != "auto":
        asked = methods[method]
        work = asked.work(batch, microbatch_size)
        return Choice(method, microbatch_size, "as asked for", asked.held, batch, work)
    memory = device_memory()

    def at_its_best(method: _Method) -> tuple[int | None, Work]:
        size = microbatch_size
        if size is None:
            size = _best_size(method, batch, _fitting(method, batch.slots, memory))
        return size, method.work(batch, size)

    best = {name: at_its_best(method) for name, method in methods.items()}
    of_uses, of_each = (best[name][1].total for name in ("book_keeping", "per_example"))
    is_wide = all(param.dtype.itemsize >= 4 for param in params)
    if not is_wide or of_uses < of_each:
        chosen, than, ratio = "book_keeping", "per_example", of_uses / max(of_each, 1)
    else:
        chosen, than, ratio = "per_example", "book_keeping", of_each / max(of_uses, 1)
    held = methods[chosen].held
    reason = (
        f"{ratio:.2f} of the work of {than}; {held / 2**20:.2f} MiB are held for an example, "
        "activations among them"
    )
    if not is_wide:
        reason = f"narrow gradients are added up in the accumulate dtype; {reason}"
    if memory is not None and held > _MEMORY_SHARE * memory:
        share = f"{held / 2**20:.0f} MiB an example, of {memory / 2**20:.0f}"
        chosen, reason = "ghost", f"{share}, is too much to hold"
    size, work = best[chosen]
    return Choice(chosen, size, reason, methods[chosen].held, batch, work)


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
        leaves = [*zip(self.costs, self.sizes, strict=True)]
        of_one = float(self.flops + sum(cost.norm_flops for cost in self.costs))
        of_one += move() * sum(cost.moved(entries, size) for cost, entries in leaves)
        of_one *= _ALONE if size == 1 and is_cpu() else 1
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
