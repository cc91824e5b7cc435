"""The large parts of a step's memory, from shapes alone."""

import dataclasses
import math
from typing import Any

import jax

from ..gradients import slices_of
from ..precision import Policy, cast_parameters
from ..sharding import ShardingRules, axes_of, cut_of
from ..trees import is_key
from .step import PlannedStep

_KEY_BYTES = 32  # of a key, whose dtype names no size


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """The large parts of what one device holds in a step.

    Attributes:
        parameters: the model as it is stored, and the copies that the loss is given where those
            have other dtypes or are gathered from other devices. Of a parameter that is spread over
            example axes, a device's part, and what of all such is gathered at a time: the slices
            of one step of a scan over them, or the largest.
        gradients: the sum of clipped gradients, and with microbatches the sum of one of them. Each
            device holds a whole sum until the devices' sums are added, but for axes that examples
            are not spread over; where the parameter is spread over those, its part of the sum, and
            what of all such sums is there at a time before it is scattered.
        optimizer: the optimizer's state.
        batch: the examples and the mask.
        per_example: what the engine holds for the examples of one microbatch, by the estimate that
            it chooses a method by.
        noise: that of the largest leaf.
    """

    parameters: int
    gradients: int
    optimizer: int
    batch: int
    per_example: int
    noise: int

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(dataclasses.astuple(self))


def device_bytes(step: PlannedStep, policy: Policy | None) -> DeviceBytes:
    """Adds up the parts of a step, for one device."""
    call = step.call
    _, state, batch = map(jax.tree.leaves, step.arguments)
    slices = slices_of(call, step.rules)
    return DeviceBytes(
        parameters=_of_parameters(step, policy, slices.gathered),
        gradients=_of_sums(step, slices.scattered),
        optimizer=sum(map(local_bytes, state)),
        batch=sum(map(local_bytes, batch)),
        per_example=call.choice.held * call.at_once,
        noise=max(
            local_bytes(x)
            // x.dtype.itemsize
            * (policy.noise_dtype if policy else x.dtype).itemsize
            for x in step.accumulators
        ),
    )


def _of_parameters(step: PlannedStep, policy: Policy | None, slices: list[int | None]) -> int:
    """Bytes of the model, and of what the loss is given of it, gathered in so many slices."""
    model = given = jax.tree.leaves(step.arguments[0])  # as stored; in the dtypes of the loss
    if policy is not None:
        as_given = jax.eval_shape(lambda x: cast_parameters(x, policy), step.arguments[0])
        given = jax.tree.leaves(as_given)
    trained, frozen = iter(slices[: sum(step.is_trained)]), iter(slices[sum(step.is_trained) :])
    held, at_a_time = 0, _AtATime()
    for stored, copy, is_trained in zip(model, given, step.is_trained, strict=True):
        its = next(trained if is_trained else frozen)
        held += local_bytes(stored)
        if its:
            held += part_bytes(stored, copy.dtype)
            at_a_time.add(gathered_bytes(stored, copy.dtype, step.rules), its)
        else:  # not spread, or gathered once
            held += copy_bytes(stored, copy.dtype, step.rules)
    return held + at_a_time.most


def _of_sums(step: PlannedStep, slices: list[int | None]) -> int:
    """Bytes of the sums of clipped gradients, scattered in so many slices."""
    held, at_a_time = 0, _AtATime()
    for total, its in zip(step.sums, slices, strict=True):
        whole = gathered_bytes(total, total.dtype, step.rules)
        held += local_bytes(total) if its else whole
        if its:
            at_a_time.add(whole, its)
    return (held if step.call.at_once == step.call.of_device else 2 * held) + at_a_time.most


class _AtATime:
    """What is whole at a time: a slice of each array that goes by slices, or the largest other."""

    def __init__(self) -> None:
        self._of_step = self._largest = 0

    def add(self, whole: int, slices: int) -> None:
        """An array of so many bytes."""
        if slices > 1:
            self._of_step += whole // slices
        else:
            self._largest = max(self._largest, whole)

    @property
    def most(self) -> int:
        """In bytes."""
        return max(self._of_step, self._largest)


def bytes_of(x: Any) -> int:
    """Bytes of an array, of all devices."""
    return math.prod(x.shape) * (_KEY_BYTES if is_key(x) else x.dtype.itemsize)


def local_bytes(x: Any) -> int:
    """Bytes of an array, of one device."""
    if x.sharding is None:
        return bytes_of(x)
    return bytes_of(jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype))


def gathered_bytes(x: Any, dtype: Any, rules: ShardingRules | None) -> int:
    """Of an array that is whole over the axes that examples are spread over."""
    whole = bytes_of(jax.ShapeDtypeStruct(x.shape, dtype))
    if rules is None:
        return whole
    axes = {axis for entry in x.sharding.spec for axis in axes_of(entry)} - set(rules.examples)
    return whole // math.prod(rules.mesh.shape[axis] for axis in axes)


def is_spread(x: Any, rules: ShardingRules | None) -> bool:
    """Whether a device holds a part of an array over the axes that examples are spread over."""
    return rules is not None and cut_of(rules, x.sharding.spec, x.ndim) is not None


def part_bytes(stored: Any, dtype: Any) -> int:
    """Of a device's part in another dtype; 0 where that is the stored array's."""
    return (
        0
        if stored.dtype == dtype
        else local_bytes(stored) // stored.dtype.itemsize * dtype.itemsize
    )


def copy_bytes(stored: Any, dtype: Any, rules: ShardingRules | None) -> int:
    """Of what the loss is given in a stored array's place; 0 where it is that array."""
    size = gathered_bytes(stored, dtype, rules)
    return 0 if stored.dtype == dtype and size == local_bytes(stored) else size
