"""What a run is, so that it is resumed as the same run, and the statement of its privacy."""

import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array

from .step import Step

T = TypeVar("T")

_FORMAT = "eqx_dp.run"
_VERSION = 2
_DIGEST = re.compile("[0-9a-f]{32,}")

# What a record says beside what the run is.
_BESIDE = ("format", "version", "made_by", "programs", "is_unsafe")
# What stays as it is while a run lasts: accounting, sample and noise follow from it.
_FIXED = ("plan", "num_examples", "seed", "model")
_CHANGEABLE = ("policy", "l2_clip_norm", "rescale_to_unit_norm", "disclose")


class Difference(NamedTuple):
    """In what two records differ.

    Attributes:
        part: of the run, as `allow_changed` names it.
        line: where, and what was found.
    """

    part: str
    line: str


def record_of(
    step: Step[Any], arrays: Mapping[str, Array], identity: Mapping[str, str], salt: bytes
) -> dict[str, Any]:
    """A run, as JSON's types: what may not change unasked, and what may ("made_by").

    Args:
        step: the run's step.
        arrays: what is saved, by name.
        identity: of the step, with the run's model and data: its programs, by part.
        salt: of the seed's fingerprint.
    """
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "plan": json.loads(step.plan.to_json()),
        "policy": None if step.policy is None else str(step.policy),
        "is_unsafe": step.policy is not None and step.policy.unsafe,
        "l2_clip_norm": {
            jax.tree_util.keystr(path): _number(norm)
            for path, norm in jax.tree_util.tree_leaves_with_path(step.l2_clip_norm)
            if not callable(norm)
        },
        "rescale_to_unit_norm": step.rescale_to_unit_norm,
        "num_examples": step.num_examples,
        "disclose": list(step.disclose),
        "seed": {"salt": salt.hex(), "scrypt": step.secret_id(salt)},
        "arrays": {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()},
        "identity": dict(identity),
        "made_by": {
            "eqx_dp": importlib.metadata.version("eqx-dp"),
            "jax": jax.__version__,
            "platform": jax.default_backend(),
            "devices": jax.device_count(),
            "hosts": jax.process_count(),
            "microbatch_size": step.microbatch_size,
            "sharding": None if step.sharding is None else repr(step.sharding),
        },
    }


_OF_PROGRAM = {"starts_after", "begins_from", "digest", "disclose", "is_unsafe"}
_PARTS = {
    "plan": dict,
    "seed": dict,
    "identity": dict,
    "arrays": dict,
    "programs": list,
    "made_by": dict,
}


