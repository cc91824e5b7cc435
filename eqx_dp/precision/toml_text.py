"""Tables as TOML text: `tomllib` reads TOML and does not write it."""

import json
from collections.abc import Mapping
from typing import cast


def toml_text(content: Mapping[str, object]) -> str:
    """Writes tables of texts, numbers, booleans, tables and lists of tables, one level deep."""
    plain = {key: value for key, value in content.items() if not isinstance(value, dict | list)}
    blocks = [_lines(plain)] if plain else []
    for key, value in content.items():
        if isinstance(value, dict):
            blocks.append(f"[{key}]\n{_lines(cast('dict[str, object]', value))}")
        elif isinstance(value, list):
            tables = cast("list[dict[str, object]]", value)
            blocks += [f"[[{key}]]\n{_lines(table)}" for table in tables]
    return "\n".join(blocks)


def _lines(table: Mapping[str, object]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        # The escapes of JSON are TOML's, as far as JSON writes them; DEL has to be escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
