"""Ways to clip: values that `l2_clip_norm=` takes, and how each group of leaves is clipped."""

import math
import numbers
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..paths import below
from ..shown import shown
from ..trees import PyTree


class Clipping(NamedTuple):
    """How each group of leaves is clipped: one group for a single clip norm, several for a tree.

    Attributes:
        clip_norms: the L2 bound of each group's clipped gradient.
        structure: the tree that the user gave, with one leaf a group.
        rescale_to_unit_norm: whether each clipped group is divided by its clip norm.
        drift: see `Prepared.drift`. Clipped gradients are so much shorter, and the bounds hold
            with it.
    """

    clip_norms: tuple[float, ...]
    structure: Any
    rescale_to_unit_norm: bool
    drift: float = 0.0

    @property
    def l2_norm_bound(self) -> float:
        """The L2 norm that one example's clipped gradient cannot exceed, over all groups.

        Groups are orthogonal, so their bounds add in squares.
        """
        return math.hypot(*self.bounds)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The same for each group."""
        return (1.0,) * len(self.clip_norms) if self.rescale_to_unit_norm else self.clip_norms

    def groups(self, params: PyTree[Array]) -> list[int]:
        """Finds the group of every leaf of `params`, in the order of its leaves.

        Raises:
            ValueError: the tree of clip norms is no prefix of the tree of trainable parameters.
        """
        indices = self.structure.unflatten(range(len(self.clip_norms)))
        indices = jax.tree.map(lambda i: _NO_GROUP if i is None else i, indices, is_leaf=_is_none)
        try:
            groups = jax.tree.broadcast(indices, params)
        except ValueError as error:
            raise ValueError(f"{_NO_PREFIX} {error}") from error
        for path, group in jax.tree_util.tree_leaves_with_path(groups):
            if group == _NO_GROUP:
                where = below("model", path)
                raise ValueError(f"{_NO_PREFIX} {where} is trained and has no clip norm.")
        return jax.tree.leaves(groups)


_NO_GROUP = -1
_NO_PREFIX = (
    "l2_clip_norm is no prefix of the trainable parameters' tree. Give one number, or a tree whose "
    "numbers each stand where a trainable leaf or a whole subtree of the model stands "
    "(jax.tree_util's prefix rule)."
)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def parse_clip_norm(l2_clip_norm: PyTree[Any], rescale_to_unit_norm: bool) -> Clipping:
    """Reads a clip norm, or a tree of them, as the user gave it.

    Leaves of the tree that are neither numbers nor arrays (such as an activation function of the
    model that the tree was made from) have no clip norm. A trainable leaf without one is refused
    once the model is known.

    Raises:
        ValueError: a clip norm is negative, NaN, or not a number; or there is none at all.
    """
    norms = jax.tree_util.tree_map_with_path(_parse_one, l2_clip_norm)
    clip_norms, structure = jax.tree.flatten(norms)
    if not clip_norms:
        raise ValueError(
            f"l2_clip_norm holds no number: found {shown(l2_clip_norm)}. Give a number of at "
            "least 0."
        )
    return Clipping(tuple(clip_norms), structure, rescale_to_unit_norm)


def _parse_one(path: tuple[Any, ...], leaf: Any) -> float | None:
    where = below("l2_clip_norm", path)
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"{where} is a traced value. The clip norm decides the sensitivity, so it has to be a "
            "known number: pass a Python float, or mark the argument as static."
        )
    if isinstance(leaf, numbers.Real) or (eqx.is_array_like(leaf) and np.ndim(leaf) == 0):
        if isinstance(leaf, bool | np.bool_) or jnp.iscomplexobj(leaf):
            raise ValueError(f"{where} must be a real number, found {shown(leaf)}.")
        value = float(leaf)
        if not value >= 0:
            raise ValueError(f"{where} must be at least 0 (inf for no clipping), found {value}.")
        return value
    if eqx.is_array(leaf):
        raise ValueError(
            f"{where} is an array of shape {leaf.shape}; a clip norm is one number. Replace every "
            "trainable leaf, or a subtree above it, by a number, and the other arrays by None."
        )
    return None
