"""What a run computes, as text: the programs of its loss and of its optimizer."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from ..gradients import ClippedGrad, Prepared
from ..precision import Policy
from ..privacy import PrivacyPlan
from ..sharding import ShardingRules, inside
from .extra import updated
from .parameters import Parameters
from .program_text import program_text


class Texts(NamedTuple):
    """The programs that a step is made of."""

    loss: str
    optimizer: str


def texts_of(
    prepared: Prepared,
    rules: ShardingRules | None,
    optimizer: optax.GradientTransformation,
    params: PyTree[Any],
    extra: Mapping[str, Any],
) -> Texts:
    """What a step computes: the same on any number of devices, for any length of batch.

    Args:
        prepared: a call of the clipped gradient, with arrays or under a trace.
        rules: the sharding rules of the gradient.
        optimizer: without noise.
        params: as the optimizer sees them.
        extra: what its update is given beside.

    Raises:
        ValueError: `extra` lacks what the update wants.
    """
    traced = prepared.traced
    with nullcontext() if rules is None else inside(rules):
        loss = f"trained: {len(traced.params)}\n{program_text(traced.program.jaxpr)}"
    shapes = jax.tree.map(shape_of, params)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, traced.accumulate_dtype), shapes)
    return Texts(loss, _optimizer_text(optimizer, shapes, grads, jax.tree.map(shape_of, extra)))


def texts_of_shapes(
    grad_fn: ClippedGrad[Any],
    optimizer: optax.GradientTransformation,
    parameters: Parameters,
    model: PyTree[Any],
    batch: PyTree[Any],
    extra: Mapping[str, Any],
    *,
    takes_key: bool,
) -> Texts:
    """As `texts_of`, of arrays or shapes of arrays: a call is traced, on as few examples as can be.

    Args:
        grad_fn: the clipped gradient.
        optimizer: without noise.
        parameters: how they are stored.
        model: arrays or shapes.
        batch: of any length.
        extra: what the optimizer's update is given beside.
        takes_key: whether the loss can be given a key.
    """
    rules = parameters.rules
    length = 1 if rules is None else rules.num_shards

    def of(model: Any, batch: Any, extra: Any) -> Texts:
        model = parameters.stored(model)
        key = jax.random.key(0) if takes_key else None
        prepared = grad_fn.prepare(model, batch, key, jnp.zeros(length, bool))
        wide = parameters.wide(grad_fn.trainable(model))
        return texts_of(prepared, rules, optimizer, wide, extra)

    model, extra = (jax.tree.map(shape_of, tree) for tree in (model, extra))
    batch = jax.tree.map(lambda leaf: shape_of(leaf, length), batch)
    return eqx.filter_eval_shape(of, model, batch, extra)


def known_text(
    plan: PrivacyPlan,
    num_examples: int,
    policy: Policy | None,
    l2_clip_norm: PyTree[Any],
    rescale_to_unit_norm: bool,
    method: str,
) -> str:
    """What tells runs apart before there is a model."""
    norms = jax.tree_util.tree_leaves_with_path(l2_clip_norm)
    known = {
        "plan": plan.to_json(),
        "num_examples": num_examples,
        "policy": None if policy is None else str(policy),
        "l2_clip_norm": {
            jax.tree_util.keystr(path): float(norm) for path, norm in norms if not callable(norm)
        },
        "rescale_to_unit_norm": rescale_to_unit_norm,
        "method": method,
    }
    return json.dumps(known)


def probe_text(optimizer: optax.GradientTransformation) -> str:
    """An optimizer's programs on a matrix and a vector; empty where it cannot work on those."""
    probe = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((3, 2), (2,))]
    try:
        return _optimizer_text(optimizer, probe, probe, {})
    except Exception:  # whatever it says about a tree that is not the model's
        return ""


def _optimizer_text(
    optimizer: optax.GradientTransformation,
    params: PyTree[jax.ShapeDtypeStruct],
    grads: PyTree[jax.ShapeDtypeStruct],
    extra: Mapping[str, Any],
) -> str:
    """The programs of an optimizer's first state and of its update.

    A number that the optimizer was made with, such as a learning rate, is in one or the other: in
    the update as a literal, or in the first state, from where the update reads it.
    """

    def update(grads: Any, state: Any, params: Any, extra: Any) -> Any:
        return updated(optimizer, grads, state, params, extra)

    first, state, constants = _first_state(optimizer, params)
    later, *_ = _traced(update, grads, eqx.combine(state, constants), params, extra)
    return f"init: {first}\nupdate: {later}"


def _first_state(
    optimizer: optax.GradientTransformation, params: PyTree[jax.ShapeDtypeStruct]
) -> tuple[str, Any, Any]:
    try:
        return _traced(optimizer.init, params)
    except jax.errors.JAXTypeError:  # it reads numbers, as it may outside of jit: here, zeros
        with jax.ensure_compile_time_eval():
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
            state = optimizer.init(zeros)
        return _traced(lambda: state)


def _traced(function: Callable[..., Any], *args: Any) -> tuple[str, Any, Any]:
    """A function's program, and its result: shapes, and what is no array."""
    traced: Any = eqx.filter_make_jaxpr(function)
    program, shapes, rest = traced(*args)
    others = [leaf for leaf in jax.tree.leaves(rest) if isinstance(leaf, bool | int | float | str)]
    return f"{program_text(program)} {others}", shapes, rest


def shape_of(leaf: Any, length: int | None = None) -> Any:
    """An array's shape, with the dtype that it has in a computation; anything else as it is.

    Args:
        leaf: an array, its shape, or anything else.
        length: what to put in place of the length of its first axis.
    """
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return leaf
    shape = leaf.shape if length is None or not leaf.shape else (length, *leaf.shape[1:])
    return jax.ShapeDtypeStruct(
        shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    )
