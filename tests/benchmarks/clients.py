"""Clipped gradients of models that others wrote: a summary with its goals, and a table a row.

    python -m tests.benchmarks.clients --short --markdown tests/benchmarks/results/clients.md

Run it from the root of the repository, on a machine that does nothing else. Rows of libraries that
are not installed are left out. `--short` tries few microbatch sizes and takes about a quarter of an
hour on two cores; without it every contender is tried at all of them.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
from rich.console import Console

import eqx_dp as dp

from . import report
from .client_rows import CLIENTS, MISSING, TINY
from .contenders import (
    AUTO,
    BOOK_KEEPING,
    CLIP_NORM,
    GHOST,
    IN_PARTS,
    JAX_PRIVACY,
    NON_PRIVATE,
    OPTAX,
    PER_EXAMPLE,
    Contender,
    in_jax,
)
from .measure import Result, measure, ratio
from .rows import Row

LIBRARIES = ("flowjax", "diffrax", "haliax")
# What is tried of every contender in little time: one by one, a few, and all at once.
FEW_SIZES = (None, 1, 8)


class Goals(NamedTuple):
    """At most so many times the reference."""

    non_private: float = 1.15  # of auto, against the better of the two, without whole matrices
    jax_privacy: float = 1.0  # of auto
    optax: float = 1.0  # of auto
    memory: float = 2.0  # of book-keeping, of the whole batch at once, against non-private
    ghost: float = 2.0  # against the better non-private


GOALS = Goals()


class Auto(NamedTuple):
    """What the formula chose for a row."""

    method: str
    microbatch_size: int | None
    whole: int  # matrices whose gradients are formed example by example

    def __str__(self) -> str:
        return f"{self.method}, {self.microbatch_size or 'all'}"


def contenders(row: Row, short: bool) -> list[Contender]:
    """All in JAX. Ghost may take parts here, as the gradient without privacy may."""
    found = {one.name: one._replace(microbatched=True) for one in in_jax()}
    for name in (NON_PRIVATE, AUTO):
        found[name] = found[name]._replace(microbatched=False)
    if short:
        del found[PER_EXAMPLE]
        few = tuple(size for size in FEW_SIZES if size is None or size < row.batch_size)
        found = {name: one._replace(tried=few) for name, one in found.items()}
        found[BOOK_KEEPING] = found[BOOK_KEEPING]._replace(tried=(None,))
    return list(found.values())


def chosen(row: Row) -> Auto:
    """By `explain`; whole matrices are those that book-keeping forms."""
    explained = [
        dp.explain(
            dp.filter_clipped_grad(
                row.loss, l2_clip_norm=CLIP_NORM, filter_spec=row.filter_spec, method=method
            ),
            row.model,
            *row.batch,
        )
        for method in ("auto", "book_keeping")
    ]
    trained = jax.tree.leaves(eqx.filter(row.model, row.filter_spec))
    leaves = zip(explained[1].rows, trained, strict=True)
    whole = sum(leaf.way == "formed" and array.ndim > 1 for leaf, array in leaves)
    return Auto(explained[0].method, explained[0].microbatch_size, whole)


def memory_ratio(row: Row, results: dict[str, Result]) -> float | None:
    """Temporary memory of book-keeping against non-private, the whole batch at once."""
    of = {one.name: one for one in in_jax()}
    found: list[int | None] = []
    for name in (BOOK_KEEPING, NON_PRIVATE):
        if name not in results:
            return None
        result = results[name]
        at_once = result if result.microbatch_size is None else of[name].prepare(row, None)
        found.append(at_once.temp_bytes)
    private, plain = found
    return private / plain if private and plain else None


COLUMNS = (
    "row",
    "auto, ms",
    "its choice",
    "whole matrices",
    "/ better non-private",
    "/ jax_privacy",
    "/ optax",
    "book_keeping's memory",
    "ghost's time",
    "goals met",
)


def line(row: Row, auto: Auto, measured: list[Result]) -> tuple[str, ...]:
    """A row of the summary; `!` is behind what misses its goal."""
    results = {result.contender: result for result in measured}
    plain = min((results[name] for name in (NON_PRIVATE, IN_PARTS)), key=report.milliseconds)
    references = {"non_private": plain, "jax_privacy": results.get(JAX_PRIVACY)}
    references["optax"] = results.get(OPTAX)
    values = {name: _times(results.get(AUTO), reference) for name, reference in references.items()}
    values["memory"] = memory_ratio(row, results)
    values["ghost"] = _times(results.get(GHOST), plain)
    # What must be differentiated example by example is not held to the price of what must not.
    counted = [
        (value, goal)
        for (name, value), goal in zip(values.items(), GOALS, strict=True)
        if value is not None and not (name == "non_private" and auto.whole)
    ]
    met = sum(value <= goal for value, goal in counted)
    shown = [
        _marked(value, goal, held=not (name == "non_private" and auto.whole))
        for (name, value), goal in zip(values.items(), GOALS, strict=True)
    ]
    time = f"{report.milliseconds(results[AUTO]):.1f}" if AUTO in results else "does not run"
    return (row.title, time, str(auto), str(auto.whole), *shown, f"{met} of {len(counted)}")


def _times(result: Result | None, reference: Result | None) -> float | None:
    return None if result is None or reference is None else ratio(result, reference).median


def _marked(value: float | None, goal: float, held: bool) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (" !" if held and value > goal else "")


def summary(lines: list[tuple[str, ...]]) -> report.Cells:
    note = (
        f"Goals, at most: auto {GOALS.non_private:g} x the better of non-private whole and in "
        f"parts where no matrix is whole, {GOALS.jax_privacy:g} x jax_privacy, {GOALS.optax:g} x "
        f"optax; temporary memory of book_keeping {GOALS.memory:g} x non-private, the whole batch "
        f"at once; ghost {GOALS.ghost:g} x the better non-private. `!` is behind what misses its "
        "goal, `-` is where one of the two does not run."
    )
    return report.Cells("Summary", COLUMNS, lines, note)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.clients",
        description="Clipped gradients of models of others, against peers and goals.",
    )
    parser.add_argument("--rows", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--short", action="store_true", help="few sizes, and no per_example")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of measurement (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--chart", type=Path, help="write a chart of the tables to this PNG")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    console = Console(width=200)
    console.print(report.setting(*LIBRARIES))
    for name, reason in MISSING.items():
        console.print(f"{name} is left out: {reason}")
    lines: list[tuple[str, ...]] = []
    tables: list[report.Cells] = []
    measured: list[tuple[Row, list[Result]]] = []
    with console.status("") as status:
        for name in options.rows:
            row = CLIENTS[name](**(TINY[name] if options.tiny else {}))
            refused: dict[str, str] = {}
            compared = contenders(row, options.short)
            results = measure(row, compared, options.repeats, status.update, refused)
            measured.append((row, results))
            table = report.table(row, results)
            notes = [table.note, *(f"{who} does not run: {why}" for who, why in refused.items())]
            tables.append(table._replace(note="\n".join(filter(None, notes))))
            lines.append(line(row, chosen(row), results))
            console.print(report.for_terminal(tables[-1]))
    tables.insert(0, summary(lines))
    console.print(report.for_terminal(tables[0]))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.clients", *["--short"] * options.short]
        command += ["--rows", *options.rows] if options.rows != list(CLIENTS) else []
        command += ["--repeats", str(options.repeats)] + ["--tiny"] * options.tiny
        title = "Clipped gradients of models of others"
        explanation = report.CLIPPED_GRADIENTS[1]
        report.write_markdown(
            options.markdown, shlex.join(command), tables, title, explanation, *LIBRARIES
        )
    if options.chart is not None:
        report.write_chart(options.chart, measured)


if __name__ == "__main__":
    main()
