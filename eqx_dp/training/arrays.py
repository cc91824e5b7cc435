"""What is saved of a state: its arrays, by name, and no secret."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..privacy import GaussianPrivatizerState
from .state import TrainState

Model = TypeVar("Model")


def named_arrays(state: TrainState[Any]) -> dict[str, Array]:
    """What is saved of a state: its arrays by path, keys as numbers, without the noise's key."""
    return {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in leaves(_without_secrets(state)).items()
    }


def with_arrays(state: TrainState[Model], arrays: dict[str, Array]) -> TrainState[Model]:
    """The state with its arrays replaced by saved ones."""

    def replaced(path: tuple[Any, ...], leaf: Any) -> Any:
        found = arrays.get(jax.tree_util.keystr(path)) if eqx.is_array(leaf) else None
        if found is None:
            return leaf
        if _is_key(leaf):
            return jax.random.wrap_key_data(found, impl=jax.random.key_impl(leaf))
        return found

    return jax.tree_util.tree_map_with_path(replaced, state)


def leaves(tree: PyTree[Any]) -> dict[str, Any]:
    """The arrays of a tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _without_secrets(state: TrainState[Any]) -> TrainState[Any]:
    def is_noise(node: object) -> bool:
        return isinstance(node, GaussianPrivatizerState)

    return jax.tree.map(
        lambda node: node._replace(key=None) if is_noise(node) else node, state, is_leaf=is_noise
    )


def same(one: Array, other: Array) -> bool:
    """Whether two arrays hold the same values; NaN is the same as NaN."""
    if _is_key(one):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return bool(jnp.array_equal(one, other, equal_nan=jnp.issubdtype(one.dtype, jnp.inexact)))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
