"""`mul` and `div`: the weight of a normalisation layer."""

from typing import Any

import jax.extend.core as jex_core
from jax.extend.core.primitives import div_p, mul_p
from jaxtyping import Array

from .use import Operation, sum_to

name = "scale"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A product with data of the same shape, or a quotient over it."""
    primitive = equation.primitive
    return primitive is mul_p or (primitive is div_p and operand == 0)


def residuals(operation: Operation, operand: int, inputs: list[Any]) -> Any:
    """The data."""
    del operation
    return inputs[1 - operand]


def gradient(operation: Operation, operand: int, residuals: Any, cotangent: Array) -> Array:
    """Entry by entry."""
    product = cotangent * residuals if operation.primitive == mul_p.name else cotangent / residuals
    return sum_to(operation, operand, product)
