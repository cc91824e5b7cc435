"""Arrays of given shapes that hold nobody's data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..trees import PyTree, is_array_or_shape, is_key


def made_up(like: PyTree[Any]) -> PyTree[Any]:
    """A tree of arrays with the shapes and dtypes of another, whose values are not read.

    | dtype | values |
    |---|---|
    | floats, complex numbers | standard normal, from a fixed seed: no NaN, nothing subnormal |
    | whole numbers | 0, which is an index into any table and a class of any loss |
    | booleans | False |
    | keys of JAX | of zeros |

    Leaves that are no arrays, and stand for none, stay as they are.
    """
    draws = np.random.default_rng(0)

    def of(leaf: Any) -> Any:
        if not (is_array_or_shape(leaf) or isinstance(leaf, np.ndarray | np.generic)):
            return leaf
        if is_key(leaf):
            return jnp.empty(leaf.shape, leaf.dtype)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.zeros(leaf.shape, dtype)
        return jnp.asarray(draws.standard_normal(leaf.shape, np.float32)).astype(dtype)

    return jax.tree.map(of, like)
