"""Any other equation: a branch, a custom derivative rule, a nonlinear function. A bias in a scan.

JAX differentiates the equation itself (`jax.vjp`), by its own rule, with respect to the operands
that are parameters. What is tapped is therefore the operand: the cotangent of the tap is the
gradient of one example, and all operands of the equation have theirs from one backward pass.
"""

from typing import Any

import jax.extend.core as jex_core
from jaxtyping import Array

from .use import Operation

name = "vjp"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """Every equation."""
    del equation, operand
    return True


def residuals(operation: Operation, operand: int, inputs: list[Any]) -> Any:
    """Nothing: JAX keeps what its rule needs."""
    del operation, operand, inputs
    return ()


def gradient(operation: Operation, operand: int, residuals: Any, cotangent: Array) -> Array:
    """The cotangent of the tap."""
    del operation, operand, residuals
    return cotangent
