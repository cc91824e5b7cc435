"""A plan's fields, read from JSON and written to it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, cast

from dp_accounting import NeighboringRelation

from ..expected import expect
from .sampling_kinds import Poisson, from_fields
from .strategies import Banded
from .users import users_from

_FORMAT = "eqx_dp.PrivacyPlan"
_VERSION = 1
_NEEDED = {"sampling_prob", "steps", "noise_multiplier", "delta", "neighboring_relation"}
_OPTIONAL = {"sampling", "noise", "unit"}


def written(fields: Mapping[str, Any]) -> str:
    """Writes a plan's fields as JSON, but for Poisson sampling and independent noise."""
    found: dict[str, Any] = {"format": _FORMAT, "version": _VERSION} | dict(fields)
    found["neighboring_relation"] = fields["neighboring_relation"].name
    sampling, noise, unit = found.pop("sampling"), found.pop("noise"), found.pop("unit")
    if unit is not None:
        found["unit"] = unit.fields()
    if not isinstance(sampling, Poisson):
        found["sampling"] = sampling.fields()
    if noise is not None:
        found["noise"] = dataclasses.asdict(noise)
    return json.dumps(found, indent=2)


def fields_of(text: str) -> dict[str, Any]:
    """Reads the fields of a plan, or raises a ValueError unless there are just those."""
    fields = _json_object(text)
    if fields.pop("format", None) != _FORMAT:
        raise ValueError(f'a plan in JSON must say "format": "{_FORMAT}"; this does not.')
    version = fields.pop("version", None)
    if isinstance(version, bool) or version != _VERSION:
        raise ValueError(f"this release reads version {_VERSION} of a plan; found {version!r}.")
    unknown = fields.keys() - {*_NEEDED, *_OPTIONAL}
    for problem, keys in (("unknown", unknown), ("missing", _NEEDED - fields.keys())):
        if keys:
            raise ValueError(
                f"{problem} in a plan in JSON: {', '.join(sorted(keys))}; its keys are "
                f"format, version, {', '.join(sorted(_NEEDED))}, and perhaps sampling, noise, unit."
            )
    relation = fields["neighboring_relation"]
    known = NeighboringRelation.__members__
    if not isinstance(relation, str) or relation not in known:
        raise ValueError(
            f"neighboring_relation must be one of {', '.join(known)}; found {relation!r}."
        )
    fields["neighboring_relation"] = known[relation]
    if "sampling" in fields:
        fields["sampling"] = from_fields(fields["sampling"])
    if "noise" in fields:
        fields["noise"] = _noise_from(fields["noise"])
    if "unit" in fields:
        fields["unit"] = users_from(fields["unit"])
    return fields


def _noise_from(found: Any) -> Banded:
    if not isinstance(found, dict) or found.keys() - {"keep"} != {"noising", "strategy"}:
        raise ValueError(f"noise must be an object of noising, strategy, keep; found {found!r}.")
    return Banded(**cast(dict[str, list[float]], found))


def _json_object(text: str) -> dict[str, Any]:
    expect("text", text, str, "the JSON that to_json wrote")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"a plan must be JSON, as to_json writes it; {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"a plan in JSON must be an object; found {type(found).__name__}.")
    return cast(dict[str, Any], found)
