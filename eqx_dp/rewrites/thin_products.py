"""Products of stacks of thin matrices, on which XLA of JAX 0.10 ends the process on a CPU."""

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import dot_general_p

from ..device import is_cpu
from ..programs import inlined, rewritten

_THIN = 3


def safe_in_conditionals(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """The same program, whose results and values are safe as operands of a conditional.

    If a product of a stack of thin matrices is transposed and enters a conditional, XLA fuses both
    into one product with a layout that it has no code for (JAX 0.10, on a CPU). Matrices are thin
    if 2 or 3 numbers are added up, or 2 or 3 rows are multiplied by 2 or 3 columns. Such products
    are clamped between the infinities. That keeps normal numbers, infinities and NaN as they are
    (smaller numbers may become zero, as in any arithmetic there).
    """
    is_sound = jax.__version_info__ >= (0, 11) or not is_cpu()
    return program if is_sound else rewritten(program, _clamped)


def _clamped(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn] | None:
    if equation.primitive is not dot_general_p or not _is_thin(equation):
        return None

    def product(*operands: Any) -> Any:
        found = dot_general_p.bind(*operands, **equation.params)
        largest = jnp.array(jnp.inf, found.dtype)
        return jax.lax.clamp(-largest, found, largest)

    return inlined(product, equation)


def _is_thin(equation: jex_core.JaxprEqn) -> bool:
    (contracted, _), (stacked, _) = equation.params["dimension_numbers"]
    left, right = (cast(Any, variable.aval).shape for variable in equation.invars)
    dtype = cast(Any, equation.outvars[0].aval).dtype
    stack, added = (math.prod(left[axis] for axis in axes) for axes in (stacked, contracted))
    rows, columns = (math.prod(shape) // max(stack * added, 1) for shape in (left, right))
    is_small = added <= _THIN or max(rows, columns) <= _THIN
    is_stack = min(stack, added, rows, columns) > 1
    return is_small and is_stack and dtype in (jnp.float32, jnp.float64)
