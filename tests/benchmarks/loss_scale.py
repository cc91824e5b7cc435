"""What a loss scale that is chosen for each example costs a training step.

python -m tests.benchmarks.loss_scale --markdown tests/benchmarks/results/loss_scale.md
"""

import argparse
import dataclasses
import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from rich.console import Console

import eqx_dp as dp
from eqx_dp.precision import LossScale
from eqx_dp.timing import interleaved, ratios

from . import report
from .rows import ROWS, TINY, Row

CLIP_NORM = 1.0
STATIC, PER_EXAMPLE, FLOAT32 = "float16, static scale", "float16, per_example scale", "float32"
# Sizes of each row: compiling the steps of the whole small GPT takes many minutes on two cores.
MODELS = {
    "mlp": {},
    "gpt_small": {"batch": 8, "length": 32, "width": 64, "vocabulary": 256},
}


def policies() -> dict[str, dp.Policy]:
    mixed = dp.load_policy("mixed_float16")
    return {
        FLOAT32: dp.load_policy("float32"),
        STATIC: mixed,
        PER_EXAMPLE: dataclasses.replace(mixed, loss_scale=LossScale("per_example")),
    }


class Step(NamedTuple):
    """A training step: clipped gradient, noise, Adam.

    Attributes:
        run: the step, not jitted.
        arguments: what it is given.
        flops: of all contractions in it, those in loops as often as they run.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    flops: int


def traced(row: Row, policy: dp.Policy, method: str) -> Step:
    grad_fn = dp.filter_clipped_grad(row.loss, l2_clip_norm=CLIP_NORM, policy=policy, method=method)
    noise = dp.gaussian_privatizer(stddev=CLIP_NORM, key=jax.random.key(0), policy=policy)
    optimizer = optax.chain(noise, optax.adam(1e-3))
    params, frozen, static = row.split()

    def step(params: Any, state: Any, frozen: Any, *batch: jax.Array) -> Any:
        grads = grad_fn(eqx.combine(params, frozen, static), *batch)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(params, updates), state

    arguments = params, jax.jit(optimizer.init)(params), frozen, *row.batch
    report = dp.check_precision(step, *arguments, policy=policy)
    flops = sum(use.amount for use in report.summary if use.kind == "contraction")
    return Step(step, arguments, flops)


def table(row: Row, method: str, repeats: int) -> report.Cells:
    """A line a policy; ratios to float32, and of time to the static scale as well."""
    steps = {name: traced(row, policy, method) for name, policy in policies().items()}
    programs = {
        name: jax.jit(step.run).lower(*step.arguments).compile() for name, step in steps.items()
    }
    seconds = interleaved(
        {
            name: functools.partial(program, *steps[name].arguments)
            for name, program in programs.items()
        },
        repeats,
    )
    memory = {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()}
    rows = [
        (
            name,
            f"{1e3 * min(seconds[name]):.1f}",
            _spread(seconds[name], seconds[FLOAT32]),
            _spread(seconds[name], seconds[STATIC]),
            f"{step.flops / steps[FLOAT32].flops:.2f}",
            f"{memory[name] / memory[FLOAT32]:.2f}",
        )
        for name, step in steps.items()
    ]
    return report.Cells(f"{row.title}, {method}", _COLUMNS, rows)


_COLUMNS = (
    "policy",
    "best ms",
    "time / float32",
    "time / static scale",
    "FLOPs / float32",
    "temp. memory / float32",
)


def _spread(seconds: list[float], reference: list[float]) -> str:
    low, median, high = ratios(seconds, reference)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.loss_scale",
        description="Time, FLOPs and memory of a step by its loss scale.",
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=["auto"])
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    console = Console(width=140)
    tables: list[report.Cells] = []
    for name in options.models:
        row = ROWS[name](**TINY[name] if options.tiny else MODELS[name])
        for method in options.methods:
            tables.append(table(row, method, options.repeats))
            console.print(report.for_terminal(tables[-1]))
    if options.markdown is not None:
        told = ["--repeats", str(options.repeats), "--markdown", str(options.markdown)]
        report.write_markdown(
            options.markdown,
            shlex.join(["python", "-m", "tests.benchmarks.loss_scale", *told]),
            tables,
            "What a loss scale for each example costs",
            "A training step (clipped gradient, noise, Adam) with float32 parameters, sums and "
            "noise. `per_example` chooses each example's scale by a forward and a backward pass "
            "in bfloat16. All take turns in one process; times are compared round by round, with "
            "the quartiles of the rounds' ratios. FLOPs are those of contractions, as "
            "`check_precision` counts them on the traced step. Temporary memory is the compiled "
            "program's.",
        )


if __name__ == "__main__":
    main()
