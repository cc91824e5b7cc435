"""`dot_general`: linear layers, attention projections, the output of a language model."""

import math
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..views import shape_of
from .site import Matrices, outer_products

name = "contraction"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A contraction of the parameter with data, on either side."""
    del operand
    return equation.primitive.name == "dot_general"


def keep(equation: jex_core.JaxprEqn, operand: int, inputs: list[Any]) -> Any:
    """The other side."""
    del equation
    return inputs[1 - operand]


def matrices(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Matrices:
    """Batch dimensions are groups, the data's free ones are time, contracted ones are features."""
    contracted, batch, free = _dimensions(equation, 1 - operand)
    groups, time = _size(kept, batch), _size(kept, free)
    x = jnp.transpose(kept, (*batch, *free, *contracted)).reshape(groups, time, -1)
    # The result has batch dimensions first, then the free ones of the left and the right side.
    g = cotangent.reshape(groups, -1, time) if operand == 0 else cotangent.reshape(groups, time, -1)
    return x, jnp.swapaxes(g, 1, 2) if operand == 0 else g


def in_matrix_form(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Array:
    """The sum of the outer products."""
    return outer_products(*matrices(equation, operand, kept, cotangent))


def from_matrix(equation: jex_core.JaxprEqn, operand: int, gradient: Array) -> Array:
    """Undoes the order of dimensions."""
    contracted, batch, free = _dimensions(equation, operand)
    shape = shape_of(equation.invars[operand])
    order = (*batch, *contracted, *free)
    return jnp.transpose(
        gradient.reshape([shape[i] for i in order]), [order.index(i) for i in range(len(order))]
    )


def gradient(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Array:
    """The transpose of the contraction."""
    return from_matrix(equation, operand, in_matrix_form(equation, operand, kept, cotangent))


def _dimensions(
    equation: jex_core.JaxprEqn, side: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Contracted, batch and free dimensions of one side."""
    contracted, batch = (pair[side] for pair in equation.params["dimension_numbers"])
    rank = len(shape_of(equation.invars[side]))
    free = tuple(i for i in range(rank) if i not in contracted and i not in batch)
    return tuple(contracted), tuple(batch), free


def _size(array: Array, dimensions: tuple[int, ...]) -> int:
    return math.prod(array.shape[i] for i in dimensions)
