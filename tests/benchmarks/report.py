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

from .contenders import AUTO, JAX_PRIVACY, NON_PRIVATE
from .curves import Curve
from .measure import Result, ratio
from .rows import Row

matplotlib.use("Agg")

_MIB = 2**20
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


def setting() -> str:
    """Where and with what it was measured."""
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else f" ({device.device_kind})"
    cores = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    versions = []
    for name in ("jax", "equinox", "jax-privacy", "optax", "torch", "opacus"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return f"{device.platform}{kind}, {cores}, float32; " + ", ".join(versions)


def table(row: Row, results: list[Result]) -> Cells:
    by_name = {result.contender: result for result in results}
    base, peer = by_name[NON_PRIVATE], by_name[JAX_PRIVACY]
    cells = [_line(result, base, peer) for result in results]
    time, speedup = ratio(by_name[AUTO], base).median, ratio(peer, by_name[AUTO]).median
    note = (
        f"auto: {time:.2f} x non-private (goal: at most {row.goal.time:.2f}), "
        f"{speedup:.1f} x as fast as jax_privacy (goal: at least {row.goal.speedup:.1f})"
    )
    return Cells(row.title, _COLUMNS, cells, note)


def _line(result: Result, base: Result, peer: Result) -> tuple[str, ...]:
    milliseconds = 1e3 * sorted(result.seconds)[len(result.seconds) // 2]
    time, speedup = ratio(result, base), ratio(peer, result)
    return (
        result.contender,
        "-" if result.microbatch_size is None else str(result.microbatch_size),
        f"{milliseconds:.1f}",
        f"{time.median:.2f} ({time.low:.2f}-{time.high:.2f})",
        f"{speedup.median:.2f} ({speedup.low:.2f}-{speedup.high:.2f})",
        *_and_ratio(result.temp_bytes, base.temp_bytes, _MIB),
        *_and_ratio(result.compile_seconds, base.compile_seconds, 1),
    )


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


def write_markdown(path: Path, command: str, tables: list[Cells]) -> None:
    parts = [
        "# Clipped gradients: speed and memory",
        f"Written by `{command}` on {setting()}.",
        "Clipped gradients of one batch. Each contender runs at the microbatch size that is best "
        "for it (`-`: the whole batch, and for auto its own choice). All take turns in one process; "
        "times are compared round by round, with the quartiles of the rounds' ratios. Temporary "
        "memory is that of the compiled program.",
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
    for axes, (row, results) in zip(
        figure.subplots(len(measured), 3, squeeze=False), measured, strict=True
    ):
        base = next(result for result in results if result.contender == NON_PRIVATE)
        times = [ratio(result, base) for result in results]
        _bars(axes[0], results, [time.median for time in times], "time / non-private")
        axes[0].errorbar(
            [time.median for time in times],
            range(len(results)),
            xerr=[
                [time.median - time.low for time in times],
                [time.high - time.median for time in times],
            ],
            fmt="none",
            ecolor="black",
            elinewidth=1,
        )
        axes[0].set_title(row.title, loc="left", fontsize=10)
        memory = [_over(result.temp_bytes, base.temp_bytes) for result in results]
        _bars(axes[1], results, memory, "temporary memory / non-private")
        compiling = [_over(result.compile_seconds, base.compile_seconds) for result in results]
        _bars(axes[2], results, compiling, "compile time / non-private")
        for panel in axes[1:]:
            panel.set_yticklabels([])
    figure.savefig(path, dpi=120)


def _over(value: float | None, base: float | None) -> float:
    return value / base if value is not None and base else float("nan")


def _bars(axes: Axes, results: list[Result], ratios: list[float], label: str) -> None:
    names = [result.contender for result in results]
    axes.barh(range(len(names)), ratios, color=[_color(name) for name in names])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    for at, value in enumerate(ratios):
        if value == value:  # not NaN
            text = f" {value:.2f}"
            axes.annotate(text, (value, at), (12, 0), textcoords="offset points", va="center",
                          fontsize=7)  # fmt: skip


def _color(name: str) -> str:
    if name.endswith(NON_PRIVATE):
        return _REFERENCE
    return _OURS if name.startswith("eqx_dp") else _PEERS


def write_curves(path: Path, title: str, curves: list[Curve]) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for curve in curves:
        milliseconds = [1e3 * min(result.seconds) for result in curve.results]
        time.plot(curve.batch_sizes, milliseconds, marker="o", label=curve.name)
        bytes_ = [_over(result.temp_bytes, _MIB) for result in curve.results]
        memory.plot(curve.batch_sizes, bytes_, marker="o", label=curve.name)
    time.set_ylabel("ms")
    memory.set_ylabel("temporary memory, MiB")
    for axes in (time, memory):
        axes.set_xlabel("batch size")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    time.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
