"""`dot_general`: linear layers, attention projections, the output of a language model."""

import math
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import dot_general_p
from jaxtyping import Array

from .kind import Kind, MatrixAxes


class Contraction(Kind):
    """A contraction of the parameter with data, on either side."""

    name = "contraction"

    @classmethod
    def claims(cls, equation: jex_core.JaxprEqn, operand: int) -> bool:
        """Any contraction."""
        del operand
        return equation.primitive is dot_general_p

    @property
    def matrix_axes(self) -> MatrixAxes:
        """Batch dimensions are groups, contracted ones are rows, free ones are columns."""
        contracted, batch, free = self._dimensions(self.operand)
        return MatrixAxes(self.shape, batch, contracted, free)

    @property
    def terms(self) -> int:
        """The data's free dimensions."""
        _, _, free = self._dimensions(1 - self.operand)
        return math.prod(self.operands[1 - self.operand][i] for i in free)

    def factors(self, residual: Any, cotangent: Array, dtype: Any) -> tuple[Array, Array]:
        """Batch dimensions are groups, the data's free ones time, contracted ones features."""
        contracted, batch, free = self._dimensions(1 - self.operand)
        groups, time = (math.prod(residual.shape[i] for i in axes) for axes in (batch, free))
        x = jnp.transpose(residual, (*batch, *free, *contracted)).reshape(groups, time, -1)
        x = x.astype(dtype)
        # The result has batch dimensions first, then the free ones of the left and the right side.
        if self.operand == 1:
            return x, cotangent.reshape(groups, time, -1).astype(dtype)
        return x, jnp.swapaxes(cotangent.reshape(groups, -1, time), 1, 2).astype(dtype)

    @property
    def order(self) -> tuple[int, ...]:
        """Groups, time, features."""
        _, batch, free = self._dimensions(1 - self.operand)
        rank = len(self.result)
        cut = rank - len(free) if self.operand == 0 else len(batch)
        return (*range(len(batch)), *range(cut, rank), *range(len(batch), cut))

    def _dimensions(self, side: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Contracted, batch and free dimensions of one side."""
        contracted, batch = (pair[side] for pair in self.param("dimension_numbers"))
        rank = len(self.operands[side])
        free = tuple(i for i in range(rank) if i not in contracted and i not in batch)
        return tuple(contracted), tuple(batch), free
