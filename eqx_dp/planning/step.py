"""The whole private step, on shapes: what a device is given, and the program that it runs."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..gradients import ClippedGrad, is_array_or_shape
from ..gradients.outline import trainable, variant
from ..sharding import ShardingRules


class Step(NamedTuple):
    """A step, to be traced and compiled, never run.

    Attributes:
        run: from model, optimizer state and batch to the first two.
        arguments: their shapes, each with its sharding; the first two are given away.
        sums: shapes of the gradients' sums, each where its parameter lives.
        accumulators: the same where they live after devices' sums have been added.
        rules: where all of it lives.
    """

    run: Callable[..., Any]
    arguments: tuple[PyTree[Any], PyTree[Any], PyTree[Any]]
    sums: list[jax.ShapeDtypeStruct]
    accumulators: list[jax.ShapeDtypeStruct]
    rules: ShardingRules | None

    def trace(self) -> Any:
        """The traced program."""
        with self.context():
            return jax.jit(self.run, donate_argnums=(0, 1)).trace(*self.arguments)

    def compile(self, traced: Any) -> Any:
        """The compiled program: it is not run."""
        with self.context():
            return traced.lower().compile()

    def context(self) -> AbstractContextManager[None]:
        """The mesh that it is traced on."""
        return _on_mesh(self.rules)

    @property
    def platform(self) -> str:
        """What kind of device it runs on."""
        if self.rules is None:
            return jax.default_backend()
        return self.rules.mesh.devices.flat[0].platform


def private_step(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    batch: tuple[PyTree[Any], ...],
    optimizer: optax.GradientTransformation,
    key: Any,
    method: str | None,
    microbatch_size: int | None,
) -> Step:
    """Clipped gradient, noise and update, with padding in the batch as a sampler leaves it.

    Args:
        grad_fn: what `filter_clipped_grad` returned.
        model: arrays, or shapes of them.
        batch: the same.
        optimizer: all that happens to the gradients.
        key: of the loss, or None.
        method: instead of that of `grad_fn`.
        microbatch_size: likewise.
    """
    rules = grad_fn.sharding
    of_batch = variant(grad_fn, method=method, microbatch_size=microbatch_size)
    shapes, static = eqx.partition(model, is_array_or_shape)
    params = trainable(grad_fn, model)
    state = jax.eval_shape(optimizer.init, params)
    num_examples = _num_examples(batch)
    examples = (batch, jax.ShapeDtypeStruct((num_examples,), jnp.bool_))
    places = _Places(rules)
    arguments = (
        places.model(shapes),
        places.state(state, params),
        (*places.batch(examples), places.replicated(key)),
    )
    dtype = _accumulate_dtype(grad_fn, params)
    sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)

    def run(arrays: PyTree[Any], state: Any, given: tuple[Any, Any, Any]) -> Any:
        model = eqx.combine(arrays, static)
        batch, is_padding_example, key = given
        grads = of_batch(model, *batch, key=key, is_padding_example=is_padding_example)
        trained, rest = _split(model, params)
        updates, state = optimizer.update(grads, state, trained)
        model = eqx.combine(eqx.apply_updates(trained, updates), rest)
        model = model if rules is None else rules.shard(model)
        return eqx.filter(model, eqx.is_array), state

    spread = (jax.tree.leaves(places.model(sums)), jax.tree.leaves(places.state(sums, params)))
    return Step(run, arguments, *spread, rules)


@contextmanager
def _on_mesh(rules: ShardingRules | None) -> Generator[None]:
    if rules is None:
        yield
        return
    with jax.set_mesh(rules.mesh):
        yield


class _Places(NamedTuple):
    """Puts shapes where the rules say."""

    rules: ShardingRules | None

    def at(self, x: Any, spec: PartitionSpec) -> Any:
        if self.rules is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        sharding = NamedSharding(self.rules.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def replicated(self, tree: PyTree[Any]) -> PyTree[Any]:
        return jax.tree.map(lambda x: self.at(x, PartitionSpec()), tree)

    def model(self, shapes: PyTree[Any]) -> PyTree[Any]:
        if self.rules is None:
            return self.replicated(shapes)
        return jax.tree.map(self.at, shapes, self.rules.specs(shapes))

    def batch(self, batch: PyTree[Any]) -> PyTree[Any]:
        spec = PartitionSpec() if self.rules is None else self.rules.example_spec
        return jax.tree.map(lambda x: self.at(x, spec), batch)

    def state(self, state: PyTree[Any], params: PyTree[Any]) -> PyTree[Any]:
        """An optimizer's state lives where gradients do, as far as it has their shapes."""
        rules = self.rules
        if rules is None:
            return self.replicated(state)
        specs = {
            path: (leaf.shape, rules.accumulator_spec(rules.spec(path, leaf.shape), leaf.shape))
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }

        def place(path: tuple[Any, ...], leaf: Any) -> Any:
            for start in range(len(path) + 1):
                shape, spec = specs.get(path[start:], (None, PartitionSpec()))
                if shape == leaf.shape:
                    return self.at(leaf, spec)
            return self.at(leaf, PartitionSpec())

        return jax.tree_util.tree_map_with_path(place, state)


def _split(model: PyTree[Any], params: PyTree[Any]) -> tuple[PyTree[Any], PyTree[Any]]:
    """A model's trained leaves, and the rest."""
    is_trained = jax.tree.map(lambda x: x is not None, params, is_leaf=lambda x: x is None)
    return eqx.partition(model, is_trained)


def _num_examples(batch: tuple[PyTree[Any], ...]) -> int:
    shapes = [getattr(x, "shape", ()) for x in jax.tree.leaves(batch)]
    if not shapes or not shapes[0]:
        raise ValueError(
            "No batch: give at least one argument after the model, arrays or "
            "jax.ShapeDtypeStruct with examples along their leading axis."
        )
    return shapes[0][0]


def _accumulate_dtype(grad_fn: ClippedGrad[Any], params: PyTree[Any]) -> Any:
    if grad_fn.policy is not None:
        return grad_fn.policy.accumulate_dtype
    return jnp.result_type(jnp.float32, *jax.tree.leaves(params))
