"""The whole private step, on shapes: its arguments on a device, and its program."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..gradients import ClippedGrad, Prepared, described
from ..precision import Policy, agreed_policy
from ..sharding import ShardingRules
from ..trees import PyTree, is_array_or_shape
from ..updates import (
    apply_updates,
    first_state,
    stored_model,
    stored_state,
    wide_parameters,
    widened,
)


class PlannedStep(NamedTuple):
    """A step, to be compiled, never run. All arrays are shapes, each with its sharding.

    Attributes:
        call: of its clipped gradient.
        run: from model, optimizer state and the rest to the first two.
        arguments: the model's arrays, the optimizer's state, and (batch, mask, key); the first two
            are given away.
        stored: the model's arrays: the trained ones, then the others.
        sums: the gradients' sums, each where its parameter lives.
        accumulators: the same where they live after devices' sums have been added.
        policy: the function's, or that of a paired model.
        rules: the sharding rules.
    """

    call: Prepared
    run: Callable[..., Any]
    arguments: tuple[PyTree[Any], PyTree[Any], tuple[Any, Any, Any]]
    stored: list[jax.ShapeDtypeStruct]
    sums: list[jax.ShapeDtypeStruct]
    accumulators: list[jax.ShapeDtypeStruct]
    policy: Policy | None
    rules: ShardingRules | None

    def compile(self) -> Any:
        """The compiled program, which is not run."""
        with on_mesh(self.rules):
            return jax.jit(self.run, donate_argnums=(0, 1)).lower(*self.arguments).compile()


def planned_step(
    grad_fn: ClippedGrad[PyTree[Any]],
    model: PyTree[Any],
    batch: tuple[PyTree[Any], ...],
    optimizer: optax.GradientTransformation,
    key: Any,
) -> PlannedStep:
    """Clipped gradient, noise, update, with padding in the batch as from a sampler."""
    rules, policy = grad_fn.sharding, agreed_policy(model, grad_fn.policy)
    with on_mesh(rules):
        call = described(grad_fn, model, batch, key)
    shapes, static = eqx.partition(model, is_array_or_shape)
    params = jax.eval_shape(lambda shapes: grad_fn.trainable(eqx.combine(shapes, static)), shapes)
    is_trained = jax.tree.map(lambda x: x is not None, params, is_leaf=lambda x: x is None)
    if policy is not None:  # as a step of make_step stores it
        parts = eqx.partition(shapes, is_trained)
        shapes = jax.eval_shape(functools.partial(stored_model, policy=policy), *parts)
        model, params = eqx.combine(shapes, static), eqx.filter(shapes, is_trained)
    state = jax.eval_shape(lambda params: first_state(optimizer, params, policy), params)
    mask = jax.ShapeDtypeStruct((call.examples.num_examples,), jnp.bool_)

    def run(arrays: PyTree[Any], state: Any, given: tuple[Any, Any, Any]) -> Any:
        model = eqx.combine(arrays, static)
        batch, is_padding_example, key = given
        grads = grad_fn(model, *batch, key=key, is_padding_example=is_padding_example)
        trained, rest = eqx.partition(model, is_trained)
        # As a step of make_step: wide, and stored again as declared.
        wide = widened((grads, state), policy)
        updates, state = optimizer.update(*wide, wide_parameters(trained, policy))
        trained = apply_updates(trained, updates, policy, key=jax.random.key(0))
        model = eqx.combine(trained, rest)
        model = model if rules is None else rules.shard(model)
        return eqx.filter(model, eqx.is_array), stored_state(state, policy)

    def placed(tree: PyTree[Any], specs: PyTree[Any]) -> PyTree[Any]:
        def place(spec: PartitionSpec, part: PyTree[Any]) -> PyTree[Any]:
            sharding = None if rules is None else NamedSharding(rules.mesh, spec)
            shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
            return jax.tree.map(lambda x: shape(x.shape, x.dtype), part)

        return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    whole = of_model = of_state = of_batch = PartitionSpec()
    of_stored = of_params = of_sums = whole
    if rules is not None and (specs := call.specs) is not None:
        of_model, of_state = rules.specs(shapes), _specs_of_state(state, params, specs.sums)
        of_stored, of_batch = [*specs.params, *specs.frozen], rules.example_spec
        of_params, of_sums = specs.params, specs.sums
    stored = [leaf for part in eqx.partition(shapes, is_trained) for leaf in jax.tree.leaves(part)]
    return PlannedStep(
        call,
        run,
        (
            placed(shapes, of_model),
            placed(state, of_state),
            (placed(batch, of_batch), placed(mask, of_batch), placed(key, whole)),
        ),
        placed(stored, of_stored),
        placed(call.sums, of_params),
        placed(call.sums, of_sums),
        policy,
        rules,
    )


def on_mesh(rules: ShardingRules | None) -> AbstractContextManager[Any]:
    """The rules' mesh as a context."""
    return nullcontext() if rules is None else jax.set_mesh(rules.mesh)


def _specs_of_state(
    state: PyTree[Any], params: PyTree[Any], specs: list[PartitionSpec]
) -> PyTree[PartitionSpec]:
    """An optimizer's state lives where gradients do, as far as it has their paths and shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {(path, x.shape): spec for (path, x), spec in zip(leaves, specs, strict=True)}

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        ends = ((path[start:], leaf.shape) for start in range(len(path) + 1))
        return next((known[end] for end in ends if end in known), PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec, state)
