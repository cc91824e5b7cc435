"""The whole private step, on shapes: what a device is given, and the program that it runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..gradients import ClippedGrad, Prepared, described
from ..precision import agreed_policy
from ..sharding import ShardingRules
from ..trees import PyTree, is_array_or_shape
from ..updates import apply_updates, first_state, stored_state, wide_parameters, widened


class PlannedStep(NamedTuple):
    """A step, to be traced and compiled, never run.

    Attributes:
        call: of its clipped gradient.
        run: from model, optimizer state and batch to the first two.
        arguments: their shapes, each with its sharding; the first two are given away.
        sums: shapes of the gradients' sums, each where its parameter lives.
        accumulators: the same where they live after devices' sums have been added.
        rules: how all of it is spread.
        is_trained: whether each array of the model is.
    """

    call: Prepared
    run: Callable[..., Any]
    arguments: tuple[PyTree[Any], PyTree[Any], PyTree[Any]]
    sums: list[jax.ShapeDtypeStruct]
    accumulators: list[jax.ShapeDtypeStruct]
    rules: ShardingRules | None
    is_trained: list[bool]

    def trace(self) -> Any:
        """The traced program."""
        with on_mesh(self.rules):
            return jax.jit(self.run, donate_argnums=(0, 1)).trace(*self.arguments)

    def compile(self) -> Any:
        """The compiled program: it is not run."""
        traced = self.trace()
        with on_mesh(self.rules):
            return traced.lower().compile()

    @property
    def platform(self) -> str:
        """What kind of device it runs on."""
        if self.rules is None:
            return jax.default_backend()
        return self.rules.mesh.devices.flat[0].platform


def planned_step(
    grad_fn: ClippedGrad[PyTree[Any]],
    model: PyTree[Any],
    batch: tuple[PyTree[Any], ...],
    optimizer: optax.GradientTransformation,
    key: Any,
) -> PlannedStep:
    """Clipped gradient alone, noise, update, with padding in the batch as a sampler leaves it."""
    rules = grad_fn.sharding
    with on_mesh(rules):
        call = described(grad_fn, model, batch, key)
    shapes, static = eqx.partition(model, is_array_or_shape)
    params = jax.eval_shape(lambda shapes: grad_fn.trainable(eqx.combine(shapes, static)), shapes)
    is_trained = jax.tree.map(lambda x: x is not None, params, is_leaf=lambda x: x is None)
    policy = agreed_policy(model, grad_fn.policy)
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
        state = stored_state(state, policy)
        trained = apply_updates(trained, updates, policy, key=jax.random.key(0))
        model = eqx.combine(trained, rest)
        model = model if rules is None else rules.shard(model)
        return eqx.filter(model, eqx.is_array), state

    given = (shapes, state, (batch, mask, key))
    places = jax.tree.leaves(shapes, is_leaf=lambda x: x is None)
    flags = zip(jax.tree.leaves(is_trained), places, strict=True)
    of_arrays = [flag for flag, place in flags if place is not None]
    if rules is None or call.specs is None:
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        return PlannedStep(call, run, arguments, call.sums, call.sums, rules, of_arrays)

    def spread(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(rules.mesh, spec))

    of_examples = jax.tree.map(lambda _: rules.example_spec, (batch, mask))
    of_key = jax.tree.map(lambda _: PartitionSpec(), key)
    specs = rules.specs(shapes), specs_of_state(state, params, call.specs.sums)
    return PlannedStep(
        call,
        run,
        jax.tree.map(spread, given, (*specs, (*of_examples, of_key))),
        list(map(spread, call.sums, call.specs.params)),
        list(map(spread, call.sums, call.specs.sums)),
        rules,
        of_arrays,
    )


def on_mesh(rules: ShardingRules | None) -> AbstractContextManager[Any]:
    """The rules' mesh as a context."""
    return nullcontext() if rules is None else jax.set_mesh(rules.mesh)


def specs_of_state(
    state: PyTree[Any], params: PyTree[Any], specs: list[PartitionSpec]
) -> PyTree[PartitionSpec]:
    """An optimizer's state lives where gradients do, as far as it has their paths and shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {(path, x.shape): spec for (path, x), spec in zip(leaves, specs, strict=True)}

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        ends = ((path[start:], leaf.shape) for start in range(len(path) + 1))
        return next((known[end] for end in ends if end in known), PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec, state)
