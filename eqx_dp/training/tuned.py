"""The method and the microbatch of a run that leaves them to the clock, or to the memory."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import jax
from jaxtyping import PyTree

from ..expected import RunPath
from ..gradients import takes_key
from ..planning import Tuning, largest_microbatch, limit_of, local_bytes, read_compiled, tune
from .directory import RUN, TUNING, record_in
from .files import CheckpointWarning, going_on, write_whole
from .first_model import FirstModel
from .hosts import broadcast, from_first_host, is_first_host
from .settings import MicrobatchSize
from .state import TrainState
from .step import Mask, Step

Model = TypeVar("Model")


def settled(
    step: Step[Model],
    first: FirstModel[Model],
    example: tuple[PyTree[Any], ...],
    directory: RunPath | None,
    device_memory: int | None,
    progress: bool,
) -> Step[Model]:
    """A step whose method and microbatch are known, where `microbatch_size` was "tune".

    A run that is recorded keeps what it is recorded with, on any machine: another method is another
    program, and another microbatch rounds otherwise. Else it is measured, before anything is
    released or recorded, on data that is made up. The table is written to `tuning.json`, for
    people: the record of the run says what was chosen.

    | case | what happens |
    |---|---|
    | `microbatch_size` is not "tune" | the step, as it is |
    | a run is recorded in the directory | its method and microbatch; nothing is measured |
    | it was recorded with "auto" microbatches | these |
    | killed before the run is recorded | the next start measures again |
    | several hosts, and no run is recorded | `ValueError`, which says what to do |
    | the table cannot be written | a `CheckpointWarning`; the run goes on |

    Raises:
        ValueError: as for [`tune`][].
        CheckpointError: the record of the run is damaged.
    """
    if step.microbatch_size != "tune":
        return step
    if directory is not None:
        kept = from_first_host(lambda: _recorded(directory, step))
        if kept is not None:
            return step.with_choice(*kept)
    tuning = _measured(step, first, example, device_memory, progress)
    if directory is not None and is_first_host():
        file = directory / TUNING
        told = f"The table of what was measured cannot be written to {file}"
        with going_on(told, CheckpointWarning):
            write_whole(file, tuning.to_json().encode())
    return step.with_choice(tuning.method, tuning.microbatch_size)


def _recorded(directory: RunPath, step: Step[Any]) -> tuple[str, MicrobatchSize] | None:
    """Method and microbatch of the run that is recorded; None if there is none."""
    if not (directory / RUN).exists():
        return None
    record = record_in(directory)
    return record["identity"].get("method", step.method), record["made_by"]["microbatch_size"]


def _measured(
    step: Step[Any],
    first: FirstModel[Any],
    example: tuple[PyTree[Any], ...],
    device_memory: int | None,
    progress: bool,
) -> Tuning:
    slots = step.sampler().capacity
    state = step.init(first.given, init_model=first.make)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), example)
    limit = limit_of(device_memory)
    if limit is not None:  # the optimizer's state is there, too, and is not given to the gradient
        limit = max(1, limit - sum(map(local_bytes, jax.tree.leaves(state.opt_state))))
    loss = cast(Any, step.grad_fn).__wrapped__
    tuned = tune(
        step.grad_fn,
        state.model,
        *batch,
        key=jax.random.key(0) if takes_key(loss, 1 + len(batch))[0] else None,
        memory_limit=limit,
        progress=progress and is_first_host(),
    )
    return tuned.tuning


def largest_size(
    step: Step[Model],
    state: TrainState[Model],
    given: tuple[tuple[Any, ...], Mask, Mapping[str, Any]],
    device_memory: int | None,
) -> int:
    """The largest microbatch that fits into the memory of a device; nothing is run for it."""
    batch, mask, extra = given
    limit = _device_memory() if device_memory is None else device_memory

    def bytes_of(size: int) -> int:
        sized = step.with_microbatch_size(size)
        lowered = sized.lower(state, *batch, is_padding_example=mask, extra=extra)
        found = read_compiled(lowered.compile())
        if found is None:
            raise ValueError(
                'microbatch_size is "auto", and the compiler of this platform does not say '
                "what memory a program takes. Give a number."
            )
        return found.total

    parts = 1 if step.sharding is None else step.sharding.num_shards
    size = largest_microbatch(bytes_of, limit, mask.shape[-1] // parts)
    return broadcast(size)  # hosts may have different amounts free


def _device_memory() -> int:
    """Bytes of a device, or on a CPU an equal part of what is free, for each of its devices."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
