"""The largest microbatch that fits into the memory of a device, found by compiling."""

import os
from collections.abc import Mapping
from typing import Any, SupportsIndex, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, PyTree

from ..planning import largest_microbatch, read_compiled
from ..privacy import whole_number
from .hosts import broadcast
from .state import TrainState
from .step import Step

Model = TypeVar("Model")


def fitted(
    step: Step[Model],
    state: TrainState[Model],
    batch: tuple[PyTree[Any], ...],
    mask: Bool[Array | np.ndarray, " batch"],
    extra: Mapping[str, Any],
    memory: SupportsIndex | None,
    known: int | None = None,
) -> Step[Model]:
    """The step with a microbatch size, where it was made with "auto"; nothing is run for it.

    Args:
        step: any step.
        state: of the run; says what else is in memory.
        batch: one batch, where the step wants it.
        mask: of the batch.
        extra: what the optimizer's update takes beside.
        memory: bytes of a device; None for what the device says that it has, or on a CPU an equal
            part, for each of its devices, of what is free.
        known: a size that was found before, to be taken instead.

    Raises:
        ValueError: not even one example fits.
    """
    if step.microbatch_size != "auto":
        return step
    if known is not None:
        return step.with_microbatch_size(known)
    limit = (
        _device_memory() if memory is None else whole_number("memory", memory, least=1, most=2**60)
    )

    def bytes_of(size: int) -> int:
        sized = step.with_microbatch_size(size)
        lowered = sized.lower(state, *batch, is_padding_example=mask, extra=extra)
        found = read_compiled(lowered.compile())
        if found is None:
            raise ValueError(
                'microbatch_size is "auto", and the compiler of this platform does not say what '
                "memory a program takes. Give a number."
            )
        return found.total

    parts = 1 if step.sharding is None else step.sharding.num_shards
    size = largest_microbatch(bytes_of, limit, len(mask) // parts)
    return step.with_microbatch_size(broadcast(size))  # hosts may have different amounts free


def _device_memory() -> int:
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
