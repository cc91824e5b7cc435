"""The bytes that a device needs for a private training step, before it runs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import optax

from .. import expected
from ..expected import whole_number
from ..gradients import ClippedGrad, MethodName, checked_grad_fn
from ..privacy import gaussian_privatizer
from ..tables import Part, tabular
from ..trees import PyTree
from .parts import DeviceBytes, bytes_of, device_bytes
from .step import planned_step
from .textbook import TransformerShape


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


@tabular
@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What [`plan_memory`][] found, for one device.

    Attributes:
        parts: the large parts, from shapes alone.
        compiled: what the compiled step takes; None if it was not compiled, or does not say.
        method: of the engine.
        microbatch_size: examples at once on a device.
        num_examples: the batch, of all devices.
        num_devices: the number of devices.
        platform: the kind of devices.
        device_memory: bytes that a device has; None if it was not given.
        textbook: bytes of activations by the textbook's formula; None without `transformer`.
    """

    parts: DeviceBytes
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
        """Bytes of a device: the compiler's if they are known, else the sum of the parts."""
        return self.parts.total if self.compiled is None else self.compiled.total

    def fits(self, device_memory: int) -> bool:
        """Whether a device holds the step.

        Args:
            device_memory: bytes of the device.
        """
        return self.total <= device_memory

    def to_dict(self) -> dict[str, Any]:
        """The same for `json`."""
        return {
            **dataclasses.asdict(self),
            "parts_total": self.parts.total,
            "compiled_total": None if self.compiled is None else self.compiled.total,
            "total": self.total,
            "fits": None if self.device_memory is None else self.fits(self.device_memory),
        }

    def _parts(self) -> Iterator[Part]:
        yield (
            f"{self.num_examples:,} examples on {self.num_devices} {self.platform} device"
            f"{'s' if self.num_devices > 1 else ''}, method {self.method}, microbatch "
            f"{self.microbatch_size}"
        )
        yield ""
        yield self._rows()
        if self.device_memory is not None:
            verdict = "fits" if self.fits(self.device_memory) else "does not fit"
            yield f"{verdict} a device of {told(self.device_memory)}"

    def _rows(self) -> list[tuple[str, str, str]]:
        parts, total = self.parts, max(self.parts.total, 1)
        rows = [
            ("part", "of a device", "note"),
            *(
                (name.replace("_", "-"), told(size), f"{size / total:.1%}")
                for name, size in dataclasses.asdict(parts).items()
            ),
            ("sum of parts", told(parts.total), "100.0%"),
        ]
        if (found := self.compiled) is not None:
            note = f"arguments {told(found.arguments)}, temporary {told(found.temporary)}"
            rows.append(("compiled", told(found.total), note))
        if self.textbook is not None:
            note = (
                f"M_model B T^2 / (4 N D^2), for activations of {self.microbatch_size} at once; "
                f"per-example above is {told(parts.per_example)}"
            )
            rows.append(("textbook", told(self.textbook), note))
        return rows


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
    method: MethodName | None = None,
    microbatch_size: int | None = None,
    transformer: TransformerShape | None = None,
    compiled: bool = True,
) -> MemoryPlan:
    """Says how many bytes a device needs for a private training step, before the step runs.

    Nothing is allocated and nothing is run. The whole step (clipped gradient, noise, update, model
    and optimizer state donated) is traced on shapes; with `compiled` it is compiled for the mesh.

    `compiled` is what the compiler allocates: rely on this figure. `parts` follow from shapes, and
    show what the bytes are for. The compiler reuses memory between the parts and adds workspace, so
    their sum may be above or below the compiled figure. Of a parameter that is spread over example
    axes, and of its sum, `parts` count a device's part and what is gathered at a time.

    Args:
        grad_fn: what `filter_clipped_grad` returned. It gives loss, policy, sharding rules, method
            and microbatch.
        model: the model. Here and in the batch, `jax.ShapeDtypeStruct` may stand for arrays
            (`eqx.filter_eval_shape` makes a model of them).
        *batch: the batch of all devices, as for `grad_fn`.
        optimizer: everything that happens to the gradient, noise included; None for noise and a
            step of gradient descent.
        device_memory: bytes of a device, to compare the total with.
        key: as for `grad_fn`.
        method: replaces the method of `grad_fn`.
        microbatch_size: replaces that of `grad_fn`: examples at once on a device.
        transformer: the sizes for the textbook's estimate.
        compiled: whether to compile.

    Returns:
        A [`MemoryPlan`][]; `str()` is a table.

    Raises:
        ValueError: `grad_fn` is something else; and as for `grad_fn`.
    """
    if device_memory is not None:
        whole_number("device_memory", device_memory, least=1, most=2**60)
    checked_grad_fn(grad_fn)
    if transformer is not None:
        allowed = "a dp.TransformerShape, or None"
        expected.expect("transformer", transformer, TransformerShape, allowed)
    if optimizer is not None:
        expected.optimizer("optimizer", optimizer)
    else:
        optimizer = _noise_and_descent(grad_fn)
    of_step = grad_fn.variant(method=method, microbatch_size=microbatch_size)
    step = planned_step(of_step, model, batch, optimizer, key)
    call, textbook = step.call, None
    if transformer is not None:
        in_compute = sum(map(bytes_of, (*call.traced.params, *call.traced.frozen)))
        textbook = transformer.activation_bytes(in_compute, call.at_once)
    return MemoryPlan(
        device_bytes(step, grad_fn.policy),
        read_compiled(step.compile()) if compiled else None,
        call.choice.method,
        call.at_once,
        call.examples.num_examples,
        1 if step.rules is None else step.rules.mesh.size,
        step.platform,
        device_memory,
        textbook,
    )


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


def _noise_and_descent(grad_fn: ClippedGrad[Any]) -> optax.GradientTransformation:
    noise = gaussian_privatizer(
        stddev=1.0, key=jax.random.key(0), policy=grad_fn.policy, sharding=grad_fn.sharding
    )
    return optax.chain(noise, optax.sgd(1.0))
