"""Arrays of given shapes that hold nobody's data."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def made_up(like: PyTree[Any]) -> PyTree[Any]:
    """A tree of arrays with the shapes and dtypes of another, whose values are not read.

    | dtype | values |
    |---|---|
    | floats, complex numbers | standard normal, from a fixed seed: no NaN, nothing subnormal |
    | whole numbers | 0, which is an index into any table and a class of any loss |
    | booleans | False |
    | keys of JAX | of zeros |

    Args:
        like: arrays of JAX or numpy, or `jax.ShapeDtypeStruct`; other leaves stay as they are.
    """
    draws = np.random.default_rng(0)

    def of(leaf: Any) -> Any:
        if not _has_shape(leaf):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.empty(leaf.shape, leaf.dtype)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.zeros(leaf.shape, dtype)
        return jnp.asarray(draws.standard_normal(leaf.shape, np.float32)).astype(dtype)

    return jax.tree.map(of, like)


def _has_shape(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct)
