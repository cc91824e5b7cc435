"""Clipped gradients of a batch: ours, and those of peers, on the same models and batches.

    python -m tests.benchmarks.clipped_gradients --markdown table.md --chart chart.png

Run it from the root of the repository, on a machine that does nothing else. Opacus takes part where
torch and opacus are installed.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from . import report
from .contenders import in_jax, in_torch, opacus_is_installed
from .curves import MICROBATCH_SIZE, curves
from .measure import Result, measure
from .rows import ROWS, TINY, Row


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.clipped_gradients",
        description="Time, temporary memory and compile time of clipped gradients.",
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which models")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of measurement")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--chart", type=Path, help="write a chart of the tables to this PNG")
    parser.add_argument(
        "--curves",
        type=Path,
        help="measure the first row at growing batches too, and draw time and memory to this PNG",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models: to see that it works, not to measure"
    )
    found = parser.parse_args(argv)
    if found.repeats < 1:
        parser.error(f"--repeats must be at least 1, found {found.repeats}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    console = Console(width=160)
    console.print(report.setting())
    if not opacus_is_installed():
        console.print("Opacus is left out: torch or opacus is not installed.")
    sizes = TINY if options.tiny else {name: {} for name in ROWS}
    tables: list[report.Cells] = []
    measured: list[tuple[Row, list[Result]]] = []
    with console.status("") as status:
        for name in options.rows:
            row = ROWS[name](**sizes[name])
            contenders = in_jax() + (in_torch() if row.has_torch_twin else [])
            results = measure(row, contenders, options.repeats, status.update)
            measured.append((row, results))
            tables.append(report.table(row, results))
            console.print(report.for_terminal(tables[-1]))
        if options.curves is not None:
            first = options.rows[0]
            # From two microbatches on: a single one has no loop around it.
            batch_sizes = [MICROBATCH_SIZE * 2**i for i in range(1, 3 if options.tiny else 7)]
            found = curves(
                lambda batch: ROWS[first](**{**sizes[first], "batch": batch}),
                batch_sizes,
                in_jax(),
                options.repeats,
                status.update,
            )
            tables.append(report.curves_table(first, found))
            console.print(report.for_terminal(tables[-1]))
            report.write_curves(options.curves, first, found)
    if options.markdown is not None:
        report.write_markdown(
            options.markdown, _command(options), tables, *report.CLIPPED_GRADIENTS
        )
    if options.chart is not None:
        report.write_chart(options.chart, measured)


def _command(options: argparse.Namespace) -> str:
    """The command that measures this again."""
    parts = ["python", "-m", "tests.benchmarks.clipped_gradients", "--rows", *options.rows]
    parts += ["--repeats", str(options.repeats)] + ["--tiny"] * options.tiny
    return shlex.join(parts)


if __name__ == "__main__":
    main()
