"""`eqx-dp bench policies`: time, memory and gradient error of each preset on a small model."""

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jaxtyping import PyTree

from ..gradients import filter_clipped_grad
from ..precision import Policy, available_policies, load_policy
from ..privacy import gaussian_privatizer
from .bench_dtypes import where
from .command import Command, positive
from .models import WORKLOADS, Workload
from .output import Panel, Table, add_output_arguments, check_output, show
from .show_policies import dtypes_of
from .timing import Spread, interleaved, ratios

_REFERENCE = "float32"
_CLIP_NORM = 1.0


class Prepared(NamedTuple):
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


def prepare(name: str, workload: Workload, oracle: list[np.ndarray]) -> Prepared:
    """Compiles a step by a preset, and compares its gradient with the oracle's."""
    with _x64(name):
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
        with _x64(name):
            return program(arrays, key)

    memory = program.memory_analysis()
    temporary = None if memory is None else int(memory.temp_size_in_bytes)
    return Prepared(policy, run, temporary, relative_error(found, oracle))


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
    return _norm(differences) / _norm(oracle)


def _norm(leaves: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in leaves)))


def _x64(name: str) -> AbstractContextManager[Any]:
    return jax.enable_x64(True) if name == "float64" else nullcontext()


# The command.


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = ", ".join(
        f"{name}: {batch}, {width}" for name, (_, batch, width) in WORKLOADS.items()
    )
    parser.add_argument("--model", choices=list(WORKLOADS), default="mlp", help="(default: mlp)")
    parser.add_argument("--batch", type=positive, help=f"examples (batch and width: {defaults})")
    parser.add_argument("--width", type=positive, help="features or channels of a layer")
    parser.add_argument("--repeats", type=positive, default=9, help="rounds (default: 9)")
    add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> None:
    check_output(arguments)
    make, batch, width = WORKLOADS[arguments.model]
    workload = make(arguments.batch or batch, arguments.width or width)
    oracle = oracle_of(workload)
    prepared = {name: prepare(name, workload, oracle) for name in available_policies()}
    seconds = interleaved({name: one.run for name, one in prepared.items()}, arguments.repeats)
    show(_table(workload.title, arguments.repeats, prepared, seconds), arguments)


def _table(
    title: str, rounds: int, prepared: dict[str, Prepared], seconds: dict[str, list[float]]
) -> Table:
    time = {name: ratios(taken, seconds[_REFERENCE]) for name, taken in seconds.items()}
    base = prepared[_REFERENCE].temporary
    memory = {
        name: one.temporary / base if one.temporary is not None and base else None
        for name, one in prepared.items()
    }
    names = list(prepared)
    rows = [_cells(prepared[name], seconds[name], time[name], memory[name]) for name in names]
    data = {
        "device": where(),
        "model": title,
        "rounds": rounds,
        "policies": [
            {
                "policy": name,
                "dtypes": dtypes_of(prepared[name].policy),
                "seconds": statistics.median(seconds[name]),
                "time_ratio_to_float32": time[name]._asdict(),
                "temporary_bytes": prepared[name].temporary,
                "memory_ratio_to_float32": memory[name],
                "gradient_error": prepared[name].error,
            }
            for name in names
        ],
    }
    heads = ("policy", "ms", "time / float32", "temp. MiB", "/ float32", "gradient error")
    notes = [
        "one step: clipped gradient and noise; all take turns, and ratios are those of "
        f"{rounds} rounds, with their quartiles",
        "gradient error: |gradient - that in float64| / |that in float64|, before noise; "
        "parameters that a policy stores narrow are rounded first",
    ]
    panels = [
        Panel("time / float32", names, [time[name].median for name in names]),
        Panel("temporary memory / float32", names, [memory[name] for name in names]),
        Panel("gradient error", names, [prepared[name].error for name in names], logarithmic=True),
    ]
    return Table(f"{title}, on {where()}", heads, rows, notes, data, panels)


def _cells(
    one: Prepared, seconds: list[float], time: Spread, memory: float | None
) -> tuple[str, ...]:
    return (
        str(one.policy.name),
        f"{1e3 * statistics.median(seconds):.3g}",
        f"{time.median:.2f} ({time.low:.2f}-{time.high:.2f})",
        "-" if one.temporary is None else f"{one.temporary / 2**20:.2f}",
        "-" if memory is None else f"{memory:.2f}",
        f"{one.error:.1e}",
    )


COMMAND = Command(
    "bench policies",
    "time, memory and gradient error of each preset",
    "Measures a private step (clipped gradient and noise) by each preset on a small model: time "
    "and temporary memory beside float32's, and the gradient's error against float64.",
    _add_arguments,
    _run,
)
