"""`gather` and `dynamic_slice` of whole rows: embeddings."""

import math
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import dynamic_slice_p, gather_p
from jax.lax import GatherScatterMode
from jaxtyping import Array

from .kind import Kind, MatrixAxes, shape_of


class Lookup(Kind):
    """Picks rows of the parameter, along its first axis."""

    name = "lookup"
    is_one_hot = True
    always = "only the rows that were looked up count"

    @classmethod
    def claims(cls, equation: jex_core.JaxprEqn, operand: int) -> bool:
        """A slice or a gather of whole rows, whose indices say which ones JAX picks."""
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

    @property
    def matrix_axes(self) -> MatrixAxes:
        """A table is a matrix: its first axis, and all others."""
        return MatrixAxes(self.shape, (), (0,), tuple(range(1, len(self.shape))))

    @property
    def terms(self) -> int:
        """One for each row that is looked up."""
        return math.prod(self.result) // math.prod(self.shape[1:])

    def residual(self, data: Any) -> Any:
        """The row of every lookup; the number of rows where a lookup finds none."""
        rows, mode = self.shape[0], GatherScatterMode.CLIP
        if (numbers := self.param("dimension_numbers")) is not None:
            data, mode = data[..., numbers.start_index_map.index(0)], self.param("mode")
        # Compared in their own dtype: a large unsigned index is no negative one.
        indices = jnp.asarray(data).reshape(-1)
        if mode == GatherScatterMode.CLIP:
            return jnp.clip(indices, 0, rows - 1).astype(int)
        # If the user promises that there are none, an index out of bounds reads a row and gives it
        # no gradient, as in jax.grad.
        return jnp.where((indices >= 0) & (indices < rows), indices, rows).astype(int)

    def factors(self, residual: Any, cotangent: Array, dtype: Any) -> tuple[Array, Array]:
        """Rows, and their cotangents, which are zero where a lookup finds none."""
        if (numbers := self.param("dimension_numbers")) is not None:
            batch = [i for i in range(cotangent.ndim) if i not in numbers.offset_dims]
            cotangent = jnp.transpose(cotangent, (*batch, *numbers.offset_dims))
        x, g = residual[:, None], cotangent.astype(dtype).reshape(residual.size, -1)
        return x[None], jnp.where(x < self.shape[0], g, 0)[None]
