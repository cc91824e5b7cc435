"""The bytes that a device needs for a private training step, before it runs."""

import dataclasses
from typing import Any, cast

import jax
import optax
from jaxtyping import PyTree

from ..gradients import ClippedGrad, outline
from ..gradients.outline import variant
from ..privacy import gaussian_privatizer, whole_number
from ..shown import shown
from .footprint import Footprint
from .liveness import Held
from .step import Step, private_step
from .textbook import TransformerShape
from .values import axes_of_spec, bytes_of


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """What one device holds at the worst moment of a step, by formula.

    Attributes:
        parameters: the model, and copies of it in other dtypes or gathered from other devices.
        gradients: sums of clipped gradients, of a microbatch and of all.
        optimizer: the optimizer's state.
        batch: the examples.
        activations: what a microbatch's forward pass leaves to the backward pass, and both at work.
        per_example: what is held for each example of a microbatch until its clip factor is known:
            gradients, or inputs and cotangents of parameters' uses.
        noise: the Gaussian, while it is drawn.
        other: the update, and all that no stage of the engine owns.
    """

    parameters: int
    gradients: int
    optimizer: int
    batch: int
    activations: int
    per_example: int
    noise: int
    other: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class CompiledBytes:
    """What the compiler says of one device.

    Attributes:
        arguments: model, optimizer state, batch.
        results: model and optimizer state after the step.
        shared: of the results, what is written over arguments.
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


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What [`plan_memory`][] found, for one device.

    Attributes:
        formula: worked out from the traced step.
        compiled: read off the compiled step; None where it was not compiled, or does not say.
        method: of the engine.
        microbatch_size: examples at once on a device.
        num_examples: the batch, of all devices.
        num_devices: how many there are.
        platform: their kind.
        device_memory: what a device has; None where it was not given.
        textbook: activations by the textbook's formula; None but for transformers.
    """

    formula: DeviceBytes
    compiled: CompiledBytes | None
    method: str
    microbatch_size: int
    num_examples: int
    num_devices: int
    platform: str
    device_memory: int | None = None
    textbook: float | None = None

    @property
    def total(self) -> int:
        """Bytes a device: the compiler's where they are known, else by formula."""
        return self.formula.total if self.compiled is None else self.compiled.total

    def fits(self, device_memory: int) -> bool:
        """Whether a device of so many bytes holds the step."""
        return self.total <= device_memory

    def to_dict(self) -> dict[str, Any]:
        """The same for ``json``."""
        return {
            **dataclasses.asdict(self),
            "formula_total": self.formula.total,
            "compiled_total": None if self.compiled is None else self.compiled.total,
            "total": self.total,
            "fits": None if self.device_memory is None else self.fits(self.device_memory),
        }

    def __str__(self) -> str:
        formula = self.formula
        lines = [
            f"{self.num_examples:,} examples on {self.num_devices} {self.platform} device"
            f"{'s' if self.num_devices > 1 else ''}, method {self.method}, microbatch "
            f"{self.microbatch_size}; bytes a device",
            "",
            *(
                f"{field.name.replace('_', '-'):<14}  {told(getattr(formula, field.name)):>10}  "
                f"{getattr(formula, field.name) / max(formula.total, 1):>6.1%}"
                for field in dataclasses.fields(formula)
            ),
            f"{'by formula':<14}  {told(formula.total):>10}  100.0%",
        ]
        if self.compiled is not None:
            lines.append(
                f"{'compiled':<14}  {told(self.compiled.total):>10}  arguments "
                f"{told(self.compiled.arguments)}, temporary {told(self.compiled.temporary)}; "
                f"the formula is {formula.total / max(self.compiled.total, 1) - 1:+.1%} off"
            )
        if self.textbook is not None:
            lines.append(
                f"{'textbook':<14}  {told(self.textbook):>10}  M_model B T^2 / (4 N D^2), for "
                f"activations of {self.microbatch_size} at once; by formula, with per-example "
                f"parts, {told(formula.activations + formula.per_example)}"
            )
        if self.device_memory is not None:
            verdict = "fits" if self.fits(self.device_memory) else "does not fit"
            lines.append(f"{verdict} a device of {told(self.device_memory)}")
        return "\n".join(lines)


