"""Floating-point operations of a traced program, by formula."""

import math
from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex_core
import numpy as np


def matmul_flops(jaxpr: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> int:
    """Floating-point operations of all contractions and convolutions in a program.

    A multiplication and an addition are two. What is multiplied with padding, or with the zeros
    between the entries of a dilated input, does not count, so a convolution and the two that its
    gradient is made of are of one size. The body of a scan counts as often as it runs, that of a
    ``while_loop`` once (how often it runs is not known), a ``cond`` as its largest branch.
    """
    eqns: list[jex_core.JaxprEqn] = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return sum(map(_of_equation, eqns))


def primitives(jaxpr: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> frozenset[str]:
    """The names of all primitives in a program."""
    found: set[str] = set()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.add(equation.primitive.name)
        for inner in jex_core.jaxprs_in_params(equation.params):
            found |= primitives(inner)
    return frozenset(found)


def loops(jaxpr: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> Iterator[str]:
    """Names the loops of a program: every scan of more than one step, every while."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        if name == "scan" and equation.params["length"] > 1:
            yield f"a scan of {equation.params['length']} steps"
        elif name == "while":
            yield "a while_loop"
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from loops(inner)


def _of_equation(equation: jex_core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _contraction(equation)
    if name == "conv_general_dilated":
        return _convolution(equation)
    inner = [matmul_flops(jaxpr) for jaxpr in jex_core.jaxprs_in_params(params)]
    if name == "cond":
        return max(inner, default=0)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _contraction(equation: jex_core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    return 2 * math.prod(result.shape) * math.prod(left.shape[axis] for axis in contracted)


def _convolution(equation: jex_core.JaxprEqn) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    avals: list[Any] = [v.aval for v in (*equation.invars[:2], equation.outvars[0])]
    image, kernel, result = (aval.shape for aval in avals)
    out_features, in_features, *window = (kernel[axis] for axis in numbers.rhs_spec)
    met = [
        _positions(image[at], result[to], size, *rest)
        for at, to, size, *rest in zip(
            numbers.lhs_spec[2:],
            numbers.out_spec[2:],
            window,
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ]
    # The kernel's input features are those of one group already.
    return 2 * result[numbers.out_spec[0]] * out_features * in_features * math.prod(met)


def _positions(
    length: int,
    result: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    lhs_dilation: int,
    rhs_dilation: int,
) -> int:
    """How many pairs of result and window position meet an entry of the input, in one dimension."""
    at = np.arange(result)[:, None] * stride + np.arange(window) * rhs_dilation - padding[0]
    there = (at >= 0) & (at <= (length - 1) * lhs_dilation) & (at % lhs_dilation == 0)
    return int(there.sum())
