"""Floating-point operations of a traced program, by formula."""

import math
from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex_core
import numpy as np
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from .inside import (
    Call,
    Cond,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    equations,
    inside,
    open_jaxpr,
    programs_of,
)


def matmul_flops(program: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> int:
    """Floating-point operations of all contractions and convolutions in a program.

    A multiplication and an addition are two. What is multiplied with padding, or with the zeros
    between the entries of a dilated input, does not count, so a convolution and the two that its
    gradient is made of are of one size. The body of a scan counts as often as it runs, that of a
    `while_loop` once (how often it runs is not known), a `cond` as its largest branch, and a
    `shard_map` for all of its devices.
    """
    return sum(map(equation_flops, open_jaxpr(program).eqns))


def primitives(program: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> frozenset[str]:
    """The names of all primitives in a program."""
    return frozenset(equation.primitive.name for equation in equations(program))


def loops(program: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> Iterator[str]:
    """Names the loops of a program: every scan of more than one step, every while."""
    for equation in equations(program):
        match inside(equation):
            case Scan(length=length) if length > 1:
                yield f"a scan of {length} steps"
            case While():
                yield "a while_loop"
            case _:
                pass


def equation_flops(equation: jex_core.JaxprEqn) -> int:
    """Those of one equation, and of all that it holds."""
    if equation.primitive is dot_general_p:
        return _contraction(equation)
    if equation.primitive is conv_general_dilated_p:
        return _convolution(equation)
    if equation.primitive.name == "ragged_dot_general":
        return _ragged(equation)
    match inside(equation):
        case Call(body=body) | LinearSolve(solve=body):
            return matmul_flops(body)
        case Scan() as scan:
            return scan.length * matmul_flops(scan.body)
        case While() as loop:
            return matmul_flops(loop.condition) + matmul_flops(loop.body)
        case Cond() as cond:
            return max(map(matmul_flops, cond.branches))
        case ShardMap() as spread:
            return spread.num_devices * matmul_flops(spread.body)
        case None:
            return sum(map(matmul_flops, programs_of(equation)))


def has_free_dimensions(equation: jex_core.JaxprEqn) -> bool:
    """Whether a contraction or a convolution multiplies matrices: not two vectors alone."""
    if equation.primitive is not dot_general_p:
        return True
    avals: list[Any] = [variable.aval for variable in equation.invars]
    sides = zip(avals, *equation.params["dimension_numbers"], strict=True)
    return any(aval.ndim > len(contracted) + len(batch) for aval, contracted, batch in sides)


def _contraction(equation: jex_core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    return 2 * math.prod(result.shape) * math.prod(left.shape[axis] for axis in contracted)


def _ragged(equation: jex_core.JaxprEqn) -> int:
    """As if every row met one group."""
    left: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    return 2 * math.prod(result.shape) * left.shape[-1]


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
