"""`gather` and `dynamic_slice` of whole rows: embeddings."""

import math
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import dynamic_slice_p, gather_p
from jax.lax import GatherScatterMode
from jaxtyping import Array

from .uses import MatrixAxes, Operation, shape_of

name = "lookup"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """Picks rows of the parameter, along its first axis."""
    if operand != 0 or equation.primitive not in (gather_p, dynamic_slice_p):
        return False
    shape, sizes = shape_of(equation.invars[0]), equation.params["slice_sizes"]
    if not sizes or sizes[0] != 1 or tuple(sizes[1:]) != tuple(shape[1:]):
        return False
    index_type: Any = equation.invars[1].aval
    if jnp.iinfo(index_type.dtype).max < shape[0]:
        return False  # JAX decides how such an index is clipped
    if equation.primitive is dynamic_slice_p:
        return True
    numbers = equation.params["dimension_numbers"]
    if 0 not in numbers.start_index_map or numbers.operand_batching_dims:
        return False
    # Clipped indices of other axes have no effect, but unclipped ones drop a row.
    drops = equation.params["mode"] != GatherScatterMode.CLIP
    return not drops or tuple(numbers.start_index_map) == (0,)


def residuals(operation: Operation, operand: int, inputs: list[Any]) -> Any:
    """The row of every lookup; the number of rows where a lookup finds none."""
    del operand
    rows = operation.operands[0][0]
    indices, mode = inputs[1], GatherScatterMode.CLIP
    if operation.primitive == gather_p.name:
        position = operation.param("dimension_numbers").start_index_map.index(0)
        indices, mode = indices[..., position], operation.param("mode")
    # Compared in their own dtype: a large unsigned index is no negative one.
    indices = jnp.asarray(indices).reshape(-1)
    if mode == GatherScatterMode.CLIP:
        return jnp.clip(indices, 0, rows - 1).astype(int)
    # If the user promises that there are none, an index out of bounds reads a row and gives it no
    # gradient, as in jax.grad.
    return jnp.where((indices >= 0) & (indices < rows), indices, rows).astype(int)


def matrix_axes(operation: Operation, operand: int) -> MatrixAxes:
    """A table is a matrix: its first axis, and all others."""
    shape = operation.operands[operand]
    return MatrixAxes(shape, (), (0,), tuple(range(1, len(shape))))


def steps(operation: Operation, operand: int) -> int:
    """One for each row that is looked up."""
    return math.prod(operation.result) // math.prod(operation.operands[operand][1:])


def factors(
    operation: Operation, operand: int, residuals: Any, cotangent: Array
) -> tuple[Array, Array]:
    """Rows, which stand for one-hot vectors, and their cotangents."""
    del operand
    if operation.primitive == gather_p.name:
        offset = operation.param("dimension_numbers").offset_dims
        batch = [i for i in range(cotangent.ndim) if i not in offset]
        cotangent = jnp.transpose(cotangent, (*batch, *offset))
    entries = math.prod(operation.operands[0][1:])
    return residuals[None, :, None], cotangent.reshape(1, residuals.size, entries)


def scatter(num_rows: int, rows: Array, values: Array) -> Array:
    """Adds the values of every row at its index."""
    table = jnp.zeros((num_rows, values.shape[-1]), values.dtype)
    return table.at[rows].add(values, mode="drop")
