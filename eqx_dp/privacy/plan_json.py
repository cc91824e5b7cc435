"""A plan's fields, read from JSON and written to it."""

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping
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
_NEEDED = ("sampling_prob", "steps", "noise_multiplier", "delta", "neighboring_relation")
_OPTIONAL = ("sampling", "noise", "unit")
_OF_NOISE = ("noising", "strategy"), ("keep",)

Kinds = Mapping[str, tuple[Callable[..., Any], Collection[str]]]
"""By the name of a kind: what makes it, and its arguments."""

_SAMPLING: Kinds = {
    name: (kind, [field.name for field in dataclasses.fields(kind)]) for name, kind in KINDS.items()
}
_UNITS: Kinds = {"users": (functools.partial(Users, None), ["per_step"])}


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


def fields_of(text: str) -> dict[str, Any]:
    """Reads the fields of a plan, or raises a ValueError unless there are just those.

    The same holds for the objects that stand for sampling, noise and unit.
    """
    expect("text", text, str, "the JSON that to_json wrote")
    try:
        found = parsed(functools.partial(json.loads, object_pairs_hook=_once), text)
    except ValueError as error:
        raise ValueError(f"a plan must be JSON, as to_json writes it; {error}.") from error
    expect("a plan in JSON", found, dict, "an object")
    if found.pop("format", None) != _FORMAT:
        raise ValueError(f'a plan in JSON must say "format": "{_FORMAT}"; this does not.')
    version = found.pop("version", None)
    if isinstance(version, bool) or version != _VERSION:
        raise ValueError(f"this release reads version {_VERSION} of a plan; found {version!r}.")
    fields = _just("a plan in JSON", found, _NEEDED, _OPTIONAL)
    relation, known = fields["neighboring_relation"], NeighboringRelation.__members__
    if not isinstance(relation, str) or relation not in known:
        raise ValueError(
            f"neighboring_relation must be one of {', '.join(known)}; found {relation!r}."
        )
    fields["neighboring_relation"] = known[relation]
    if "sampling" in fields:
        fields["sampling"] = _made("sampling", fields["sampling"], _SAMPLING)
    if "noise" in fields:
        fields["noise"] = Banded(**_just("noise", fields["noise"], *_OF_NOISE))
    if "unit" in fields:
        fields["unit"] = _made("unit", fields["unit"], _UNITS)
    return fields


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a ValueError if a key is there twice."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice: leave one of them")
    return dict(pairs)


def _made(name: str, found: Any, kinds: Kinds) -> Any:
    """What an object of JSON stands for: one of some kinds, with just its arguments."""
    expect(name, found, dict, f"an object with a kind: {', '.join(kinds)}")
    if (kind := found.get("kind")) not in [*kinds]:
        raise ValueError(f"{name} must have a kind of {', '.join(kinds)}; found {shown(kind)}.")
    make, names = kinds[kind]
    fields = _just(f"{name} of kind {kind}", found, ("kind", *names))
    return make(**{key: fields[key] for key in names})


def _just(
    name: str, found: Any, needed: Collection[str], optional: Collection[str] = ()
) -> dict[str, Any]:
    """An object of JSON; a ValueError if a key is unknown or missing."""
    expect(name, found, dict, f"an object of {', '.join(needed)}")
    unknown, missing = found.keys() - {*needed, *optional}, set(needed) - found.keys()
    for problem, keys in (("unknown", unknown), ("missing", missing)):
        if keys:
            known = ", ".join((*needed, *(f"perhaps {key}" for key in optional)))
            found = ", ".join(sorted(keys))
            raise ValueError(f"{problem} in {name}: {found}; its keys are {known}.")
    return found
