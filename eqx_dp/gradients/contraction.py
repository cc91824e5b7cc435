"""`dot_general`: linear layers, attention projections, the output of a language model."""

import math
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import dot_general_p
from jaxtyping import Array

from .uses import MatrixAxes, Operation

name = "contraction"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A contraction of the parameter with data, on either side."""
    del operand
    return equation.primitive is dot_general_p


def residuals(operation: Operation, operand: int, inputs: list[Any]) -> Any:
    """The other side."""
    del operation
    return inputs[1 - operand]


def matrix_axes(operation: Operation, operand: int) -> MatrixAxes:
    """Batch dimensions are groups, contracted ones are rows, free ones are columns."""
    contracted, batch, free = _dimensions(operation, operand)
    return MatrixAxes(operation.operands[operand], batch, contracted, free)


def steps(operation: Operation, operand: int) -> int:
    """The data's free dimensions."""
    _, _, free = _dimensions(operation, 1 - operand)
    return math.prod(operation.operands[1 - operand][i] for i in free)


def factors(
    operation: Operation, operand: int, residuals: Any, cotangent: Array
) -> tuple[Array, Array]:
    """Batch dimensions are groups, the data's free ones are time, contracted ones are features."""
    contracted, batch, free = _dimensions(operation, 1 - operand)
    groups, time = (math.prod(residuals.shape[i] for i in axes) for axes in (batch, free))
    x = jnp.transpose(residuals, (*batch, *free, *contracted)).reshape(groups, time, -1)
    # The result has batch dimensions first, then the free ones of the left and the right side.
    g = cotangent.reshape(groups, -1, time) if operand == 0 else cotangent.reshape(groups, time, -1)
    return x, jnp.swapaxes(g, 1, 2) if operand == 0 else g


def columns_last(operation: Operation, operand: int) -> tuple[int, ...]:
    """The axes of the result in the order of `factors`: time, then features."""
    _, batch, free = _dimensions(operation, 1 - operand)
    rank = len(operation.result)
    if operand == 1:
        return tuple(range(rank))
    cut = rank - len(free)
    return (*range(len(batch)), *range(cut, rank), *range(len(batch), cut))


def _dimensions(
    operation: Operation, side: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Contracted, batch and free dimensions of one side."""
    contracted, batch = (pair[side] for pair in operation.param("dimension_numbers"))
    rank = len(operation.operands[side])
    free = tuple(i for i in range(rank) if i not in contracted and i not in batch)
    return tuple(contracted), tuple(batch), free
