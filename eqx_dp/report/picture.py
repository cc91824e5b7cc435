"""Pictures as SVG in the page: they take its colors, light or dark, and need nothing else."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..extras import extra
from .markup import Markup, escaped

# Placeholders for colors of the page.
_COLORS = {"#010101": "var(--soft)", "#020202": "var(--line)", "#030303": "var(--accent)"}
_INK, _GRID, _ACCENT = _COLORS
_FEW = 30


class Line(NamedTuple):
    """A line: points from left to right; it is broken where y is None."""

    points: Sequence[tuple[float, float | None]]
    style: str = "-"


def picture(says: str, x: str, y: str, lines: Sequence[Line], *, from_zero: bool = True) -> Markup:
    """Draws lines. `says` describes the picture for readers who cannot see it.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure: Any = extra("matplotlib.figure").Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for points, style in lines:
        values = [math.nan if value is None else value for _, value in points]
        marker = "o" if style == "-" and len(points) < _FEW else ""
        axes.plot([at for at, _ in points], values, style, color=_ACCENT, marker=marker, ms=4)
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.tick_params(colors=_INK)
    axes.grid(color=_GRID)
    axes.spines[:].set_visible(False)
    if from_zero:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    stream = io.StringIO()
    # Texts stay texts, and equal numbers give equal pictures.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "eqx_dp", "font.family": "sans-serif"}
    with extra("matplotlib").rc_context(settings):
        figure.savefig(stream, format="svg", transparent=True)
    drawn = stream.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    for color, name in _COLORS.items():
        drawn = drawn.replace(color, name)
    return Markup(drawn.replace("<svg", f'<svg role="img" aria-label="{escaped(says)}"', 1))
