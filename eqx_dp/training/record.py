"""What a run is, so that it is resumed as the same run, and the statement of its privacy."""

import importlib.metadata
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jaxtyping import Array

from .step import Step

_FORMAT = "eqx_dp.run"
_VERSION = 1


def record_of(step: Step[Any], arrays: Mapping[str, Array], salt: bytes) -> dict[str, Any]:
    """A run, as JSON's types: what may not change while it lasts, and what may ("made_by").

    Args:
        step: the run's step.
        arrays: what is saved, by name.
        salt: of the seed's fingerprint.
    """
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "plan": json.loads(step.plan.to_json()),
        "policy": None if step.policy is None else str(step.policy),
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


def microbatch_of(record: Mapping[str, Any]) -> int | None:
    """The microbatch size that a run had, if it was on as many devices of this kind."""
    made_by = record["made_by"]
    is_alike = (made_by["platform"], made_by["devices"], made_by["hosts"]) == (
        jax.default_backend(),
        jax.device_count(),
        jax.process_count(),
    )
    return made_by["microbatch_size"] if is_alike else None


def salt_of(record: Mapping[str, Any]) -> bytes:
    """The salt of a record's fingerprint."""
    return bytes.fromhex(record["seed"]["salt"])


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """In which ways a saved run is another run than the current one, a line each."""
    keep = [key for key in (*saved, *(k for k in current if k not in saved)) if key != "made_by"]
    return [line for key in keep for line in _compared(key, saved.get(key), current.get(key))]


def _compared(name: str, saved: Any, current: Any) -> Iterator[str]:
    if saved == current:
        return
    if name == "seed":
        yield "seed: the checkpoint was made with another seed"
    elif isinstance(saved, Mapping) and isinstance(current, Mapping):
        for key in dict.fromkeys((*saved, *current)):
            separator = "" if str(key).startswith(("[", ".")) or not key else "."
            yield from _compared(f"{name}{separator}{key}", saved.get(key), current.get(key))
    else:
        yield f"{name}: {_said(saved)} in the checkpoint, {_said(current)} in this run"


def _said(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _number(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def privacy_statement(step: Step[Any], steps_done: int) -> dict[str, Any]:
    """What has been spent by a number of steps, what it covers and what it does not.

    Follows from the plan and the number of steps alone: nothing in it depends on the data.
    """
    plan = step.plan
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
        "how long steps take",
        "choices that were made by looking at private data (hyperparameters, when to stop)",
        *(f"{name} of each batch, which this run discloses" for name in step.disclose),
    ]
    if step.policy is not None and step.policy.unsafe:
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
