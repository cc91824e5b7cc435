"""Taking a batch out of arrays that hold the whole data set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int64

from ..paths import below
from ..trees import PyTree


def checked_source(source: PyTree[Any], name: str, num_examples: int) -> None:
    """Raises a ValueError unless a source is arrays with that many examples in front."""
    leaves = jax.tree_util.tree_leaves_with_path(source)
    if not leaves:
        raise ValueError(
            f"{name} holds no arrays. Give arrays with the examples along their leading axis."
        )
    for path, leaf in leaves:
        where = below(name, path)
        if not isinstance(leaf, (np.ndarray, jax.Array)):
            raise ValueError(
                f"{where} is a {type(leaf).__name__}, not an array: give numpy or JAX arrays with "
                "the examples along their leading axis (np.asarray)."
            )
        if leaf.ndim == 0 or leaf.shape[0] != num_examples:
            raise ValueError(
                f"{where} has shape {leaf.shape}, and the sampler draws from {num_examples} "
                "examples, which have to be along its leading axis: give the whole data set that "
                "the sampler is for."
            )


def drawn_from(
    source: PyTree[Any],
    indices: Int64[np.ndarray, "capacity"],
    is_padding_example: Bool[np.ndarray, "capacity"],
) -> PyTree[Any]:
    """The examples at some positions; zeros, for which nothing is read, where there is padding."""

    def of_leaf(leaf: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        if isinstance(leaf, jax.Array):
            # One shape, however many were drawn: nothing is compiled anew.
            beyond = np.where(is_padding_example, leaf.shape[0], indices)
            return jnp.take(leaf, beyond, axis=0, mode="fill", fill_value=0)
        batch = np.zeros((len(indices), *leaf.shape[1:]), leaf.dtype)
        batch[~is_padding_example] = leaf[indices[~is_padding_example]]
        return batch

    return jax.tree.map(of_leaf, source)
