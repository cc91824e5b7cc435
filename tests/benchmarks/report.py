"""What was measured, as tables for the terminal, as Markdown, and as charts."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from tests.benchmarks.timing import Spread

from .contenders import AUTO, JAX_PRIVACY, NON_PRIVATE
from .curves import Curve
from .measure import Result, ratio
from .rows import Row

matplotlib.use("Agg")

_MIB = 2**20
_VERSIONS = ("jax", "equinox", "jax-privacy", "optax", "torch", "opacus")
_COLUMNS = (
    "contender",
    "microbatch",
    "ms",
    "time / non-private (quartiles)",
    "jax_privacy / this (quartiles)",
    "temp. MiB",
    "/ non-private",
    "compile s",
    "/ non-private",
)
_OURS, _PEERS, _REFERENCE = "#2a6f97", "#c98b3c", "#8a8a8a"


class Cells(NamedTuple):
    """A table before it is drawn."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def setting(*libraries: str) -> str:
    """Where and with what it was measured; further libraries by name."""
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else f" ({device.device_kind})"
    cores = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    versions = []
    for name in (*_VERSIONS, *libraries):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return f"{device.platform}{kind}, {cores}, float32; " + ", ".join(versions)


def table(row: Row, results: list[Result]) -> Cells:
    by_name = {result.contender: result for result in results}
    base, peer = by_name[NON_PRIVATE], by_name.get(JAX_PRIVACY)
    cells = [_line(result, base, peer) for result in results]
    if peer is None or AUTO not in by_name:
        return Cells(row.title, _COLUMNS, cells)
    time, speedup = ratio(by_name[AUTO], base).median, ratio(peer, by_name[AUTO]).median
    slower, faster = "", ""
    if row.goal is not None:
        slower = f" (goal: at most {row.goal.time:.2f})"
        faster = f" (goal: at least {row.goal.speedup:.1f})"
    note = f"auto: {time:.2f} x non-private{slower}, {speedup:.1f} x as fast as jax_privacy{faster}"
    return Cells(row.title, _COLUMNS, cells, note)


def _line(result: Result, base: Result, peer: Result | None) -> tuple[str, ...]:
    return (
        result.contender,
        "-" if result.microbatch_size is None else str(result.microbatch_size),
        f"{milliseconds(result):.1f}",
        with_quartiles(ratio(result, base)),
        "-" if peer is None else with_quartiles(ratio(peer, result)),
        *_and_ratio(result.temp_bytes, base.temp_bytes, _MIB),
        *_and_ratio(result.compile_seconds, base.compile_seconds, 1),
    )


def milliseconds(result: Result) -> float:
    """The median round."""
    return 1e3 * sorted(result.seconds)[len(result.seconds) // 2]


def with_quartiles(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _and_ratio(value: float | None, base: float | None, unit: float) -> tuple[str, str]:
    if value is None:
        return "-", "-"
    return f"{value / unit:.2f}", f"{value / base:.2f}" if base else "-"


def curves_table(title: str, curves: list[Curve]) -> Cells:
    rows = [
        (
            curve.name,
            str(batch_size),
            f"{1e3 * min(result.seconds):.1f}",
            f"{1e6 * min(result.seconds) / batch_size:.0f}",
            _and_ratio(result.temp_bytes, None, _MIB)[0],
        )
        for curve in curves
        for batch_size, result in zip(curve.batch_sizes, curve.results, strict=True)
    ]
    columns = ("contender", "batch", "best ms", "us an example", "temp. MiB")
    return Cells(f"Against the size of the batch: {title}", columns, rows)


def for_terminal(cells: Cells) -> Table:
    drawn = Table(title=cells.title, caption=cells.note)
    for column in cells.columns:
        drawn.add_column(column, justify="left" if column == "contender" else "right")
    for row in cells.rows:
        drawn.add_row(*row)
    return drawn


CLIPPED_GRADIENTS = (
    "Clipped gradients: speed and memory",
    "Clipped gradients of one batch. Each contender runs at the microbatch size that is best "
    "for it (`-`: the whole batch, and for auto its own choice). All take turns in one "
    "process; times are compared round by round, with the quartiles of the rounds' ratios. "
    "Temporary memory is that of the compiled program.",
)


def write_markdown(
    path: Path, command: str, tables: list[Cells], title: str, explanation: str, *libraries: str
) -> None:
    parts = [
        f"# {title}",
        f"Written by `{command}` on {setting(*libraries)}.",
        explanation,
        *map(_markdown, tables),
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _markdown(cells: Cells) -> str:
    lines = (cells.columns, ("---", *("---:",) * (len(cells.columns) - 1)), *cells.rows)
    drawn = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join(part for part in (f"## {cells.title}", drawn, cells.note) if part)


def write_chart(path: Path, measured: list[tuple[Row, list[Result]]]) -> None:
    """A line of panels a row: time, temporary memory and compile time against non-private."""
    height = 0.6 + 0.28 * max(len(results) for _, results in measured)
    figure = Figure(figsize=(12, height * len(measured) + 0.5), layout="constrained")
    panels = figure.subplots(len(measured), 3, squeeze=False)
    for axes, (row, results) in zip(panels, measured, strict=True):
        base = next(result for result in results if result.contender == NON_PRIVATE)
        times = [ratio(result, base) for result in results]
        _bars(axes[0], results, times, "time / non-private, quartiles")
        axes[0].set_title(row.title, loc="left", fontsize=10)
        memory = [_point(result.temp_bytes, base.temp_bytes) for result in results]
        _bars(axes[1], results, memory, "temporary memory / non-private")
        compiling = [_point(result.compile_seconds, base.compile_seconds) for result in results]
        _bars(axes[2], results, compiling, "compile time / non-private")
        for panel in axes[1:]:
            panel.set_yticklabels([])
    figure.savefig(path, dpi=120)


def _point(value: float | None, base: float | None) -> Spread | None:
    return Spread(*(value / base,) * 3) if value is not None and base else None


def _bars(axes: Axes, results: list[Result], ratios: list[Spread | None], label: str) -> None:
    axes.set_xscale("log", base=2)
    drawn = [(at, spread) for at, spread in enumerate(ratios) if spread is not None]
    for at, spread in drawn:
        axes.barh(at, spread.median, color=_color(results[at].contender))
        axes.hlines(at, spread.low, spread.high, color="black", linewidth=1)
        end = (max(spread.median, spread.high), at)
        text = f"{spread.median:.2f}"
        axes.annotate(text, end, (4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_xlim(
        0.75 * min(1.0, *(spread.low for _, spread in drawn)),
        1.5 * max(spread.high for _, spread in drawn),
    )
    axes.set_yticks(range(len(results)), [result.contender for result in results], fontsize=8)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(label, fontsize=8)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _color(name: str) -> str:
    if NON_PRIVATE in name:
        return _REFERENCE
    return _OURS if name.startswith("eqx_dp") else _PEERS


def write_curves(path: Path, title: str, curves: list[Curve]) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for curve in curves:
        style = {"marker": "o", "label": curve.name, "color": _color(curve.name)}
        time.plot(curve.batch_sizes, [1e3 * min(r.seconds) for r in curve.results], **style)
        memory.plot(curve.batch_sizes, [(r.temp_bytes or 0) / _MIB for r in curve.results], **style)
    time.set_ylabel("ms")
    memory.set_ylabel("temporary memory, MiB")
    for axes in (time, memory):
        axes.set_xlabel("batch size")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    time.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
