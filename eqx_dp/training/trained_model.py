"""A trained model without its run: read from a run's directory, or saved as one file."""

import json
import os
from contextlib import closing
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import expected
from ..expected import RunPath
from ..extras import extra
from ..paths import dotted, dotted_name
from ..precision import JmpPolicy, Policy, checked_policy
from ..privacy import PrivacyPlan
from ..shown import shown
from ..trees import PyTree, is_key
from .checkpoints import Checkpoints, check_fits, named_arrays, part_of, with_arrays
from .first_state import Body
from .ledger import CheckpointError, entries_in, statement

Model = TypeVar("Model")

_FORMAT = "eqx_dp.model"
_SUFFIX = ".safetensors"
_ADVICE = "Give the path of what save_model or a Trainer wrote; or restore it from a backup."


def load_model(source: str | os.PathLike[str], like: Model, *, averaged: bool = False) -> Model:
    """Reads a trained model, without the loss, the optimizer or the data of its run.

    ```python
    like = eqx.filter_eval_shape(Model, jax.random.key(0))  # or a model, whose arrays are ignored
    model = dp.load_model("run", like=like)
    ```

    Arrays keep the dtypes in which they were stored.

    Args:
        source: the directory of a run, whose newest checkpoint that can be read is taken, on a file
            system or in Google's cloud storage; or a file that `save_model` wrote.
        like: a model of the same structure: its arrays, or `jax.ShapeDtypeStruct` in their place,
            say what is read and where it is placed; everything else is taken from it.
        averaged: whether to read the moving average of what was trained (`make_step(..., ema=...)`)
            in place of the parameters of the last step; of a run.

    Raises:
        CheckpointError: there is no whole checkpoint; the file is not of `save_model`; the run has
            no average.
        ValueError: arrays are missing, or have another shape; each is named.
    """
    path, body = expected.directory("source", source), Body(like, None, None)
    wanted = named_arrays(body)
    found = _of_run(path, wanted, averaged) if path.is_dir() else _of_file(path, body, averaged)
    return with_arrays(body, found).model


def save_model(
    file: str | os.PathLike[str],
    model: PyTree[Any],
    *,
    privacy: str | os.PathLike[str] | PrivacyPlan | None = None,
    policy: Policy | JmpPolicy | None = None,
) -> None:
    """Writes a model's arrays to a safetensors file, with a privacy statement and the policy.

    No loss, optimizer state, data, seed or path of this machine is in the file. Its metadata holds
    `privacy` (JSON: plan, epsilon, delta, what is covered and what is not) and `policy`. Any
    library that knows safetensors reads it; arrays are named by their paths, `layers.0.weight`.

    Args:
        file: ends in `.safetensors`.
        model: any tree; only its arrays are written.
        privacy: the directory of the run that trained the model: the statement counts all steps
            that its ledger knows of, also while the run continues, and also where copies of a run
            were put together and took more than the plan's. Or the plan of a loop of your
            own, if all of its steps were taken. None: no statement.
        policy: the policy that the model was trained with.

    Raises:
        ValueError: the file has another ending, or its folder is not there; an array is a key of
            random numbers, which is secret.
        CheckpointError: the directory has no ledger, or a damaged one.
    """
    path, leaves = expected.path("file", file), jax.tree_util.tree_leaves_with_path(model)
    arrays = {dotted(at): leaf for at, leaf in leaves if eqx.is_array(leaf)}
    if path.suffix != _SUFFIX:
        raise ValueError(f"file must end in {_SUFFIX!r}, found {path.name!r}.")
    if not arrays:
        raise ValueError(f"model holds no arrays; found {shown(model)}. Give the trained model.")
    policy = checked_policy(policy)
    keys = [
        name
        for name, leaf in arrays.items()
        if is_key(leaf) or (leaf.dtype == jnp.uint32 and leaf.shape[-1:] in ((2,), (4,), (8,)))
    ]
    if keys:
        raise ValueError(
            f"model.{', model.'.join(keys)} is a key of random numbers, or looks "
            "like one (uint32, 2, 4 or 8 words): it may be secret, and is not written. Put None "
            "in its place, by eqx.tree_at."
        )
    metadata = {"format": _FORMAT, "version": "1"}
    if privacy is not None:
        metadata["privacy"] = json.dumps(_statement(privacy))
    if policy is not None:
        metadata["policy"] = str(policy)
    if not path.parent.is_dir():
        raise ValueError(f"file is in a folder that is not there: {path.parent}. Make it first.")
    written = {name: jnp.asarray(leaf) for name, leaf in arrays.items()}
    beside = path.with_name(f"{path.name}.partial")
    extra("safetensors.flax").save_file(written, beside, metadata=metadata)
    beside.replace(path)


def _of_run(path: RunPath, wanted: dict[str, Any], averaged: bool) -> dict[str, Any]:
    """Reads the arrays of a run's model to the places of their targets."""

    def read(number: int) -> dict[str, Any]:
        saved = checkpoints.shapes(number)
        check_fits(f"checkpoint {number} of {path}", saved, wanted)
        part = "average" if averaged else "model"
        if not any(part_of(name) == part for name in saved):
            raise CheckpointError(
                f"{path} has no average: its step was made without `ema`. Leave `averaged` out."
            )
        place = {name: name.replace("model", part, 1) for name in wanted}
        place = {name: at if at in saved else name for name, at in place.items()}  # or not trained
        targets = {at: saved[at].update(sharding=wanted[x].sharding) for x, at in place.items()}
        found, _ = checkpoints.read(number, targets)
        return {name: found[at].astype(saved[name].dtype) for name, at in place.items()}

    with closing(Checkpoints(path)) as checkpoints:
        found = checkpoints.newest(read)
    if found is None:
        raise CheckpointError(
            f"{path} holds no checkpoint of a run. Name the directory of a Trainer, or a file."
        )
    return found


def _of_file(path: RunPath, body: Body, averaged: bool) -> dict[str, Any]:
    """Reads the arrays of a file that `save_model` wrote, likewise."""
    safetensors = extra("safetensors")
    try:
        with safetensors.safe_open(path, "flax") as opened:
            metadata = opened.metadata() or {}
            found = {f"model.{name}": opened.get_tensor(name) for name in list(opened.keys())}
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {_ADVICE}") from None
    if metadata.get("format") != _FORMAT or averaged:
        raise CheckpointError(
            f"{path} holds one model: save_model(file, state.averaged). Leave `averaged` out."
            if averaged
            else f"{path} was not written by save_model. Read it with safetensors itself."
        )
    wanted = {dotted_name(name): (name, x) for name, x in named_arrays(body).items()}
    check_fits(str(path), found, {name: x for name, (_, x) in wanted.items()})
    return {name: jax.device_put(found[at], x.sharding) for at, (name, x) in wanted.items()}


def _statement(privacy: str | os.PathLike[str] | PrivacyPlan) -> dict[str, Any]:
    if isinstance(privacy, PrivacyPlan):
        return {
            "plan": json.loads(privacy.to_json()),
            "steps_released": privacy.steps,
            "epsilon": privacy.epsilon(),
            "delta": privacy.delta,
        }
    path = expected.directory("privacy", privacy)
    entries = entries_in(path)
    if not entries:
        raise CheckpointError(f"{path} holds no ledger of a run. {_ADVICE}")
    plan = PrivacyPlan.from_json(json.dumps(next(iter(entries.values()))["plan"]))
    return statement(plan, entries)
