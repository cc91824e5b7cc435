"""The bytes that a device needs for a private training step, before it runs."""

import bisect
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import optax

from .. import expected
from ..device import is_cpu, made_for
from ..expected import whole_number
from ..gradients import ClippedGrad, MethodName, checked_grad_fn
from ..privacy import gaussian_privatizer
from ..sharding import ShardingRules, axes_of
from ..tables import Part, tabular
from ..trees import PyTree, is_key
from .slices import slices_of
from .step import PlannedStep, planned_step

_KEY_BYTES = 32  # a key's dtype has no size


class DeviceBytes(NamedTuple):
    """The large parts of what one device holds in a step, from shapes alone.

    Attributes:
        parameters: the stored model, and the copies for the loss that have another dtype or are
            gathered from other devices. For parameters that are spread over example axes: a
            device's parts, and the arrays that are gathered at a time: the slices of one step of a
            scan over them, or the largest.
        gradients: the sum of clipped gradients; with microbatches, that sum in float64 or in two
            floats, and the sum of one microbatch. Each device holds a whole sum until the devices'
            sums are added (divided over axes without examples). If the parameter is spread over
            example axes: its part of the sum, and the sums that are whole at a time before they
            are scattered.
        optimizer: the optimizer's state.
        batch: the examples and the mask.
        per_example: what the engine holds for the examples of one microbatch, by the estimate of
            its choice of a method.
        noise: that of the largest leaf on a CPU. GPUs and TPUs make it where it is added, but for
            some leaves that are spread on Explicit axes, which `compiled` shows.
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
        return sum(self)


class CompiledBytes(NamedTuple):
    """The compiler's figures for one device.

    Attributes:
        arguments: model, optimizer state, batch.
        results: model and optimizer state after the step.
        shared: the part of the results that is written over arguments.
        temporary: everything else.
    """

    arguments: int
    results: int
    shared: int
    temporary: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.results - self.shared + self.temporary


@tabular
class MemoryPlan(NamedTuple):
    """What [`plan_memory`][] found, for one device.

    Attributes:
        parts: the large parts, from shapes alone.
        compiled: what the compiled step takes; None if it was not compiled, or has no figures.
        method: of the engine.
        microbatch_size: examples at once on a device.
        num_examples: the batch, of all devices.
        num_devices: the number of devices.
        program: the compiled step, as JAX returns it, which is not to be run; None likewise.
    """

    parts: DeviceBytes
    compiled: CompiledBytes | None
    method: str
    microbatch_size: int
    num_examples: int
    num_devices: int
    program: Any = None

    @property
    def total(self) -> int:
        """Bytes of a device: the compiler's if they are known, else the sum of the parts."""
        return self.parts.total if self.compiled is None else self.compiled.total

    def _parts(self) -> Iterator[Part]:
        on = f"{self.num_examples:,} examples, devices: {self.num_devices}, method {self.method}"
        rows = [(name, format_bytes(size)) for name, size in self.parts._asdict().items()]
        yield f"{on}, microbatch {self.microbatch_size}"
        yield [("part", "of a device"), *rows, ("sum of parts", format_bytes(self.parts.total))]
        if (found := self.compiled) is not None:
            total, temporary = format_bytes(found.total), format_bytes(found.temporary)
            yield f"compiled: {total}, of which temporary {temporary}"


