"""`add` and `sub`: biases, learned positions."""

from typing import Any

import jax.extend.core as jex_core
from jaxtyping import Array

from .site import sum_to

name = "shift"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A sum with data, or a difference."""
    del operand
    return equation.primitive.name in ("add", "add_any", "sub")


def keep(equation: jex_core.JaxprEqn, operand: int, inputs: list[Any]) -> Any:
    """Nothing: the cotangent says it all."""
    del equation, operand, inputs
    return ()


def gradient(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Array:
    """The cotangent, negative where the parameter was taken away."""
    del kept
    taken_away = equation.primitive.name == "sub" and operand == 1
    return sum_to(equation, operand, -cotangent if taken_away else cotangent)
