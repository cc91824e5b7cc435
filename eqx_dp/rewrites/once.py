"""Values that a compiler computes once, however many consumers they have.

A compiler may compute a value once for each of its consumers, inside their loops, and round it
differently there (a product and a sum in one instruction, or in two). What the engine measures
would then not be what it adds. The operands and the results of a conditional are computed once for
all consumers, on CPUs, which remove an optimization barrier before loops are fused. Compilers for
GPUs and TPUs remove it afterwards (`tests/compiled` reads their programs), and a conditional would
make the host wait for its flag.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Inexact, Shaped

from ..device import is_cpu

Operands = TypeVar("Operands")
Result = TypeVar("Result")


def computed_once(
    function: Callable[[Operands], Result], operands: Operands, some: Inexact[Array, "..."]
) -> Result:
    """Calls a function whose operands and results are each computed once.

    Args:
        function: from operands to results, arrays both.
        operands: its operands.
        some: any of their values, or one computed with them. The condition on it always holds, but
            the compiler cannot know that.
    """
    function = jax.jit(function, inline=True)  # traced once, for shapes and for the branch
    shapes = jax.eval_shape(function, operands)

    # Barriers keep sharding constraints out of the branches, which would otherwise need the same.
    def ever(operands: Operands) -> Result:
        return jax.lax.optimization_barrier(function(jax.lax.optimization_barrier(operands)))

    def never(operands: Operands) -> Result:
        del operands
        return jax.lax.optimization_barrier(jax.tree.map(_zeros, shapes))

    if not is_cpu():
        return ever(operands)
    return jax.lax.cond(_always(jnp.isnan(some)), ever, never, operands)


@custom_vmap
def _always(flags: Bool[Array, "..."]) -> Bool[Array, ""]:
    return jnp.sum(flags, dtype=jnp.int32) <= flags.size


@_always.def_vmap
def _(size: int, is_mapped: list[bool], flags: Bool[Array, "..."]) -> tuple[Array, bool]:
    """One condition for all examples: with one for each, `cond` would become a selection."""
    del size, is_mapped
    return _always(flags), False


def _zeros(shape: Any) -> Array:
    """Zeros of a shape, of the type that a value of it has on a mesh."""
    manual = shape.manual_axis_type
    if manual is None or not manual.varying:
        return jnp.zeros_like(shape)
    zero = jnp.zeros_like(shape.update(manual_axis_type=None))
    return jax.lax.pcast(zero, tuple(manual.varying), to="varying")


def not_repeated(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Returns `x`, bit for bit. XLA computes it once, however many operations read it.

    XLA repeats cheap operations in every kernel that reads their result, and treats the cipher as
    cheap; Adam's moments and update are three kernels. It does not repeat divisions. This one
    divides by 1. XLA cannot see that (a number with its lowest bit set is not 0), but LLVM, which
    generates the machine code, can, and removes it. `jax.lax.optimization_barrier` does not help on
    a CPU, where it is removed before kernels are formed.
    """
    integer = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jax.lax.div(x, ((bits | integer.type(1)) != 0).astype(x.dtype))
