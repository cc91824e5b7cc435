"""The dtypes in which models and optimizer states are stored and updated."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from ..precision import Policy, refusal

T = TypeVar("T")


def widened(tree: T, policy: Policy | None) -> T:
    """State, gradients or parameters as an optimizer's update gets them: none is made narrower.

    Scalars (learning rates that are state, averages of losses) do not change.
    """
    if policy is None:
        return tree
    dtype = jnp.promote_types(policy.accumulate_dtype, policy.optimizer_dtype)
    return _cast(tree, lambda x: jnp.promote_types(x.dtype, dtype))


def stored_state(state: T, policy: Policy | None) -> T:
    """An optimizer's state as it is stored: arrays of one axis or more in the optimizer dtype."""
    return state if policy is None else _cast(state, lambda x: policy.optimizer_dtype)


def stored_model(params: T, rest: T, policy: Policy) -> T:
    """A model as it is stored, from its trained part and the rest, which keeps its dtypes.

    Only a module rule that has a param dtype changes the dtype of what is not trained.
    """
    return eqx.combine(policy.cast_to_param(params), policy.cast_frozen_to_param(rest))


def wide_parameters(params: T, policy: Policy | None) -> T:
    """Trained parameters in the dtype of an optimizer's update."""
    return params if policy is None else widened(policy.cast_to_accumulate(params), policy)


def first_state(
    optimizer: optax.GradientTransformation, params: PyTree[Any], policy: Policy | None
) -> PyTree[Any]:
    """An optimizer's state before the first step, as it is stored, for parameters as stored.

    Raises:
        ValueError: the optimizer itself keeps an array of floats narrower than declared.
    """
    state = optimizer.init(wide_parameters(params, policy))
    if policy is None:
        return state
    declared = policy.optimizer_dtype
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if _is_array_of_floats(leaf) and jnp.promote_types(leaf.dtype, declared) != leaf.dtype:
            raise refusal(
                f"optimizer state{jax.tree_util.keystr(path)}",
                str(leaf.dtype),
                f"{declared} or wider, as dtypes.optimizer says. Leave out what makes the "
                f'optimizer narrow it (mu_dtype), or declare optimizer = "{leaf.dtype}"',
            )
    return stored_state(state, policy)


def _cast(tree: T, to: Callable[[Any], np.dtype[Any]]) -> T:
    return jax.tree.map(lambda x: x.astype(to(x)) if _is_array_of_floats(x) else x, tree)


def _is_array_of_floats(leaf: Any) -> bool:
    found = getattr(leaf, "dtype", None)
    return found is not None and bool(leaf.shape) and jnp.issubdtype(found, jnp.floating)
