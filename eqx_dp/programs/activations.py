"""The memory that a program's forward pass leaves for its backward pass, by shapes."""

import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp

from .inside import Call, Scan, inside
from .interpreter import interpret
from .names import CHEAP, REARRANGED

_FOUND_AGAIN = REARRANGED | CHEAP


def activation_bytes(jaxpr: jex_core.Jaxpr, of_example: Sequence[bool]) -> tuple[int, list[bool]]:
    """A crude estimate: all float results that depend on the example, except cheap arithmetic.

    Results in a scan count for each iteration, those in a checkpoint not at all.

    Args:
        jaxpr: the loss of one example.
        of_example: of each of its inputs whether it is the example's.

    Returns:
        The bytes, and of each result whether it depends on the example.
    """
    held = [0]

    def of_equation(equation: jex_core.JaxprEqn, inputs: list[bool]) -> list[bool]:
        if not any(inputs):
            return [False] * len(equation.outvars)
        match inside(equation):
            case Call(wrapper, body) if len(body.jaxpr.invars) == len(inputs):
                size, results = activation_bytes(body.jaxpr, inputs)
                held[0] += size if wrapper != "remat" else _size(equation.invars)
                return results
            case Scan() as scan:
                held[0] += scan.length * activation_bytes(scan.body.jaxpr, [True] * len(inputs))[0]
            case _ if equation.primitive.name not in _FOUND_AGAIN:
                held[0] += _size(equation.outvars)
            case _:
                pass
        return [True] * len(equation.outvars)

    consts = [False] * len(jaxpr.constvars)
    results = interpret(jaxpr, consts, of_example, of_equation, lambda _: False)
    return held[0], results


def _size(variables: Sequence[Any]) -> int:
    avals = [variable.aval for variable in variables]
    return sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in avals
        if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)
    )
