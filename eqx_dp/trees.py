"""`PyTree`, for public annotations; and kinds of leaves.

jaxtyping's `PyTree` is Any to type checkers, but by a way that pyright, in strict mode, reports as
unknown wherever a user calls such a function. This one is Any in a way that all of them understand,
and jaxtyping's own at run time.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

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
