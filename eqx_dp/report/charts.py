"""Charts as SVG in the page: they take its colors, light or dark, and need nothing else."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .markup import Markup, joined, tag

_WIDTH, _HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 44
_MOST_POINTS = 400
_FEW = 30


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        points: pairs of numbers from left to right; the line is broken where y is None.
        kind: `"main"`, `"ahead"` (what has not come to pass) or `"beside"` (to compare with).
    """

    points: Sequence[Sequence[Any]]
    kind: str = "main"


class Axis(NamedTuple):
    """An axis; its range, or the ends of it that are given, is that of the points else."""

    label: str
    low: float | None = None
    high: float | None = None


class _Scale(NamedTuple):
    """Where numbers from `low` to `high` stand, from `start` to `end`."""

    low: float
    high: float
    start: int
    end: int

    def __call__(self, value: float | int) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{self.start + share * (self.end - self.start):.1f}"


def chart(says: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Markup:
    """A chart; nothing if there is no point, or if the points are too far apart for floats.

    The first line is the lowest. `says` is what is seen, for those who do not see it.
    """
    points = [(float(a), float(b)) for line in lines for a, b in line.points if b is not None]
    across = _scale(x, [a for a, _ in points], (_LEFT, _WIDTH - _RIGHT))
    up = _scale(y, [b for _, b in points], (_HEIGHT - _BOTTOM, _TOP))
    if across is None or up is None:
        return Markup()
    return tag(
        "svg",
        *(_tick_across(across, value) for value in _ticks(across.low, across.high)),
        *(_tick_up(up, value) for value in _ticks(up.low, up.high)),
        *(_drawn(line, across, up) for line in lines),
        _label(x.label, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6),
        _label(y.label, 14, (_TOP + _HEIGHT - _BOTTOM) / 2, transform="rotate(-90 14 119)"),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=says,
    )


def number(value: float | int) -> str:
    """A figure for people: three or four digits that count, thousands apart."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def _scale(axis: Axis, values: list[float], ends: tuple[int, int]) -> _Scale | None:
    if not values:
        return None
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if high - low <= 1e-9 * max(abs(low), abs(high)) or high - low < 1e-290:
        room = abs(low) / 2 or 0.5
        low, high = low - room, high + room
    return _Scale(low, high, *ends) if math.isfinite(high - low) else None


def _ticks(low: float, high: float) -> list[float]:
    """Some four round numbers from low to high."""
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(power * n for n in (1, 2, 5, 10) if (high - low) / (power * n) <= 5)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _tick_across(across: _Scale, value: float) -> Markup:
    at, foot = across(value), _HEIGHT - _BOTTOM
    line = tag("line", x1=at, x2=at, y1=str(_TOP), y2=str(foot), class_="grid")
    return joined(line, _label(number(value), at, foot + 18))


def _tick_up(up: _Scale, value: float) -> Markup:
    at = up(value)
    line = tag("line", x1=str(_LEFT), x2=str(_WIDTH - _RIGHT), y1=at, y2=at, class_="grid")
    return joined(line, _label(number(value), _LEFT - 6, float(at) + 4, class_="end"))


def _label(text: str, x: float | int | str, y: float | int, **attributes: str) -> Markup:
    return tag("text", text, x=str(x), y=f"{y:.1f}", **attributes)


def _drawn(line: Line, across: _Scale, up: _Scale) -> Markup:
    points = _fewer(line.points)
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{across(x)},{up(y)}")
    drawn = [tag("polyline", points=" ".join(piece), class_=line.kind) for piece in pieces if piece]
    if line.kind == "main" and len(points) <= _FEW:
        drawn += [
            tag("circle", cx=across(x), cy=up(y), r="3", class_="dot")
            for x, y in points
            if y is not None
        ]
    return joined(*drawn)


def _fewer(points: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
    """As many points as can be told apart, the last one among them."""
    every = -(-len(points) // _MOST_POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]
