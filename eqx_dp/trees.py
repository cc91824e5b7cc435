"""`PyTree`, for public annotations; and kinds of leaves.

jaxtyping's `PyTree` is Any to type checkers, but by a way that pyright, in strict mode, reports as
unknown wherever a user calls such a function. This one is Any in a way that all of them understand,
and jaxtyping's own at run time.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .paths import below
from .shown import shown

if TYPE_CHECKING:
    from typing_extensions import TypeAliasType

    _Leaf = TypeVar("_Leaf")
    PyTree = TypeAliasType("PyTree", Any, type_params=(_Leaf,))
else:
    from jaxtyping import PyTree as PyTree


def is_shape(leaf: Any) -> bool:
    """Whether it is the shape of an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def is_array_or_shape(leaf: Any) -> bool:
    """Whether it is an array, or the shape of one."""
    return eqx.is_array(leaf) or is_shape(leaf)


def is_key(leaf: Any) -> bool:
    """Whether an array, or the shape of one, holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_numbers(name: str, tree: Any) -> None:
    """Raises a ValueError for a NumPy array of texts, objects or dates in a tree of this name."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm":
            raise ValueError(
                f"{below(name, path)} is {shown(leaf)}, which JAX cannot compute with. Turn it "
                "into numbers, or leave it out. (A model may hold texts in a tuple or a list.)"
            )
