"""Convolutions in the layout that XLA runs on all cores of a CPU."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.extend.core.primitives import conv_general_dilated_p

# Their programs speak of blocks of memory, in a layout of their own.
_LEFT_ALONE = ("pallas_call",)


def channels_last(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Rewrites a program's convolutions, in loops and branches as well, for a CPU.

    XLA runs a convolution on a CPU by a library, on all cores, if channels are last in images and
    kernels. It brings convolutions into that layout by itself, but not those in the body of a loop
    or in a branch (https://github.com/jax-ml/jax/issues/12868): the gradient of a convolution of 64
    images takes 20 times as long there. Here every convolution is written channels last, between
    transpositions. Nothing else changes, and on other platforms nothing at all.

    Args:
        program: any program, already differentiated and batched: derivative rules that are not yet
            applied stay as they are.

    Returns:
        A program of the same inputs and results.
    """
    if jax.default_backend() != "cpu":
        return program
    return jex_core.ClosedJaxpr(_rewritten(program.jaxpr), program.consts)


def _rewritten(jaxpr: jex_core.Jaxpr) -> jex_core.Jaxpr:
    equations = [new for equation in jaxpr.eqns for new in _of_equation(equation)]
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=False)):
        return jaxpr
    return jaxpr.replace(eqns=equations)


def _of_equation(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn]:
    if equation.primitive is conv_general_dilated_p:
        return _moved(equation)
    if equation.primitive.name in _LEFT_ALONE:
        return [equation]
    params = {name: _of_param(value) for name, value in equation.params.items()}
    if all(params[name] is value for name, value in equation.params.items()):
        return [equation]
    return [equation.replace(params=params)]


def _of_param(value: Any) -> Any:
    """A parameter of an equation, with the programs in it rewritten."""
    match value:
        case jex_core.ClosedJaxpr():
            jaxpr = _rewritten(value.jaxpr)
            return value if jaxpr is value.jaxpr else jex_core.ClosedJaxpr(jaxpr, value.consts)
        case jex_core.Jaxpr():
            return _rewritten(value)
        case tuple() if any(isinstance(x, jex_core.ClosedJaxpr | jex_core.Jaxpr) for x in value):
            programs = tuple(map(_of_param, value))
            return value if all(map(_is, programs, value)) else programs
        case _:
            return value


def _is(one: object, other: object) -> bool:
    return one is other


def _moved(equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
    """Transpositions, the convolution channels last, and the transposition back."""
    numbers = equation.params["dimension_numbers"]
    dimensions = len(numbers.lhs_spec)
    space = range(1, dimensions - 1)
    last = jax.lax.ConvDimensionNumbers(
        (0, dimensions - 1, *space),
        (dimensions - 1, dimensions - 2, *range(dimensions - 2)),
        (0, dimensions - 1, *space),
    )
    if numbers == last:
        return [equation]
    images, kernel, results = (_order(spec, to) for spec, to in zip(numbers, last, strict=True))

    def convolution(image: Any, weight: Any) -> Any:
        found = conv_general_dilated_p.bind(
            jax.lax.transpose(image, images),
            jax.lax.transpose(weight, kernel),
            **{**equation.params, "dimension_numbers": last},
        )
        return jax.lax.transpose(found, sorted(range(dimensions), key=results.__getitem__))

    inner = jax.make_jaxpr(convolution)(*(variable.aval for variable in equation.invars)).jaxpr
    outer = dict(zip(inner.invars, equation.invars, strict=True))
    outer |= dict(zip(inner.outvars, equation.outvars, strict=True))
    return [
        one.replace(
            invars=[outer.get(x, x) for x in one.invars],
            outvars=[outer.get(x, x) for x in one.outvars],
            source_info=equation.source_info,
        )
        for one in inner.eqns
    ]


def _order(spec: Sequence[int], to: Sequence[int]) -> list[int]:
    """The permutation that brings dimensions from where one spec has them to where another has."""
    at = dict(zip(to, spec, strict=True))
    return [at[i] for i in range(len(spec))]
