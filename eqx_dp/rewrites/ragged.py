"""Products of rows with one matrix a group (`jax.lax.ragged_dot`): a mixture of experts."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from ..programs import inlined, rewritten


def with_masked_products(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Writes products of rows in groups as contractions of masked rows with all matrices.

    JAX can map `ragged_dot` over examples only if each has its own matrices. A row x of group i is
    the long row that has x in its i-th part and zeros in all others; the matrices, one below the
    other, make one. So the product is a contraction over groups and features, with a gradient and
    inner products as any other: those of rows in different groups are zero. It takes as many
    floating-point operations as if every row met every matrix, as JAX's own does on a CPU.

    Products whose groups divide a contracted or a batch dimension stay as they are.

    `jax.custom_jvp` and `jax.custom_vjp` functions do not change.

    Returns:
        A program of the same inputs and results.
    """
    return rewritten(program, _of_equation)


def _of_equation(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn] | None:
    if equation.primitive.name != "ragged_dot_general":
        return None
    params = equation.params
    numbers = params["ragged_dot_dimension_numbers"]
    (rows_contracted, contracted), (batch, _) = numbers.dot_dimension_numbers
    ragged, groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    is_of_rows = len(ragged) == len(groups) == 1 and ragged[0] not in rows_contracted
    is_placed = params["group_offset"] is not None or params["out_sharding"] is not None
    if batch or not is_of_rows or is_placed:
        return None

    def product(rows: Any, matrices: Any, sizes: Any) -> Any:
        ends = jnp.cumsum(sizes)
        at = jnp.arange(rows.shape[ragged[0]])[:, None]
        is_of_group = (at >= ends - sizes) & (at < ends)
        free = [axis for axis in range(rows.ndim) if axis not in rows_contracted]
        along = [len(at) if axis == ragged[0] else 1 for axis in free]
        mask = is_of_group.reshape(*along, len(sizes), *[1] * len(contracted))
        left = jnp.expand_dims(jnp.transpose(rows, (*free, *rows_contracted)), len(free))
        # Groups and features as one dimension: with two, the gradients of all matrices are
        # rearranged and copied, which doubled their memory.
        summed = (groups[0], *contracted)
        others = [axis for axis in range(matrices.ndim) if axis not in summed]
        right = jnp.transpose(matrices, (*summed, *others))
        length = math.prod(right.shape[: len(summed)])
        left = jnp.where(mask, left, 0).reshape(*(rows.shape[axis] for axis in free), length)
        right = right.reshape(length, *(matrices.shape[axis] for axis in others))
        options = {name: params[name] for name in ("precision", "preferred_element_type")}
        return jax.lax.dot_general(left, right, (((len(free),), (0,)), ((), ())), **options)

    return inlined(product, equation)
