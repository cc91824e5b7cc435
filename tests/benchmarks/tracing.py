"""How long tracing, lowering and compiling take, against jax_privacy.

    python -m tests.benchmarks.tracing --markdown tests/benchmarks/results/tracing.md

The model is a GPT whose blocks are unrolled, or stacked and gone over by a scan. It is small, for
what takes the time is how many equations there are, not how large they are.
"""

import argparse
import functools
import gc
import random
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console

from tests.benchmarks.timing import ratios

from . import report
from .contenders import JAX_PRIVACY, NON_PRIVATE, Gradient, non_private, of_jax_privacy, ours
from .rows import TINY, Row, gpt, gpt_stacked

SIZES = {"batch": 4, "length": 32, "width": 64, "vocabulary": 128}
DEPTHS = (8, 24)
CONTENDERS: dict[str, Callable[[Row, int | None], Gradient]] = {
    NON_PRIVATE: non_private,
    JAX_PRIVACY: of_jax_privacy,
    **{
        f"eqx_dp {method}": functools.partial(ours, method)
        for method in ("per_example", "book_keeping", "ghost")
    },
}


class Goal(NamedTuple):
    """At most so many times jax_privacy's seconds, of unrolled layers."""

    tracing: float
    compiling: float


GOALS = {"eqx_dp book_keeping": Goal(1.5, 1.5), "eqx_dp ghost": Goal(3.0, 2.5)}


class Seconds(NamedTuple):
    """What the stages on the way to a program take."""

    trace: float
    lower: float
    compile: float


def stages(gradient: Gradient, row: Row) -> Seconds:
    """Makes a program from cold caches: nobody profits from, or cleans up after, the one before."""
    params, frozen, _ = row.split()
    jax.clear_caches()
    gc.collect()
    jitted = jax.jit(gradient)
    times = [time.perf_counter()]
    traced = jitted.trace(params, frozen, *row.batch)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return Seconds(*np.diff(times).tolist())


def table(row: Row, rounds: int, tell: Callable[[str], None]) -> report.Cells:
    """A line a contender. All take turns, each round in an order of its own."""
    found: dict[str, list[Seconds]] = {name: [] for name in CONTENDERS}
    shuffled, order = random.Random(0), list(CONTENDERS)
    for done in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            tell(f"{row.title}: round {done + 1} of {rounds}, {name}")
            found[name].append(stages(CONTENDERS[name](row, None), row))
    lines = [_line(name, seconds, found[JAX_PRIVACY]) for name, seconds in found.items()]
    return report.Cells(row.title, _COLUMNS, lines)


_COLUMNS = (
    "contender",
    "trace, s",
    "lower, s",
    "trace and lower / jax_privacy (quartiles)",
    "compile, s",
    "compile / jax_privacy (quartiles)",
)


def _line(name: str, seconds: list[Seconds], peer: list[Seconds]) -> tuple[str, ...]:
    trace, lower, compiling = (f"{np.median(x):.2f}" for x in zip(*seconds, strict=True))
    before = ratios([s.trace + s.lower for s in seconds], [s.trace + s.lower for s in peer])
    after = ratios([s.compile for s in seconds], [s.compile for s in peer])
    with_quartiles = map(report.with_quartiles, (before, after))
    return name, trace, lower, next(with_quartiles), compiling, next(with_quartiles)


def rows(is_tiny: bool, depths: Sequence[int] = DEPTHS) -> list[Row]:
    """Unrolled and stacked, of each depth."""
    sizes = TINY["gpt"] if is_tiny else SIZES
    return [make(**{**sizes, "depth": depth}) for make in (gpt, gpt_stacked) for depth in depths]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tracing",
        description="Seconds of tracing, lowering and compiling against jax_privacy.",
    )
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="numbers of blocks")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    console = Console(width=140)
    tables: list[report.Cells] = []
    with console.status("") as status:
        for row in rows(options.tiny, options.depths):
            tables.append(table(row, options.rounds, status.update))
            console.print(report.for_terminal(tables[-1]))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.tracing", "--rounds", str(options.rounds)]
        command += ["--depths", *map(str, options.depths)]
        goals = "; ".join(
            f"{name}: trace and lower at most {goal.tracing:g} x, compile at most "
            f"{goal.compiling:g} x jax_privacy's"
            for name, goal in GOALS.items()
        )
        report.write_markdown(
            options.markdown,
            shlex.join(command + ["--tiny"] * options.tiny),
            tables,
            "What tracing and compiling cost",
            "The gradient of one batch is traced, lowered and compiled from cold caches, the whole "
            "batch at once. All take turns in one process; times are compared round by round, with "
            f"the quartiles of the rounds' ratios. Goals for unrolled layers: {goals}; under scan "
            "no more for more layers.",
        )


if __name__ == "__main__":
    main()
