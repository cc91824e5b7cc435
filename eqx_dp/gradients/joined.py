"""Small leaves side by side, as if they were one.

A program of a hundred biases and scales is otherwise mostly kernels for them: each takes a
microsecond to run, and milliseconds to compile.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from .clip import contracted
from .computed_once import computed_once
from .leaves import LeafGradient

_SMALL = 2**12
"""Entries of a leaf that is joined to others, which takes a copy of its gradients."""


def joined(
    leaves: Sequence[LeafGradient],
) -> tuple[list[LeafGradient], Callable[[list[Array]], list[Array]]]:
    """Puts small leaves whose gradients are formed side by side.

    Args:
        leaves: of one clip norm, in the accumulate dtype where they are formed.

    Returns:
        The leaves that are left, and from their sums to those of all leaves that were given.
    """
    small = {
        index: leaf.formed
        for index, leaf in enumerate(leaves)
        if leaf.formed is not None and math.prod(leaf.formed.shape[1:]) < _SMALL
    }
    if len(small) < 2:
        return list(leaves), lambda sums: sums
    grads = list(small.values())
    # Else the compiler would put them together anew for each of those who need it.
    matrix = computed_once(_side_by_side, grads, grads[0])
    ends = list(itertools.accumulate(math.prod(x.shape[1:]) for x in grads))

    def apart(sums: list[Array]) -> list[Array]:
        total, *rest = sums
        others = iter(rest)
        parts = dict(zip(small, jnp.split(total, ends[:-1]), strict=True))
        return [
            leaf.arranged(parts[index].reshape(small[index].shape[1:]))
            if index in small
            else next(others)
            for index, leaf in enumerate(leaves)
        ]

    rest = [leaf for index, leaf in enumerate(leaves) if index not in small]
    # A contraction: else the compiler would add up each part by itself.
    return [LeafGradient(matrix, weighted=functools.partial(contracted, matrix)), *rest], apart


def _side_by_side(grads: list[Array]) -> Float[Array, "batch entry"]:
    return jnp.concatenate([x.reshape(len(x), math.prod(x.shape[1:])) for x in grads], axis=1)
