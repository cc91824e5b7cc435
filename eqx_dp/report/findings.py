"""What a check or an audit found, as tables: any JSON object that says whether it is `ok`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .charts import number
from .markup import Markup, joined, tag

_MOST_ROWS = 200
_LONGEST = 300
# Said elsewhere, or of no use to people.
_PASSED_OVER = ("format", "version", "ok")


def findings(found: Mapping[str, Any]) -> Markup:
    """Everything that an object says, but for its verdict.

    | a value | becomes |
    |---|---|
    | a list of objects | a table, with a column for each of their keys |
    | any other list | a list |
    | an object | a table of names and values |
    | all else | a row in one such table |
    """
    said = {key: value for key, value in found.items() if key not in _PASSED_OVER}
    single = {key: value for key, value in said.items() if not isinstance(value, dict | list)}
    parts = [_single(key, value) for key, value in said.items() if key not in single]
    return joined(facts(single), *parts)


def facts(said: Mapping[str, Any]) -> Markup:
    """A table of names and values; nothing if there are none."""
    if not said:
        return Markup()
    rows = (
        tag("tr", tag("th", spaced(key), scope="row"), tag("td", shown(value)))
        for key, value in said.items()
    )
    return tag("div", tag("table", tag("tbody", *rows), class_="facts"), class_="wide")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], says: str) -> Markup:
    """A table that scrolls by itself where the page is narrow.

    `says` is what it holds, for those who do not see it.
    """
    head = tag("thead", tag("tr", *(tag("th", column, scope="col") for column in columns)))
    body = tag("tbody", *(tag("tr", *map(_cell, row)) for row in rows[:_MOST_ROWS]))
    left = len(rows) - _MOST_ROWS
    more = tag("p", f"And {left:,} more, in the JSON file beside this page.") if left > 0 else ""
    grid = tag("table", head, body)
    return joined(
        tag("div", grid, class_="wide", role="region", aria_label=says, tabindex="0"), more
    )


def shown(value: Any) -> str:
    """A value of JSON in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) < 10**15:
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list) and not any(isinstance(one, dict | list) for one in value):
        value = ", ".join(map(shown, cast("list[Any]", value)))
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def spaced(name: str) -> str:
    """A key as words."""
    return name.replace("_", " ")[:_LONGEST]


def _single(name: str, value: Any) -> Markup:
    heading = tag("h4", spaced(name))
    if isinstance(value, dict):
        return joined(heading, facts(value) or tag("p", "None."))
    entries = cast("list[Any]", value)
    if not entries:
        return joined(heading, tag("p", "None."))
    if not all(isinstance(entry, dict) for entry in entries):
        items = (tag("li", shown(entry)) for entry in entries[:_MOST_ROWS])
        return joined(heading, tag("ul", *items))
    columns = list(dict.fromkeys(key for entry in entries for key in entry))
    rows = [[entry.get(key, "") for key in columns] for entry in entries]
    return joined(heading, table([spaced(column) for column in columns], rows, spaced(name)))


def _cell(value: Any) -> Markup:
    is_figure = isinstance(value, int | float) and not isinstance(value, bool)
    return tag("td", shown(value), **({"class_": "figure"} if is_figure else {}))