def problem_of_record(record: Mapping[str, Any]) -> str | None:
    """Why something read from a file is no record that this release knows; None if it is one."""
    if record.get("format") != _FORMAT:
        return f"its format is not {_FORMAT}"
    if record.get("version") != _VERSION:
        return (
            f"it is of version {record.get('version')}, and this release of eqx_dp reads version "
            f"{_VERSION}"
        )
    for name, kind in _PARTS.items():
        if not isinstance(record.get(name), kind):
            return f"its {name!r} is missing, or no {kind.__name__}"
    try:
        salt_of(record)
        microbatch_of(record)
        missing = [_OF_PROGRAM - program.keys() for program in record["programs"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"it is damaged: {type(error).__name__} ({error})"
    if not record["programs"] or any(missing):
        return "its 'programs' are not all there"
    return None


def program_of(record: Mapping[str, Any], starts_after: int, begins_from: int) -> dict[str, Any]:
    """An entry of a record's "programs": what a run was from some step on.

    Args:
        record: of the run as that program makes it.
        starts_after: how many steps may have been released before.
        begins_from: the checkpoint whose model it goes on with; fewer, if steps were lost.
    """
    compared = {key: value for key, value in record.items() if key not in (*_BESIDE, "seed")}
    return {
        "starts_after": starts_after,
        "begins_from": begins_from,
        "digest": hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest(),
        "disclose": record["disclose"],
        "is_unsafe": record["is_unsafe"],
    }


def as_it_became(step: Step[T], programs: Sequence[Mapping[str, Any]]) -> Step[T]:
    """The step with the sample and noise of its newest program.

    They follow from what the step computes, as ever. Where the program was changed they follow from
    all changes as well, so that a program that comes back does not repeat its noise.
    """
    if len(programs) == 1:
        return step
    return step.for_run(json.dumps(programs, sort_keys=True))


def goes_on_after(
    programs: Sequence[Mapping[str, Any]], saved: Mapping[str, Any], number: int
) -> int | None:
    """After how many steps the newest program goes on from a checkpoint, bit for bit.

    Args:
        programs: the run's.
        saved: record of the checkpoint.
        number: its step.

    Returns:
        None where it is no state that this program ever had.
    """
    if saved["programs"] == programs:
        return number
    newest = programs[-1]
    return newest["starts_after"] if newest["begins_from"] == number else None


def microbatch_of(record: Mapping[str, Any]) -> int | None:
    """The microbatch size that a run had, if it was on as many devices of this kind."""
    made_by = record["made_by"]
    is_alike = (made_by["platform"], made_by["devices"], made_by["hosts"]) == (
        jax.default_backend(),
        jax.device_count(),
        jax.process_count(),
    )
    size = made_by["microbatch_size"]
    return size if is_alike and isinstance(size, int) else None  # not settled: "auto"


def salt_of(record: Mapping[str, Any]) -> bytes:
    """The salt of a record's fingerprint."""
    return bytes.fromhex(record["seed"]["salt"])


def changeable(identity: Mapping[str, str]) -> tuple[str, ...]:
    """The parts of a run that may change while it lasts, where that is asked for."""
    return tuple(dict.fromkeys((*identity, *_CHANGEABLE)))


def part_of_array(name: str) -> str:
    """The part of a run that a saved array belongs to."""
    for start, part in ((".opt_state", "optimizer"), (".disclosed", "disclose")):
        if name.startswith(start):
            return part
    return "model"


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """In which ways a saved run is another run than the current one."""
    # Digests of programs are keyed by the seed, and tell nothing where that is another.
    beside = _BESIDE if saved["seed"] == current["seed"] else (*_BESIDE, "identity")
    keep = [key for key in dict.fromkeys((*saved, *current)) if key not in beside]
    return [found for key in keep for found in _compared_part(key, saved, current)]


def forbidden(found: Iterable[Difference], allowed: Iterable[str]) -> list[Difference]:
    """Those differences with which a run cannot go on: not allowed, or never allowed."""
    may_change = set(allowed) - set(_FIXED)
    return [difference for difference in found if difference.part not in may_change]


def _compared_part(
    key: str, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[Difference]:
    one, other = saved.get(key), current.get(key)
    if key == "seed":
        if one != other:
            yield Difference(key, "seed: the checkpoint was made with another seed")
        return
    if key not in ("identity", "arrays"):
        for line in _compared(key, one, other):
            yield Difference(key, line)
        return
    one, other = dict(one or {}), dict(other or {})
    for name in dict.fromkeys((*one, *other)):
        part = name if key == "identity" else part_of_array(name)
        for line in _compared(name, one.get(name), other.get(name)):
            yield Difference(part, line)


def _compared(name: str, saved: Any, current: Any) -> Iterator[str]:
    if saved == current:
        return
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for key in dict.fromkeys((*saved, *current)):
            separator = "" if str(key).startswith(("[", ".")) or not key else "."
            yield from _compared(f"{name}{separator}{key}", saved.get(key), current.get(key))
    elif _DIGEST.fullmatch(str(saved)):
        yield f"{name}: the checkpoint was made with another {name}"
    else:
        yield f"{name}: {_said(saved)} in the checkpoint, {_said(current)} in this run"


def _said(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _number(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def privacy_statement(
    step: Step[Any], steps_done: int, programs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What has been spent by a number of steps, what it covers and what it does not.

    Follows from the plan and the number of steps alone: nothing in it depends on the data. Steps
    that may have been released, and that the model does not come from, count.

    Args:
        step: the run's step.
        steps_done: up to the checkpoint that the statement belongs to.
        programs: what the run was, from step to step.
    """
    plan = step.plan
    disclosed = dict.fromkeys(name for program in programs for name in program["disclose"])
    epsilon = plan.epsilon(steps_done)
    relation = plan.neighboring_relation.name
    covers = (
        f"The models of steps 1 to {steps_done}, seen together, are (epsilon, delta)-"
        f"differentially private for data sets that are neighbors by {relation}, if seed and "
        "batches stay secret."
        if math.isfinite(epsilon) and steps_done
        else "No step has been taken: nothing was released."
        if not steps_done
        else "No privacy is guaranteed: epsilon is infinite."
    )
    not_covered = [
        f"models after step {steps_done}, which a process may have computed and not saved; the "
        "file released_at_most.NUMBER, in the run's directory, names the last that there can be",
        "how long steps take",
        "choices that were made by looking at private data (hyperparameters, when to stop)",
        *(f"{name} of each batch, which this run discloses" for name in disclosed),
    ]
    if any(program["is_unsafe"] for program in programs):
        not_covered.append("what is lost by sums or noise in narrow dtypes: the policy is unsafe")
    return {
        "plan": json.loads(plan.to_json()),
        "steps_done": steps_done,
        "epsilon": _number(epsilon),
        "delta": plan.delta,
        "num_examples": step.num_examples,
        "l2_norm_bound": _number(step.grad_fn.l2_norm_bound),
        "covers": covers,
        "does_not_cover": not_covered,
    }
