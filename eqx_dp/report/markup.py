"""HTML in which all content from outside is text, never a tag."""

import html
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, cast

_HERE = Path(__file__).parent
# Controls, surrogates, and marks that change the direction of text.
_HIDDEN = {"Cc", "Cf", "Cs"}
_MOST_ROWS, _LONGEST = 200, 300


class Markup(str):
    """Finished HTML; any other text is escaped when it is put into HTML."""


# The texts of `page.html`, by name: a line `@@ name` stands before each.
_SPLIT = re.split(r"^@@ (\w+)\n", (_HERE / "page.html").read_text("utf-8"), flags=re.M)[1:]
_TEXTS = {name: Template(x.strip()) for name, x in zip(_SPLIT[::2], _SPLIT[1::2], strict=True)}
_TEXTS["style"] = Template((_HERE / "page.css").read_text("utf-8"))


def text(name: str, /, **values: object) -> Markup:
    """A text of `page.html`, with values in it: all but finished HTML is escaped."""
    escapes = {key: escaped(value) for key, value in values.items()}
    return Markup(_TEXTS[name].substitute(escapes))


def escaped(value: object) -> Markup:
    r"""A value as HTML, also within an attribute.

    | in its text | in HTML |
    |---|---|
    | `<`, `>`, `&`, quotes | as what they are: no tag, no attribute |
    | controls, lone surrogates, marks of direction | their number, as `\u202e` |
    | line breaks | as they are |
    | finished HTML | unchanged |
    """
    if isinstance(value, Markup):
        return value
    said = (
        f"\\u{ord(one):04x}" if one != "\n" and unicodedata.category(one) in _HIDDEN else one
        for one in str(value)
    )
    return Markup(html.escape("".join(said)))


def joined(parts: Iterable[object]) -> Markup:
    """Texts and HTML, one after another."""
    return Markup("".join(map(escaped, parts)))


def number(value: float) -> str:
    """A number for people: three or four significant digits, with separators."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def facts(said: Mapping[str, Any]) -> Markup:
    """A table of names and values, without the entry for a file's format."""
    known = [(k, v) for k, v in said.items() if k not in ("format", "version")]
    rows = joined(text("fact", name=_spaced(k), value=shown(v)) for k, v in known)
    return text("facts", rows=rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table that scrolls if the page is narrow; a long one is cut."""
    heads = joined(text("head", name=_spaced(column)) for column in columns)
    cells = (joined(text("cell", value=shown(v)) for v in row) for row in rows[:_MOST_ROWS])
    left = len(rows) - _MOST_ROWS
    more = text("more", count=f"{left:,}") if left > 0 else ""
    body = joined(text("row", cells=each) for each in cells)
    return text("table", heads=heads, rows=body, more=more)


def everything(found: Mapping[str, Any]) -> Markup:
    """The content of a check or an audit: tables of rows, and one of single values."""
    parts = [facts({name: value for name, value in found.items() if not _is_rows(value)})]
    for name, rows in found.items():
        if _is_rows(rows):
            columns = list(dict.fromkeys(key for row in rows for key in row))
            values = [[row.get(column, "") for column in columns] for row in rows]
            parts += [text("subtitle", title=_spaced(name)), table(columns, values)]
    return joined(parts)


def shown(value: Any) -> str:
    """A value of JSON in words."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value) if abs(value) < 1e100 else str(value)[:_LONGEST]
    if isinstance(value, dict):
        value = [f"{_spaced(key)}: {inner}" for key, inner in cast("dict[str, Any]", value).items()]
    if isinstance(value, list) and not any(isinstance(x, dict | list) for x in value):
        value = "; ".join(map(shown, cast("list[Any]", value)))
    said = value if isinstance(value, str) else json.dumps(value)
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(x, dict) for x in value)


def _spaced(name: str) -> str:
    return name.replace("_", " ")[:_LONGEST]
