"""What a command found: a table for people, JSON for programs, a picture."""

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..extras import extra

_NO_TERMINAL = 200
_COLOR = "#2a6f97"
_CHARACTERS = 52  # of a title, above one panel


class Panel(NamedTuple):
    """A bar chart; the title says what the bars measure. None is a bar with nothing to show."""

    title: str
    names: list[str]
    values: list[float | None]
    logarithmic: bool = False


class Curve(NamedTuple):
    """A curve through points, from zero on; the title says what is above the axis."""

    title: str
    axis: str
    points: list[tuple[float, float]]


class Table(NamedTuple):
    """What is shown: a table with lines below it, the same as `json` writes it, and a picture."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]
    data: dict[str, Any]
    panels: Sequence[Panel | Curve]


def add_output_arguments(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    """Declares `--json`, and `--plot` where there is something to plot."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    told = "write a picture, its kind by its ending (.png)"
    if plot:
        parser.add_argument("--plot", metavar="FILE", type=Path, help=told)


def check_output(arguments: argparse.Namespace) -> None:
    """Refuses, before anything is measured, what could not be written afterwards.

    Raises:
        MissingExtra: rich or matplotlib is not installed, and is needed.
        ValueError: the folder of the picture is not there, or its kind is unknown.
    """
    if not arguments.json:
        _extra("rich")
    plot: Path | None = getattr(arguments, "plot", None)
    if plot is None:
        return
    _extra("matplotlib")
    if not plot.parent.is_dir():
        raise ValueError(f"--plot: found no folder {str(plot.parent)!r}; allowed: one that exists")
    allowed = _extra("matplotlib.figure").Figure().canvas.get_supported_filetypes()
    if plot.suffix.removeprefix(".") not in allowed:
        raise ValueError(
            f"--plot: found the ending {plot.suffix!r}; allowed: {', '.join(sorted(allowed))}"
        )


def show(table: Table, arguments: argparse.Namespace) -> None:
    """Prints a table, or JSON, and writes the picture that was asked for."""
    if arguments.json:
        print(json.dumps(table.data, indent=2, allow_nan=False))
    else:
        _print(table)
    plot: Path | None = getattr(arguments, "plot", None)
    if plot is not None:
        _figure(table).savefig(plot, dpi=120)


def _print(table: Table) -> None:
    make = _extra("rich.console").Console
    console = make()
    if not console.is_terminal:  # a file or a pipe has no width that cells must be broken for
        console = make(width=_NO_TERMINAL)
    drawn = _extra("rich.table").Table(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    escape = _extra("rich.markup").escape
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    console.print(drawn)
    for note in table.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _figure(table: Table) -> Any:
    bars = [len(panel.names) for panel in table.panels if isinstance(panel, Panel)]
    figure = _extra("matplotlib.figure").Figure(
        figsize=(4.5 * len(table.panels), 0.8 + 0.35 * max(bars, default=7)), layout="constrained"
    )
    panels = figure.subplots(1, len(table.panels), squeeze=False)[0]
    for axes, panel in zip(panels, table.panels, strict=True):
        if isinstance(panel, Curve):
            _draw_curve(axes, panel)
        else:
            _draw_bars(axes, panel)
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    lines = textwrap.wrap(table.title, _CHARACTERS * len(table.panels))
    figure.suptitle("\n".join(lines), fontsize=10)
    return figure


def _draw_bars(axes: Any, panel: Panel) -> None:
    bars = [
        (name, value)
        for name, value in zip(panel.names, panel.values, strict=True)
        if value is not None and (value > 0 or not panel.logarithmic)
    ]
    if panel.logarithmic and bars:
        axes.set_xscale("log")
    drawn = axes.barh([name for name, _ in bars], [value for _, value in bars], color=_COLOR)
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.margins(x=0.2)
    axes.invert_yaxis()


def _draw_curve(axes: Any, curve: Curve) -> None:
    axes.plot(*zip((0.0, 0.0), *curve.points, strict=True), color=_COLOR)
    axes.set_xlabel(curve.axis, fontsize=8)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _extra(module: str) -> Any:
    return extra(module, instead="; --json does without" if module.startswith("rich") else "")
