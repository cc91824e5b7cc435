"""Floating-point operations of a traced program, by formula."""

import math
from typing import Any

import jax.extend.core as jex_core
import numpy as np
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from .inside import Call, Cond, LinearSolve, Scan, ShardMap, While, inside, open_jaxpr, programs_of


def matmul_flops(program: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> int:
    """Floating-point operations of all contractions and convolutions in a program.

    A multiplication and an addition are two. Products with padding, or with the zeros between the
    entries of a dilated input, do not count, so a convolution and the two of its gradient have
    equal counts. The body of a scan counts for each iteration, that of a `while_loop` once (the
    number of iterations is unknown), a `cond` as its largest branch, and a `shard_map` for all of
    its devices.
    """
    return sum(map(equation_flops, open_jaxpr(program).eqns))


def equation_flops(equation: jex_core.JaxprEqn) -> int:
    """The operations of one equation, and of the programs in it."""
    if equation.primitive is dot_general_p or equation.primitive.name == "ragged_dot_general":
        return _contraction(equation)
    if equation.primitive is conv_general_dilated_p:
        return _convolution(equation)
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
    """Whether a contraction or a convolution multiplies matrices, not two vectors."""
    if equation.primitive is not dot_general_p:
        return True
    avals: list[Any] = [variable.aval for variable in equation.invars]
    sides = zip(avals, *equation.params["dimension_numbers"], strict=True)
    return any(aval.ndim > len(contracted) + len(batch) for aval, contracted, batch in sides)


def _contraction(equation: jex_core.JaxprEqn) -> int:
    """The operations of a contraction; in groups, as if every row had one group."""
    params = equation.params
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    left: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    return 2 * math.prod(result.shape) * math.prod(left.shape[axis] for axis in numbers[0][0])


def _convolution(equation: jex_core.JaxprEqn) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    avals: list[Any] = [v.aval for v in (*equation.invars[:2], equation.outvars[0])]
    image, kernel, result = (aval.shape for aval in avals)
    space = zip(*(spec[2:] for spec in numbers), strict=True)
    # The kernel's input features are those of one group already.
    products = result[numbers.out_spec[0]] * math.prod(kernel[i] for i in numbers.rhs_spec[:2])
    for dimension, (of_image, of_kernel, of_result) in enumerate(space):
        stride, gap = params["window_strides"][dimension], params["rhs_dilation"][dimension]
        hole, (before, _) = params["lhs_dilation"][dimension], params["padding"][dimension]
        # The entry of the image for each entry of the result and of the kernel.
        at = np.arange(result[of_result])[:, None] * stride + np.arange(kernel[of_kernel]) * gap
        at -= before
        is_there = (at >= 0) & (at <= (image[of_image] - 1) * hole) & (at % hole == 0)
        products *= int(is_there.sum())
    return 2 * products
