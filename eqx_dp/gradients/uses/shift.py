"""`add` and `sub`: biases, learned positions.

Where the steps of a scan share the parameter, JAX differentiates the operand (`vjp`): then the
cotangents of the steps are added up on the way, and need not be held.
"""

from typing import Any

import jax.extend.core as jex_core
from jax.extend.core.primitives import add_jaxvals_p, add_p, sub_p
from jaxtyping import Array

from .use import Operation, sum_to

name = "shift"

_PRIMITIVES = (add_p, add_jaxvals_p, sub_p)
PRIMITIVES = frozenset(primitive.name for primitive in _PRIMITIVES)


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A sum with data, or a difference."""
    del operand
    return equation.primitive in _PRIMITIVES


def residuals(operation: Operation, operand: int, inputs: list[Any]) -> Any:
    """Nothing: the cotangent says it all."""
    del operation, operand, inputs
    return ()


def gradient(operation: Operation, operand: int, residuals: Any, cotangent: Array) -> Array:
    """The cotangent, negative where the parameter was taken away."""
    del residuals
    taken_away = operation.primitive == sub_p.name and operand == 1
    return sum_to(operation, operand, -cotangent if taken_away else cotangent)
