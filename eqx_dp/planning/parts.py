"""The large parts of a step's memory, from shapes alone."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..precision import Policy, cast_parameters
from ..sharding import ShardingRules, axes_of
from .step import PlannedStep

_KEY_BYTES = 8  # of a threefry key, whose dtype names no size


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """The large parts of what one device holds in a step.

    Attributes:
        parameters: the model as it is stored, and the copies that the loss is given where those
            have other dtypes or are gathered from other devices.
        gradients: the sum of clipped gradients, and with microbatches the sum of one of them. Each
            device holds a whole sum until the devices' sums are added, but for axes that examples
            are not spread over.
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
    """Adds up the parts of a step, for one device.

    Args:
        step: on shapes.
        policy: of its clipped gradient.
    """
    call, rules = step.call, step.rules
    model, state, batch = map(jax.tree.leaves, step.arguments)
    given = model  # in the dtypes that the loss is given
    if policy is not None:
        as_given = jax.eval_shape(lambda x: cast_parameters(x, policy), step.arguments[0])
        given = jax.tree.leaves(as_given)
    sums = sum(gathered_bytes(x, x.dtype, rules) for x in step.sums)
    return DeviceBytes(
        parameters=sum(
            local_bytes(stored) + copy_bytes(stored, copy.dtype, rules)
            for stored, copy in zip(model, given, strict=True)
        ),
        gradients=sums if call.at_once == call.of_device else 2 * sums,
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


def bytes_of(x: Any) -> int:
    """Bytes of an array, of all devices."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return math.prod(x.shape) * (_KEY_BYTES if is_key else x.dtype.itemsize)


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


def copy_bytes(stored: Any, dtype: Any, rules: ShardingRules | None) -> int:
    """Of what the loss is given in a stored array's place; 0 where it is that array."""
    size = gathered_bytes(stored, dtype, rules)
    return 0 if stored.dtype == dtype and size == local_bytes(stored) else size
