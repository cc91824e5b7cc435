"""`gather` and `dynamic_slice` of whole rows: embeddings."""

import math
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.lax import GatherScatterMode
from jaxtyping import Array

from ..views import shape_of

name = "lookup"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """Picks rows of the parameter, along its first axis."""
    if operand != 0 or equation.primitive.name not in ("gather", "dynamic_slice"):
        return False
    shape, sizes = shape_of(equation.invars[0]), equation.params["slice_sizes"]
    if not sizes or sizes[0] != 1 or tuple(sizes[1:]) != tuple(shape[1:]):
        return False
    index_type: Any = equation.invars[1].aval
    if jnp.iinfo(index_type.dtype).max < shape[0]:
        return False  # how such an index is clipped is JAX's own affair
    if equation.primitive.name == "dynamic_slice":
        return True
    numbers = equation.params["dimension_numbers"]
    if 0 not in numbers.start_index_map or numbers.operand_batching_dims:
        return False
    # Indices of other axes say nothing where they are clipped, but drop a row where they are not.
    drops = equation.params["mode"] != GatherScatterMode.CLIP
    return not drops or tuple(numbers.start_index_map) == (0,)


def keep(equation: jex_core.JaxprEqn, operand: int, inputs: list[Any]) -> Any:
    """The row of every lookup; the number of rows where a lookup finds none."""
    del operand
    rows = shape_of(equation.invars[0])[0]
    if equation.primitive.name == "dynamic_slice":
        return jnp.clip(_signed(inputs[1]), 0, rows - 1).reshape(1)
    position = equation.params["dimension_numbers"].start_index_map.index(0)
    indices = _signed(inputs[1][..., position]).reshape(-1)
    if equation.params["mode"] == GatherScatterMode.CLIP:
        return jnp.clip(indices, 0, rows - 1)
    # With a promise that there are none such, an index out of bounds reads a row and leaves no
    # gradient to it, here as in jax.grad.
    return jnp.where((indices >= 0) & (indices < rows), indices, rows)


def _signed(indices: Any) -> Array:
    # The number of rows, which stands for no row at all, may not fit the index's own dtype.
    return jnp.asarray(indices).astype(int)


def rows_of(equation: jex_core.JaxprEqn, cotangent: Array) -> Array:
    """The cotangent of every row that was looked up, `(lookup, entry)`."""
    size = math.prod(equation.params["slice_sizes"])
    if equation.primitive.name == "gather":
        offset = equation.params["dimension_numbers"].offset_dims
        batch = [i for i in range(cotangent.ndim) if i not in offset]
        cotangent = jnp.transpose(cotangent, (*batch, *offset))
    return cotangent.reshape(-1, size)


def scatter(equation: jex_core.JaxprEqn, rows: Array, values: Array) -> Array:
    """Adds every row's value where it was looked up."""
    shape = shape_of(equation.invars[0])
    table = jnp.zeros((shape[0], values.shape[-1]), values.dtype)
    return table.at[rows].add(values, mode="drop").reshape(shape)


def gradient(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Array:
    """A table that is zero but for the rows that were looked up."""
    del operand
    return scatter(equation, kept, rows_of(equation, cotangent))
