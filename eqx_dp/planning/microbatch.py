"""The largest microbatch that fits a device."""

import bisect
from collections.abc import Callable
from typing import Any

import optax

from ..expected import whole_number
from ..gradients import ClippedGrad, MethodName
from ..trees import PyTree
from .memory import MemoryPlan, plan_memory, told

_COMPILES = 8


def largest_microbatch(
    bytes_of: Callable[[int], int],
    limit: int,
    most: int,
    guess: Callable[[int], int] | None = None,
    compiles: int = _COMPILES,
) -> int:
    """The largest number of examples at once whose bytes are within the limit.

    Bytes are nearly affine in the microbatch, so a few looks are enough: at `most`, or where the
    guess says, then where the line through what is known meets the limit.

    Guarantee: what is returned was looked at, and is within the limit. It is the largest number if
    bytes grow with it and `compiles` looks were enough to close in on it; else a smaller one.

    Args:
        bytes_of: the true bytes of a microbatch, by compiling, say. It is called at most
            `compiles` times, and once more for one example.
        limit: bytes that there are.
        most: the largest microbatch to think of: a device's part of the batch.
        guess: a cheap estimate of the same, to start from.
        compiles: how often to look.

    Raises:
        ValueError: even one example does not fit; or `limit` or `most` is below 1.
    """
    for name, value in (("limit", limit), ("most", most)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}.")
    known: dict[int, int] = {}
    fits, too_large = 0, most + 1
    next_ = most
    if guess is not None:
        next_ = max(1, bisect.bisect_right(range(1, most + 1), limit, key=guess))
    while too_large - fits > 1 and len(known) < compiles:
        known[next_] = bytes_of(next_)
        if known[next_] <= limit:
            fits = next_
        else:
            too_large = next_
        next_ = _on_the_line(known, limit, fits, too_large)
    if fits:
        return fits
    least = known[1] if 1 in known else bytes_of(1)
    if least <= limit:
        return 1
    raise ValueError(
        f"Not even one example at a time fits: it takes {least:,} bytes a device ({told(least)}), "
        f"of {limit:,} ({told(limit)}). Take method='ghost' with jax.checkpoint around the model's "
        "layers, which hold least; spread parameters and sums over more devices "
        "(ShardingRules(params=..., accumulators='examples')); or compute in a narrower dtype "
        "(policy=dp.load_policy('mixed_bfloat16'))."
    )


def _on_the_line(known: dict[int, int], limit: int, fits: int, too_large: int) -> int:
    """Where to look next: between what fits and what does not."""
    middle = (fits + too_large) // 2
    nearest = sorted(known, key=lambda size: min(abs(size - fits), abs(size - too_large)))[:2]
    if len(nearest) < 2 or known[nearest[0]] == known[nearest[1]]:
        aim = middle
    else:
        one, other = nearest
        slope = (known[other] - known[one]) / (other - one)
        aim = int(one + (limit - known[one]) / slope) if slope > 0 else middle
    return min(max(aim, fits + 1), too_large - 1)


def plan_microbatch(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    *batch: PyTree[Any],
    device_memory: int,
    optimizer: optax.GradientTransformation | None = None,
    key: Any = None,
    method: MethodName | None = None,
) -> int:
    """The largest microbatch with which a private step's compiled bytes fit a device.

    The search starts from the sum of parts and compiles the step at most 8 times. Nothing is run.

    Args:
        grad_fn: what `filter_clipped_grad` returned.
        model: the model; `jax.ShapeDtypeStruct` may stand for its arrays.
        *batch: the batch of all devices.
        device_memory: bytes of a device.
        optimizer: everything that happens to the gradient, as for `plan_memory`.
        key: as for `grad_fn`.
        method: replaces the method of `grad_fn`.

    Returns:
        The number of examples that a device processes at once.

    Raises:
        ValueError: even one example does not fit; and as for `plan_memory`.
    """
    limit = whole_number("device_memory", device_memory, least=1, most=2**60)

    def plan(size: int | None, compiled: bool) -> MemoryPlan:
        return plan_memory(
            grad_fn,
            model,
            *batch,
            optimizer=optimizer,
            key=key,
            method=method,
            microbatch_size=size,
            compiled=compiled,
        )

    first = plan(None, compiled=False)
    parts, size = first.parts, max(1, first.microbatch_size)
    each = parts.per_example // size
    rules = grad_fn.sharding
    return largest_microbatch(
        lambda size: plan(size, compiled=True).total,
        limit,
        max(1, first.num_examples // (1 if rules is None else rules.num_shards)),
        lambda size: parts.total - parts.per_example + each * size,
    )
