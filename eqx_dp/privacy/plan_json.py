"""A plan's fields, read from JSON and written to it."""

import json
from collections.abc import Mapping
from typing import Any, cast

from dp_accounting import NeighboringRelation

from ..expected import expect

_FORMAT = "eqx_dp.PrivacyPlan"
_VERSION = 1


def written(fields: Mapping[str, Any]) -> str:
    """Writes a plan's fields as JSON."""
    named = {"neighboring_relation": fields["neighboring_relation"].name}
    return json.dumps({"format": _FORMAT, "version": _VERSION} | dict(fields) | named, indent=2)


def fields_of(text: str, names: list[str]) -> dict[str, Any]:
    """Reads the fields of a plan, or raises a ValueError unless there are just those."""
    fields = _json_object(text)
    if fields.pop("format", None) != _FORMAT:
        raise ValueError(f'a plan in JSON must say "format": "{_FORMAT}"; this does not.')
    version = fields.pop("version", None)
    if isinstance(version, bool) or version != _VERSION:
        raise ValueError(f"this release reads version {_VERSION} of a plan; found {version!r}.")
    for problem, keys in (("unknown", fields.keys() - names), ("missing", names - fields.keys())):
        if keys:
            raise ValueError(
                f"{problem} in a plan in JSON: {', '.join(sorted(keys))}; its keys are "
                f"format, version, {', '.join(names)}."
            )
    relation = fields["neighboring_relation"]
    known = NeighboringRelation.__members__
    if not isinstance(relation, str) or relation not in known:
        raise ValueError(
            f"neighboring_relation must be one of {', '.join(known)}; found {relation!r}."
        )
    return fields | {"neighboring_relation": known[relation]}


def _json_object(text: str) -> dict[str, Any]:
    expect("text", text, str, "the JSON that to_json wrote")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"a plan must be JSON, as to_json writes it; {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"a plan in JSON must be an object; found {type(found).__name__}.")
    return cast(dict[str, Any], found)
