"""A loss with products of rounded operands, written apart from the engine, in float64.

A power of two is divided out of each operand, which is rounded to what its narrow dtype holds, and
stays in float64. The derivative ignores the rounding, and the cotangent of each product is rounded.
Nothing but the walk from equation to equation is the package's own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

import eqx_dp as dp
from eqx_dp.programs import Call, Scan, bound, inside, interpret, literal_value
from tests.gradients.arithmetic import step_by_step

# The exponent of the power of two that the largest entry of an operand is brought to.
_TO = {"float8_e4m3fn": 7, "float8_e5m2": 14, "float16": 14, "bfloat16": 14}


def rounded_loss(loss: Callable[..., Any], matmul: dp.Matmul) -> Callable[..., Any]:
    """The same loss; it takes arrays, and trees of arrays and other things."""

    def function(*args: Any) -> Any:
        arrays, static = eqx.partition(args, eqx.is_array)
        flat, structure = jax.tree.flatten(arrays)

        def of_arrays(*flat: Array) -> Any:
            return loss(*eqx.combine(structure.unflatten(flat), static))

        program = jax.make_jaxpr(of_arrays)(*flat)
        (result,) = _run(program, flat, matmul)
        return result

    return function


def rounded(x: Array, dtype: Any, scaling: str) -> Array:
    """An operand as it is multiplied."""
    scale: Any = 1.0
    if scaling == "per_example":
        largest = jnp.max(jnp.abs(x))
        scale = jnp.ldexp(1.0, jnp.frexp(largest)[1] - 1 - _TO[str(dtype)])
        scale = jnp.where(largest > 0, scale, 1.0)
    limit = float(jnp.finfo(dtype).max)
    narrow = jnp.clip(x / scale, -limit, limit).astype(jnp.float32).astype(dtype)
    return narrow.astype(x.dtype) * scale


def _product(equation: Any, matmul: dp.Matmul, operands: Sequence[Array]) -> Array:
    def through(x: Array) -> Array:
        return x + jax.lax.stop_gradient(rounded(x, matmul.forward, matmul.scaling) - x)

    @jax.custom_vjp
    def received(y: Array) -> Array:
        return y

    def back(_: None, cotangent: Array) -> tuple[Array]:
        return (rounded(cotangent, matmul.backward, matmul.scaling),)

    received.defvjp(lambda y: (y, None), back)
    return received(equation.primitive.bind(*map(through, operands), **equation.params))


def _is_product(equation: Any) -> bool:
    if equation.primitive.name == "conv_general_dilated":
        return True
    if equation.primitive.name != "dot_general":
        return False
    contracted, batch = equation.params["dimension_numbers"]
    sides = zip(equation.invars, contracted, batch, strict=True)
    return any(x.aval.ndim > len(c) + len(b) for x, c, b in sides)


def _run(program: Any, inputs: list[Any], matmul: dp.Matmul) -> list[Any]:
    run = functools.partial(_run, matmul=matmul)

    def of_equation(equation: Any, operands: list[Any]) -> list[Any]:
        match inside(equation):
            case Call("jit" | "remat", body):
                return run(body, operands)
            case Scan() as scan:
                return step_by_step(scan, equation.params["reverse"], run, operands)
            case _ if _is_product(equation):
                return [_product(equation, matmul, operands)]
            case _:
                return bound(equation, equation.params, operands)

    return interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)
