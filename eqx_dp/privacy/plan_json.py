"""A plan's fields, read from JSON and written to it."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from dp_accounting import NeighboringRelation

from ..expected import expect
from ..files import parsed
from ..shown import shown
from .sampling_kinds import KINDS, Poisson
from .strategies import Banded
from .users import Users

_FORMAT = "eqx_dp.PrivacyPlan"
_VERSION = 1

_UNITS: Mapping[str, Callable[..., Users]] = {"users": lambda per_step: Users(None, per_step)}


def written(fields: Mapping[str, Any]) -> str:
    """Writes a plan's fields as JSON, but for Poisson sampling and independent noise."""
    found: dict[str, Any] = {"format": _FORMAT, "version": _VERSION} | dict(fields)
    found["neighboring_relation"] = fields["neighboring_relation"].name
    sampling, noise, unit = found.pop("sampling"), found.pop("noise"), found.pop("unit")
    if unit is not None:
        found["unit"] = {"kind": "users", "per_step": unit.per_step}
    if not isinstance(sampling, Poisson):
        found["sampling"] = sampling.fields()
    if noise is not None:
        found["noise"] = dataclasses.asdict(noise)
    return json.dumps(found, indent=2)


def read(make: Callable[..., Any], text: str) -> Any:
    """What `make` makes of the fields in a text, or a ValueError unless it is a plan's JSON."""
    expect("text", text, str, "the JSON that to_json wrote")
    try:
        found = parsed(lambda text: json.loads(text, object_pairs_hook=_once), text)
    except ValueError as error:
        raise ValueError(f"a plan must be JSON, as to_json writes it; {error}.") from error
    expect("a plan in JSON", found, dict, "an object")
    if found.pop("format", None) != _FORMAT:
        raise ValueError(f'a plan in JSON must say "format": "{_FORMAT}"; this does not.')
    version = found.pop("version", None)
    if isinstance(version, bool) or version != _VERSION:
        raise ValueError(f"this release reads version {_VERSION} of a plan; found {version!r}.")
    relation, known = found.get("neighboring_relation"), NeighboringRelation.__members__
    found["neighboring_relation"] = known.get(str(relation), relation)
    for name, kinds in (("sampling", KINDS), ("unit", _UNITS)):
        if name in found:
            found[name] = _of_kind(name, found[name], kinds)
    if "noise" in found:
        found["noise"] = _made("noise", _banded, found["noise"])
    return _made("a plan in JSON", make, found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"one of the keys {', '.join(found)} is there twice: leave one of them")
    return found


def _banded(noising: Any, strategy: Any, keep: Any = False) -> Banded:
    return Banded(noising, strategy, keep)


def _of_kind(name: str, found: Any, kinds: Mapping[str, Callable[..., Any]]) -> Any:
    """What an object of JSON stands for: one of some kinds."""
    expect(name, found, dict, f"an object with a kind: {', '.join(kinds)}")
    if (kind := found.pop("kind", None)) not in [*kinds]:
        raise ValueError(f"{name} must have a kind of {', '.join(kinds)}; found {shown(kind)}.")
    return _made(f"{name} of kind {kind}", kinds[kind], found)


def _made(name: str, make: Callable[..., Any], found: Any) -> Any:
    """What a function makes of an object of JSON; a ValueError if it takes other keys."""
    expect(name, found, dict, "an object")
    try:
        return make(**found)
    except TypeError as error:
        raise ValueError(f"{name} has other keys than to_json writes: {error}.") from error
