"""Checks the content of policy files, by the JSON Schema that editors also use."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, TypeAlias, cast

from .refusals import one_of, refusal

Content: TypeAlias = dict[str, Any]

EXTENDS = "extends"
_FILE = "policy.schema.json"
_KINDS = {"string": str, "boolean": bool, "number": (int, float), "object": dict, "array": list}
_TYPES = {
    "string": "a string",
    "boolean": "true, false",
    "number": "a number",
    "object": "a table",
    "array": "an array of tables, each written as",
}


def schema_text() -> str:
    """The schema (JSON Schema, draft 7), as editors with a TOML language server read it.

    It has keys, types, names and what is required. `Policy` checks the rest (which dtype is too
    narrow for which, whether a scale is a power of two).
    """
    return (files(__package__ or "") / _FILE).read_text()


_SCHEMA: dict[str, Any] = json.loads(schema_text())


def checked_content(content: Content, is_whole: bool) -> Content:
    """Refuses unknown keys, wrong types and values; if content is whole, also missing keys."""
    _check("", content, _SCHEMA, _SCHEMA["then"] if is_whole else {})
    return content


def _check(at: str, value: Any, schema: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Compares a value with its part of the schema; `more` says what else is required."""
    kind = schema["type"]
    # In Python a boolean is a number, in TOML it is not.
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool) != (kind == "boolean"):
        raise refusal(at, repr(value), _allowed(at, schema))
    if "enum" in schema:
        one_of(at, value, cast("list[object]", schema["enum"]))
    if kind == "array":
        for index, table in enumerate(cast("Sequence[Any]", value)):
            _check(f"{at}[{index}]", table, schema["items"], more)
    if kind == "object":
        known, inner = schema["properties"], more.get("properties", {})
        for key, found in cast(Content, value).items():
            path = f"{at}.{key}" if at else key
            if key not in known:
                what = "table" if isinstance(found, dict | list) else "key"
                raise refusal(path, f"an unknown {what}", ", ".join(known))
            _check(path, found, known[key], inner.get(key, {}))
        for key in (*schema.get("required", ()), *more.get("required", ())):
            if key not in value:
                path = f"{at}.{key}" if at else key
                raise refusal(path, "nothing", _allowed(path, known[key], ", which is required"))


def _allowed(at: str, schema: Mapping[str, Any], more: str = "") -> str:
    kind = f"{_TYPES[schema['type']]}{f' [[{at}]]' if schema['type'] == 'array' else ''}{more}"
    values = ", ".join(schema.get("enum", [schema.get("description", "")]))
    return f"{kind}: {values}" if values else kind