def told(size: float | int) -> str:
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
    device_memory: int | None = None,
    key: Any = None,
    method: str | None = None,
    microbatch_size: int | None = None,
    transformer: TransformerShape | None = None,
    compiled: bool = True,
) -> MemoryPlan:
    """Says how many bytes a device needs for a private training step, before there is one.

    Nothing is allocated and nothing is run: the whole step (clipped gradient, noise, update, model
    and optimizer state donated) is traced on shapes, and with ``compiled`` compiled for the mesh.

    *By formula*: the traced program is gone through as a compiler does, operation by operation,
    with what is alive at each (`planning/footprint.py` says what is taken to be stored). On CPU
    that was within 5 % of the compiled program on a GPT of 320M parameters by all three methods
    with JAX 0.10 (with JAX 0.11, whose compiler packs better, up to 34 % too high, by ghost);
    there 16-bit floats are widened, which the formula knows. For other platforms no such widening
    is assumed, and it has not been held against them. Small models, whose noise and
    update weigh more than their activations, are met less well.

    *Compiled*: what the compiler allocates. It is the one to trust.

    Args:
        grad_fn: what ``filter_clipped_grad`` returned: loss, policy, sharding rules, method and
            microbatch are its.
        model: the model. Here and in the batch, ``jax.ShapeDtypeStruct`` may stand for arrays
            (``eqx.filter_eval_shape`` makes a model of them).
        *batch: the batch of all devices, as for ``grad_fn``.
        optimizer: all that happens to the gradient, noise included; None for noise alone and a step
            of gradient descent.
        device_memory: bytes of a device, to be held against.
        key: as for ``grad_fn``.
        method: instead of that of ``grad_fn``.
        microbatch_size: likewise; examples at once on a device.
        transformer: for the textbook's estimate.
        compiled: whether to compile.

    Raises:
        ValueError: ``grad_fn`` is something else; and as ``grad_fn``.
    """
    if not isinstance(cast(object, grad_fn), ClippedGrad):
        raise ValueError(
            "grad_fn must be what filter_clipped_grad or filter_value_and_clipped_grad returned, "
            f"before it is wrapped in jit or anything else; found {shown(grad_fn)}."
        )
    if device_memory is not None:
        whole_number("device_memory", device_memory, least=1, most=2**60)
    if optimizer is None:
        optimizer = _noise_and_descent(grad_fn)
    step = private_step(grad_fn, model, batch, optimizer, key, method, microbatch_size)
    traced = step.trace()
    with step.context():
        of_step = variant(grad_fn, method=method, microbatch_size=microbatch_size)
        found = outline(of_step, model, batch, key)
    own = found.num_examples // found.num_shards
    at_once = min(found.microbatch_size or own, own)
    textbook = None
    if transformer is not None:
        in_compute = sum(bytes_of(x) for x in (*found.params, *found.frozen))
        textbook = transformer.activation_bytes(in_compute, at_once)
    return MemoryPlan(
        formula_bytes(step, traced),
        compiled_bytes(step, traced) if compiled else None,
        found.method,
        at_once,
        found.num_examples,
        1 if step.rules is None else step.rules.mesh.size,
        step.platform,
        device_memory,
        textbook,
    )


def formula_bytes(step: Step, traced: Any) -> DeviceBytes:
    """The bytes of a step by formula."""
    groups = [jax.tree.leaves(part) for part in step.arguments]
    held = step_bytes(
        traced,
        [(x, index == 0) for index, group in enumerate(groups) for x in group],
        step.platform,
        step.mesh,
        step.sums,
    )
    parameters, optimizer, batch = (sum(map(local_bytes, group)) for group in groups)
    return DeviceBytes(
        parameters=parameters + held["parameters"],
        gradients=held["gradients"],
        optimizer=optimizer,
        batch=batch,
        activations=held["activations"],
        per_example=held["per_example"],
        noise=held["noise"],
        other=held["other"] + held[""],
    )


def step_bytes(
    traced: Any,
    arguments: list[tuple[Any, bool]],
    platform: str,
    mesh: dict[str, int],
    sums: list[jax.ShapeDtypeStruct],
) -> Held:
    """What a traced program holds beside its arguments, which its results take the place of.

    Args:
        traced: what ``jax.jit(...).trace`` returned.
        arguments: the shape of each with its sharding, and whether it is a parameter.
        platform: of the devices.
        mesh: the lengths of the mesh's axes.
        sums: shapes of gradients.
    """
    footprint = Footprint(platform, mesh, [(x.shape, x.dtype) for x in sums])
    return footprint.held(traced.jaxpr, [(_axes(x), is_param) for x, is_param in arguments])


def compiled_bytes(step: Step, traced: Any) -> CompiledBytes | None:
    """The bytes of a step as the compiler says."""
    return read_compiled(step.compile(traced))


def read_compiled(program: Any) -> CompiledBytes | None:
    """What a compiled program says of its memory; None if nothing."""
    memory = program.memory_analysis()
    if memory is None:
        return None
    return CompiledBytes(
        int(memory.argument_size_in_bytes),
        int(memory.output_size_in_bytes),
        int(memory.alias_size_in_bytes),
        int(memory.temp_size_in_bytes),
    )


def local_bytes(x: Any) -> int:
    """Bytes on a device of an array that is spread as its shape says."""
    if x.sharding is None:
        return bytes_of(x)
    return bytes_of(jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype))


def _axes(x: Any) -> frozenset[str]:
    return frozenset() if x.sharding is None else axes_of_spec(x.sharding.spec)


def _noise_and_descent(grad_fn: ClippedGrad[Any]) -> optax.GradientTransformation:
    noise = gaussian_privatizer(
        stddev=1.0, key=jax.random.key(0), policy=grad_fn.policy, sharding=grad_fn.sharding
    )
    return optax.chain(noise, optax.sgd(1.0))
