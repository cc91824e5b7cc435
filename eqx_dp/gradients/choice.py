"""Which method a batch goes through, and how many examples of it at once."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from ..device import device_memory, is_cpu
from ..privacy import SampleSize
from .cost import MOVE, LeafCost

# What a CPU program may hold at once, by estimates from above: beyond, fresh pages and missed
# caches cost more than going through the batch in parts, each with one more pass over the sums.
# Measured on two CPU cores: 32 or 64 examples of the CNN take 0.73 of the time of 128 (37 MiB), 4
# of the small GPT 0.96 of that of 8 (35 MiB). Of larger ones two at once are faster than one.
_CPU_SHARE = 32 * 2**20
# The share of memory that per-example parts may take.
_MEMORY_SHARE = 0.4
# The share of all gradients that book-keeping has to save example by example to be worth it.
_LITTLE = 0.1
# A microbatch writes its sums, and adds them to those of the ones before: numbers moved for each.
# Measured on two CPU cores: 3 (CNN) to 8 (MLP).
_MOVED_BY_A_PASS = 6
# What starting the kernels of one more microbatch costs beside that, where it is not a CPU.
_LAUNCHES = 1e9
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
        gradient: for the examples that there are.
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
    flops = float(flops + sum(cost.norm_flops for cost in costs))
    entries = sum(param.size for param in params)
    real = batch.real

    def work(size: int | None) -> Work:
        return _work(flops, entries, batch, real, size or max(1, batch.slots))

    held = {
        "per_example": sum(4 * param.size for param in params) + activations,
        "book_keeping": max(1, activations, sum(cost.bytes for cost in costs)),
        "ghost": max(1, activations),
    }
    if method != "auto":
        of_size = work(microbatch_size)
        return Choice(method, microbatch_size, "as asked for", held[method], batch, of_size)
    memory = device_memory()
    if _forms_nearly_all(costs, params):
        chosen, why = "per_example", "nearly all gradients are formed by either method"
    else:
        chosen, why = "book_keeping", "most of it is never formed example by example"
    reason = f"{why}; {held[chosen] / 2**20:.2f} MiB are held for an example"
    if memory is not None and held[chosen] > _MEMORY_SHARE * memory:
        share = f"{held[chosen] / 2**20:.0f} MiB an example, of {memory / 2**20:.0f}"
        chosen, reason = "ghost", f"{share}, is too much to hold"
    if microbatch_size is None:
        microbatch_size = _fitting(held[chosen], batch.slots, memory)
        if batch.sample is not None:
            sizes = _sizes(microbatch_size or batch.slots)
            best = min(sizes, key=lambda size: work(size).total, default=batch.slots)
            microbatch_size = best if best < batch.slots else None
    return Choice(chosen, microbatch_size, reason, held[chosen], batch, work(microbatch_size))


def _work(flops: float, entries: int, batch: DeviceBatch, real: float, size: int) -> Work:
    """What is expected by a microbatch size: whole microbatches are computed, as many as needed."""
    count = batch.microbatches(size)
    a_pass = MOVE * _MOVED_BY_A_PASS * entries + (0 if is_cpu() else _LAUNCHES)
    return Work(
        flops * real,
        flops * (min(size, batch.slots) * count - real),
        a_pass * count,
        float(_NORMAL * entries),
    )


def _sizes(most: int) -> Iterator[int]:
    """Microbatch sizes to choose from: powers of two, multiples of the last of them, and most."""
    yield from (2**i for i in range(int(math.log2(_ALIGNED))) if 2**i <= most)
    yield from range(_ALIGNED, most + 1, _ALIGNED)
    if most > 0:
        yield most


def _forms_nearly_all(costs: list[LeafCost], params: list[jax.Array]) -> bool:
    """Whether book-keeping has little to save: it forms each example's gradient of most leaves.

    It does so in the accumulate dtype, which is worth its price where gradients are narrower.
    """
    leaves = zip(costs, params, strict=True)
    avoided = sum(param.size for cost, param in leaves if cost.way == "inner_products")
    is_wide = all(param.dtype.itemsize >= 4 for param in params)
    return is_wide and avoided <= _LITTLE * sum(param.size for param in params)


def _fitting(held: int, slots: int, memory: int | None) -> int | None:
    """The largest microbatch whose parts fit; None for all slots."""
    if is_cpu():
        available = max(_CPU_SHARE, 2 * held if held <= _CPU_SHARE else 0)
    else:
        available = held * slots if memory is None else int(_MEMORY_SHARE * memory)
    if held * slots <= available:
        return None
    return 2 ** int(math.log2(max(1, available // held)))
