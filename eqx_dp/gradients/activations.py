"""Roughly how much of a program's forward pass is held for its backward pass."""

import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp

from ..programs import CHEAP, REARRANGED, Call, Scan, inside, interpret

_FOUND_AGAIN = REARRANGED | CHEAP


def activation_bytes(jaxpr: jex_core.Jaxpr, of_example: Sequence[bool]) -> int:
    """A crude estimate: all float results that depend on the example, but for cheap arithmetic.

    A scan's count as often as it runs, and a checkpoint's not at all.

    Args:
        jaxpr: the loss of one example.
        of_example: of each of its inputs whether it is the example's.
    """
    return _held(jaxpr, of_example)[0]


def _held(jaxpr: jex_core.Jaxpr, of_example: Sequence[bool]) -> tuple[int, list[bool]]:
    """The bytes, and which results depend on the example."""
    held = [0]

    def of_equation(equation: jex_core.JaxprEqn, inputs: list[bool]) -> list[bool]:
        if not any(inputs):
            return [False] * len(equation.outvars)
        match inside(equation):
            case Call(wrapper, body) if len(body.jaxpr.invars) == len(inputs):
                size, results = _held(body.jaxpr, inputs)
                held[0] += size if wrapper != "remat" else _bytes(equation.invars)
                return results
            case Scan() as scan:
                held[0] += scan.length * _held(scan.body.jaxpr, [True] * len(inputs))[0]
            case _ if equation.primitive.name not in _FOUND_AGAIN:
                held[0] += _bytes(equation.outvars)
            case _:
                pass
        return [True] * len(equation.outvars)

    consts = [False] * len(jaxpr.constvars)
    results = interpret(jaxpr, consts, of_example, of_equation, lambda _: False)
    return held[0], results


def _bytes(variables: Sequence[Any]) -> int:
    avals = [variable.aval for variable in variables]
    return sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in avals
        if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)
    )
