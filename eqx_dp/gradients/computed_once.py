"""Values that are computed once, whoever needs them: what is measured is what is added.

A compiler may compute a value once for each of its consumers, inside of their loops, and round it
differently there (a product and a sum in one instruction, or in two). Where the terms of a gradient
nearly cancel, what is added would then not be what was measured. The operands and the results of a
conditional are computed once, whatever is done with them. (An optimization barrier does not help:
on CPUs it is gone before loops are fused.)
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Inexact

Operands = TypeVar("Operands")
Result = TypeVar("Result")


def computed_once(
    function: Callable[[Operands], Result], operands: Operands, some: Inexact[Array, "..."]
) -> Result:
    """Calls a function so that its operands are computed once before it, its results once in it.

    Args:
        function: from operands to results, arrays both.
        operands: what it is given.
        some: any value of them, or one that comes with them. The condition on it always holds,
            which the compiler cannot know.
    """
    function = jax.jit(function, inline=True)  # traced once, for shapes and for the branch
    shapes = jax.eval_shape(function, operands)

    # Behind a barrier, or a constraint of the user's on a result would have to be in both branches.
    def ever(operands: Operands) -> Result:
        return jax.lax.optimization_barrier(function(jax.lax.optimization_barrier(operands)))

    def never(operands: Operands) -> Result:
        del operands
        return jax.lax.optimization_barrier(jax.tree.map(_zeros, shapes))

    return jax.lax.cond(_always(jnp.isnan(some)), ever, never, operands)


@custom_vmap
def _always(flags: Bool[Array, "..."]) -> Bool[Array, ""]:
    return jnp.sum(flags, dtype=jnp.int32) <= flags.size


@_always.def_vmap
def _(size: int, is_mapped: list[bool], flags: Bool[Array, "..."]) -> tuple[Array, bool]:
    """One condition for all: of one each, the conditional would become a selection."""
    del size, is_mapped
    return _always(flags), False


def _zeros(shape: Any) -> Array:
    """Zeros of a shape, of the type that a value of it has on a mesh."""
    manual = shape.manual_axis_type
    if manual is None or not manual.varying:
        return jnp.zeros_like(shape)
    zero = jnp.zeros_like(shape.update(manual_axis_type=None))
    return jax.lax.pcast(zero, tuple(manual.varying), to="varying")
