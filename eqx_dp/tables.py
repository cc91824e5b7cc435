"""Lines and tables, as text by `str()` and in a notebook; one line by `repr()`.

A part of what is shown is a line of text, or a table: rows of cells, the first of them the head.
"""

import dataclasses
import html
from collections.abc import Sequence
from typing import Any, TypeVar, cast

Part = str | Sequence[Sequence[str]]
_Class = TypeVar("_Class", bound=type)

_LONGEST = 60


def tabular(cls: _Class) -> _Class:
    """Shows a NamedTuple or dataclass by its method `_parts`, which returns the parts in order."""

    def as_text(self: Any) -> str:
        parts = self._parts()
        return "\n".join(x if isinstance(x, str) else "\n".join(aligned(x)) for x in parts)

    def as_html(self: Any) -> str:
        return f"<pre>{html.escape(as_text(self))}</pre>"

    its: Any = cls
    its.__str__, its.__repr__, its._repr_html_ = as_text, _brief, as_html
    return cls


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, all with as many cells as the first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _brief(self: Any) -> str:
    """Its fields on one line; for long ones, their length."""
    names = getattr(self, "_fields", None) or [field.name for field in dataclasses.fields(self)]
    shown = (f"{name}={_short(getattr(self, name))}" for name in names)
    return f"{type(self).__name__}({', '.join(shown)})"


def _short(value: Any) -> str:
    if type(value) is tuple and value:
        return f"<{len(cast('tuple[Any, ...]', value))} entries>"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"<{type(value).__name__}>"
