"""The format of policy files as a JSON Schema, for editors: it says what the reader checks by."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from .content import ENTRIES, EXTENDS, Entry
from .refusals import DTYPES

_TYPES = {str: "string", np.dtype: "string", bool: "boolean", float: "number", dict: "object"}


def schema_text() -> str:
    """The schema, as `policy.schema.json` holds it (JSON Schema, draft 7: editors know it).

    It knows keys, types, names and what is required. What follows from several entries together
    (which dtype is too narrow for which, whether a scale is a power of two) the reader alone knows.
    """
    schema: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "eqx_dp policy",
        "description": "Which dtype each stage of a private training step uses.",
        **_table(ENTRIES),
    }
    inner = {
        key: {"required": _required(entry.entries, "in the end")}
        for key, entry in ENTRIES.items()
        if entry.entries and _required(entry.entries, "in the end")
    }
    schema["if"] = {"not": {"required": [EXTENDS]}}
    schema["then"] = {"required": _required(ENTRIES, "in the end"), "properties": inner}
    scale = schema["properties"]["loss_scale"]
    scale["if"] = {"properties": {"kind": {"const": "static"}}}
    scale["then"] = {"required": ["kind", "value"]}
    rules = schema["properties"]["modules"]["items"]
    rules["anyOf"] = [{"required": ["compute"]}, {"required": ["matmul"]}]
    return json.dumps(schema, indent=2) + "\n"


def _table(entries: Mapping[str, Entry]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {key: _entry(entry) for key, entry in entries.items()},
    }
    here = _required(entries, "here")
    return {**found, "required": here} if here else found


def _required(entries: Mapping[str, Entry], where: str) -> list[str]:
    return [key for key, entry in entries.items() if entry.required == where]


def _entry(entry: Entry) -> dict[str, Any]:
    told = {"description": entry.told}
    if entry.kind is list:
        return {**told, "type": "array", "items": _table(entry.entries or {})}
    if entry.entries is not None:
        return {**told, **_table(entry.entries)}
    values = tuple(DTYPES) if entry.kind is np.dtype else entry.values
    return {**told, "type": _TYPES[entry.kind], **({"enum": list(values)} if values else {})}
