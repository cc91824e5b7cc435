"""Rows of a data set, as they are put into the slots of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int64

from .trees import PyTree


def drawn_from(
    source: PyTree[Any],
    indices: Int64[np.ndarray, "capacity"],
    is_padding_example: Bool[np.ndarray, "capacity"],
) -> PyTree[Any]:
    """The examples at some positions; NaN or 0, for which nothing is read, where there is none."""

    def of_leaf(leaf: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        nothing = np.nan if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
        if isinstance(leaf, jax.Array):
            # One shape, however many were drawn: nothing is compiled anew.
            beyond = np.where(is_padding_example, leaf.shape[0], indices)
            return jnp.take(leaf, beyond, axis=0, mode="fill", fill_value=nothing)
        batch = np.full((len(indices), *leaf.shape[1:]), nothing, leaf.dtype)
        slots = np.argsort(indices)[np.sum(is_padding_example) :]  # a file is read forward
        batch[slots] = leaf[indices[slots]]
        return batch

    return jax.tree.map(of_leaf, source)
