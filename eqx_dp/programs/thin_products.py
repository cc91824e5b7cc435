"""Products of stacks of thin matrices, written as sums where XLA cannot compile them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import dot_general_p

from .rewriting import inlined, rewritten

_THIN = 3


def thin_products_summed(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Writes products of stacks of thin matrices as sums, under JAX 0.10 on a CPU.

    XLA of JAX 0.10 ends the process on a CPU where such a product is transposed twice and both
    results go into a conditional: it merges the two once its layouts are fixed, and then asks for a
    product in a layout that it has no code for (`tests/programs/test_thin_products.py` has such a
    program). Matrices are thin if 2 or 3 numbers are added up, or 2 or 3 rows meet 2 or 3 columns.
    Products on Explicit axes stay as they are.

    Returns:
        A program of the same inputs and results, which may differ by rounding.
    """
    if jax.__version_info__ >= (0, 11) or jax.default_backend() != "cpu":
        return program
    return rewritten(program, _of_equation)


def _of_equation(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn] | None:
    if equation.primitive is not dot_general_p or equation.params["out_sharding"] is not None:
        return None
    contracted, stacked = equation.params["dimension_numbers"]
    avals: list[Any] = [variable.aval for variable in equation.invars]
    free = [
        [axis for axis in range(aval.ndim) if axis not in (*contracted[i], *stacked[i])]
        for i, aval in enumerate(avals)
    ]

    def size(i: int, axes: Sequence[int]) -> int:
        return math.prod(avals[i].shape[axis] for axis in axes)

    added, rows, columns = size(0, contracted[0]), size(0, free[0]), size(1, free[1])
    is_thin = added <= _THIN or max(rows, columns) <= _THIN
    if not is_thin or 1 in (size(0, stacked[0]), added, rows, columns):
        return None
    result: Any = equation.outvars[0].aval
    is_narrow = jnp.issubdtype(result.dtype, jnp.floating) and result.dtype.itemsize < 4
    dtype = jnp.float32 if is_narrow else result.dtype

    def summed(*factors: jax.Array) -> jax.Array:
        ones = ([1] * len(free[1]), [1] * len(free[0]))
        spread: list[jax.Array] = []
        for i, x in enumerate(factors):
            x = jax.lax.transpose(x.astype(dtype), (*stacked[i], *free[i], *contracted[i]))
            at = len(stacked[i]) + (len(free[0]) if i == 0 else 0)
            spread.append(x.reshape(*x.shape[:at], *ones[i], *x.shape[at:]))
        inner = tuple(range(result.ndim, result.ndim + len(contracted[0])))
        return jnp.sum(spread[0] * spread[1], axis=inner).astype(result.dtype)

    return inlined(summed, equation)
