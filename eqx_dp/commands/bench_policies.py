"""`eqx-dp bench policies`: time, memory and gradient error of each preset on a small model."""

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jaxtyping import PyTree

from ..gradients import filter_clipped_grad
from ..precision import Policy, available_policies, dtypes_of, load_policy
from ..privacy import gaussian_privatizer
from ..timing import interleaved, ratios
from .bench_dtypes import where
from .command import Command, positive, x64
from .models import WORKLOADS, Workload, add_workload_arguments
from .output import Panel, Table, add_output_arguments, check_output, show
from .working import working

_REFERENCE = "float32"
_CLIP_NORM = 1.0


class CompiledPreset(NamedTuple):
    """A preset on a model, compiled.

    Attributes:
        policy: the preset.
        run: one step: clipped gradient and noise.
        temporary: bytes that the compiled step holds beside what it is given and gives back.
        error: of the clipped gradient against float64, as part of its norm.
    """

    policy: Policy
    run: Callable[[], Any]
    temporary: int | None
    error: float


def prepare(name: str, workload: Workload, oracle: list[np.ndarray]) -> CompiledPreset:
    """Compiles a step by a preset, and compares its gradient with the oracle's."""
    with x64(name):
        policy = load_policy(name)
        grad_fn = filter_clipped_grad(workload.loss, l2_clip_norm=_CLIP_NORM, policy=policy)
        model = policy.cast_to_param(workload.model)
        arrays, static = eqx.partition((model, workload.batch), eqx.is_array)
        key = jax.random.key(2)

        def gradient(arrays: PyTree[Any]) -> PyTree[Any]:
            model, batch = eqx.combine(arrays, static)
            return grad_fn(model, *batch)

        def step(arrays: PyTree[Any], key: Any) -> PyTree[Any]:
            privatizer = gaussian_privatizer(stddev=_CLIP_NORM, key=key, policy=policy)
            grads = gradient(arrays)
            return privatizer.update(grads, privatizer.init(grads))[0]

        program = jax.jit(step).lower(arrays, key).compile()
        grads = jax.jit(gradient)(arrays)
        found = [np.asarray(x, np.float64) for x in jax.tree.leaves(grads)]

    def run() -> Any:
        with x64(name):
            return program(arrays, key)

    memory = program.memory_analysis()
    temporary = None if memory is None else int(memory.temp_size_in_bytes)
    return CompiledPreset(policy, run, temporary, relative_error(found, oracle))


def oracle_of(workload: Workload) -> list[np.ndarray]:
    """The clipped gradient in float64, example by example."""
    with jax.enable_x64(True):
        double = jmp.Policy(jnp.float64, jnp.float64, jnp.float64)
        model, batch = double.cast_to_param((workload.model, workload.batch))
        grad_fn = filter_clipped_grad(
            workload.loss, l2_clip_norm=_CLIP_NORM, method="per_example", microbatch_size=1
        )
        grads = eqx.filter_jit(grad_fn)(model, *batch)
        return [np.asarray(x) for x in jax.tree.leaves(grads)]


def relative_error(found: list[np.ndarray], oracle: list[np.ndarray]) -> float:
    """The norm of the difference, as part of the oracle's norm."""
    differences = [one - other for one, other in zip(found, oracle, strict=True)]
    error, size = (
        math.hypot(*(float(np.linalg.norm(leaf)) for leaf in leaves))
        for leaves in (differences, oracle)
    )
    return error / size


# The command.


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    parser.add_argument("--repeats", type=positive, default=9, help="rounds (default: 9)")
    add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> None:
    check_output(arguments)
    make, batch, width = WORKLOADS[arguments.model]
    workload = make(arguments.batch or batch, arguments.width or width)
    names = available_policies()
    presets: dict[str, CompiledPreset] = {}
    with working(len(names) + 2) as begin:
        begin("the gradient in float64")
        oracle = oracle_of(workload)
        for name in names:
            begin(f"compiling {name}")
            presets[name] = prepare(name, workload, oracle)
        begin(f"timing, {arguments.repeats} rounds")
        seconds = interleaved({name: one.run for name, one in presets.items()}, arguments.repeats)
    show(_table(workload.title, arguments.repeats, presets, seconds), arguments)


def _table(
    title: str, rounds: int, presets: dict[str, CompiledPreset], seconds: dict[str, list[float]]
) -> Table:
    base = presets[_REFERENCE].temporary
    rows: list[tuple[str, ...]] = []
    data: list[dict[str, Any]] = []
    for name, (policy, _, temporary, error) in presets.items():
        time, median = ratios(seconds[name], seconds[_REFERENCE]), statistics.median(seconds[name])
        memory = temporary / base if temporary is not None and base else None
        rows.append(
            (
                str(policy.name),
                f"{1e3 * median:.3g}",
                f"{time.median:.2f} ({time.low:.2f}-{time.high:.2f})",
                "-" if temporary is None else f"{temporary / 2**20:.2f}",
                "-" if memory is None else f"{memory:.2f}",
                f"{error:.1e}",
            )
        )
        data.append(
            {
                "policy": name,
                "dtypes": {stage: str(dtype) for stage, dtype in dtypes_of(policy).items()},
                "seconds": median,
                "time_ratio_to_float32": time._asdict(),
                "temporary_bytes": temporary,
                "memory_ratio_to_float32": memory,
                "gradient_error": error,
            }
        )
    notes = [
        "one step: clipped gradient and noise; all take turns, and ratios are those of "
        f"{rounds} rounds, with their quartiles",
        "gradient error: |gradient - that in float64| / |that in float64|, before noise; "
        "parameters that a policy stores narrow are rounded first",
    ]
    names, errors = list(presets), [one["gradient_error"] for one in data]
    memories = [one["memory_ratio_to_float32"] for one in data]
    panels = [
        Panel("time / float32", names, [one["time_ratio_to_float32"]["median"] for one in data]),
        Panel("temporary memory / float32", names, memories),
        Panel("gradient error", names, errors, logarithmic=True),
    ]
    heads = ("policy", "ms", "time / float32", "temp. MiB", "/ float32", "gradient error")
    everything = {"device": where(), "model": title, "rounds": rounds, "policies": data}
    return Table(f"{title}, on {where()}", heads, rows, notes, everything, panels)


COMMAND = Command(
    "bench policies",
    "time, memory and gradient error of each preset",
    "Measures a private step (clipped gradient and noise) by each preset on a small model: time "
    "and temporary memory beside float32's, and the gradient's error against float64.",
    _add_arguments,
    _run,
)