def format_bytes(size: float) -> str:
    """Bytes, for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def plan_memory(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    *batch: PyTree[Any],
    optimizer: optax.GradientTransformation | None = None,
    key: Any = None,
    method: MethodName | None = None,
    microbatch_size: int | None = None,
    limit: int | None = None,
    compiled: bool = True,
) -> MemoryPlan:
    """Computes how many bytes a device needs for a private training step, before it runs.

    Nothing is allocated and nothing is run. The devices of the mesh need not be here: the guide to
    devices plans for GPUs and TPUs on any machine. The whole step (clipped gradient, noise, update,
    model and optimizer state donated) is traced on shapes; with `compiled` it is compiled for the
    mesh.

    `compiled` is what the compiler allocates: rely on this figure. `parts` follow from shapes, and
    show what the bytes are for. The compiler reuses memory between the parts and adds workspace, so
    their sum may be above or below the compiled figure. Of a parameter that is spread over example
    axes, and of its sum, `parts` count a device's part and what is gathered at a time.

    With `limit`, microbatches are tried by bisection: the step is compiled log2(n) times for the n
    examples of a device. **Guarantee.** The total of the returned plan is within the limit. It is
    the largest microbatch that fits, if bytes grow with the microbatch.

    Args:
        grad_fn: what `filter_clipped_grad` returned. It gives loss, policy, sharding rules, method
            and microbatch.
        model: the model. Here and in the batch, `jax.ShapeDtypeStruct` may stand for arrays
            (`eqx.filter_eval_shape` makes a model of them).
        *batch: the batch of all devices, as for `grad_fn`.
        optimizer: everything that happens to the gradient, noise included; None for noise and a
            step of gradient descent.
        key: as for `grad_fn`.
        method: replaces the method of `grad_fn`.
        microbatch_size: replaces that of `grad_fn`: examples at once on a device. With `limit`, the
            largest to try.
        limit: bytes of a device. If given, the result is the plan of the largest microbatch that
            fits.
        compiled: whether to compile; False relies on the sum of parts.

    Returns:
        A [`MemoryPlan`][]; `str()` is a table.

    Raises:
        ValueError: `grad_fn` is something else; not even one example fits the limit; and as for
            `grad_fn`.
    """
    rules = checked_grad_fn(grad_fn).sharding
    if optimizer is None:
        optimizer = _noise_and_descent(grad_fn)
    expected.optimizer("optimizer", optimizer)

    variant = grad_fn._variant  # pyright: ignore[reportPrivateUsage]

    @functools.cache
    def planned(size: int | None) -> MemoryPlan:
        its = variant(method=method, microbatch_size=size)
        step = planned_step(its, model, batch, optimizer, key)
        program = step.compile() if compiled else None
        return MemoryPlan(
            _device_bytes(step),
            read_compiled(program),
            step.call.choice.method,
            step.call.at_once,
            step.call.examples.num_examples,
            1 if rules is None else rules.mesh.size,
            program,
        )

    if limit is None:
        return planned(microbatch_size)
    limit = whole_number("limit", limit, least=1, most=2**60)
    most = planned_step(grad_fn, model, batch, optimizer, key).call.of_device
    most = min(most, microbatch_size or most)
    if planned(most).total <= limit:  # all at once there is one sum; in microbatches there are more
        return planned(most)
    if fits := bisect.bisect_right(range(1, most), limit, key=lambda size: planned(size).total):
        return planned(fits)
    raise ValueError(
        f"Not even one example at a time fits: it takes {format_bytes(planned(1).total)} of "
        f"{format_bytes(limit)}. Take method='ghost' and jax.checkpoint around layers, spread sums "
        "(ShardingRules(accumulators='examples')), or pass policy=dp.load_policy('mixed_bfloat16')."
    )


def _noise_and_descent(grad_fn: ClippedGrad[Any]) -> optax.GradientTransformation:
    noise = gaussian_privatizer(stddev=1.0, policy=grad_fn.policy, sharding=grad_fn.sharding)
    return optax.chain(noise, optax.sgd(1.0))


def read_compiled(program: Any) -> CompiledBytes | None:
    """A compiled program's figures of its memory; None if it has none."""
    memory = None if program is None else program.memory_analysis()
    if memory is None:
        return None
    return CompiledBytes(
        int(memory.argument_size_in_bytes),
        int(memory.output_size_in_bytes),
        int(memory.alias_size_in_bytes),
        int(memory.temp_size_in_bytes),
    )


# The parts.


def _device_bytes(step: PlannedStep) -> DeviceBytes:
    call, rules = step.call, step.rules
    gathered, scattered = slices_of(call, rules)
    given = [x.dtype for x in (*call.traced.params, *call.traced.frozen)]
    parameters, copies = 0, list(map(functools.partial(_gathered, rules=rules), step.stored, given))
    for x, to, copy, its in zip(step.stored, given, copies, gathered, strict=True):
        held = _local(x, to) if its else copy
        parameters += _local(x) + (held if x.dtype != to or held != _local(x) else 0)
    sums, wholes = 0, [_gathered(x, x.dtype, rules) for x in step.sums]
    for x, whole, its in zip(step.sums, wholes, scattered, strict=True):
        sums += _local(x) if its else whole
    of_optimizer, of_batch = (sum(map(_local, jax.tree.leaves(x))) for x in step.arguments[1:])
    return DeviceBytes(
        parameters + _at_a_time(copies, gathered),
        sums * (1 + 2 * (call.at_once < call.of_device)) + _at_a_time(wholes, scattered),
        of_optimizer,
        of_batch,
        call.choice.held * call.at_once,
        _noise_bytes(step),
    )


def _noise_bytes(step: PlannedStep) -> int:
    with made_for(step.rules):
        dtype = step.policy and step.policy.noise_dtype
        return max(_local(x, dtype) for x in step.accumulators) if is_cpu() else 0


def _at_a_time(wholes: list[int], slices: list[int | None]) -> int:
    """The arrays that are whole at a time: a slice of each sliced array, or the largest other."""
    spread = [(whole, its) for whole, its in zip(wholes, slices, strict=True) if its]
    by_slices = sum(whole // its for whole, its in spread if its > 1)
    return max([by_slices, *(whole for whole, its in spread if its == 1)])


def _local(x: Any, dtype: Any = None) -> int:
    """Bytes of an array on one device, also for another dtype."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    itemsize = _KEY_BYTES if is_key(x) else (dtype or x.dtype).itemsize
    return math.prod(shape) * itemsize


def _gathered(x: Any, dtype: Any, rules: ShardingRules | None) -> int:
    """Bytes, on one device, of an array that is gathered over the example axes."""
    if rules is None:
        return _local(x, dtype)
    axes = {axis for entry in x.sharding.spec for axis in axes_of(entry)} & set(rules.examples)
    return _local(x, dtype) * math.prod(rules.mesh.shape[axis] for axis in axes)
