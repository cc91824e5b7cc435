"""`mul` and `div`: the weight of a normalisation layer."""

from typing import Any

import jax.extend.core as jex_core
from jaxtyping import Array

from .site import sum_to

name = "scale"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A product with data of the same shape, or a quotient over it."""
    name = equation.primitive.name
    return name == "mul" or (name == "div" and operand == 0)


def keep(equation: jex_core.JaxprEqn, operand: int, inputs: list[Any]) -> Any:
    """The data."""
    del equation
    return inputs[1 - operand]


def gradient(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Array:
    """Entry by entry."""
    product = cotangent * kept if equation.primitive.name == "mul" else cotangent / kept
    return sum_to(equation, operand, product)
