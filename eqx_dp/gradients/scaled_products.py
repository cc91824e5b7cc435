"""Products of operands in a narrow dtype, each scaled by a power of two from that operand alone.

It is written for one example. Under `vmap` the scale of an activation is one number an example, and
stands outside of the product: the product of a whole microbatch stays one product.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core.primitives import dot_general_p
from jaxtyping import Array, Float, Int

from ..precision import Matmul
from ..precision.stages import in_narrow_product
from ..programs import at, bound, interpret, literal_value

# Where the largest entry of a scaled operand is put: below twice this power of two. The product of
# two such operands keeps its sum over 2^90 entries below the end of float32.
_MOST = 14
_BIAS, _DIGITS = 127, 23  # of float32
_FLOAT8 = frozenset(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))


class Scaled(NamedTuple):
    """An operand as it is multiplied; or shapes of one.

    Attributes:
        values: in the narrow dtype.
        exponent: of the power of two that the operand was divided by, a whole number.
    """

    values: Any
    exponent: Any


def scaled(x: Float[Array, "..."], dtype: np.dtype[Any], matmul: Matmul) -> Scaled:
    """Casts an operand of one example, or a parameter, after a power of two was divided out of it.

    Guarantee: the power depends on this operand alone. To divide by it is exact, but for entries
    that become smaller than the narrow dtype holds.

    | entry | becomes |
    |---|---|
    | the largest in magnitude | at most 2^15 and at most the largest number of the dtype |
    | smaller than the dtype holds beside that | zero |
    | NaN | NaN; it has no part in the power |
    | infinite | infinite, or NaN in float8_e4m3fn; likewise |
    | beyond the largest number of the dtype, without scaling | that number |

    Where every finite entry is zero or below float32's normal numbers, the exponent is 0. It is at
    least -126.

    Args:
        x: in bfloat16, float16 or float32.
        dtype: the narrow one.
        matmul: says whether there is a scale.
    """
    with in_narrow_product():
        return _scaled(x, dtype, matmul)


def _scaled(x: Float[Array, "..."], dtype: np.dtype[Any], matmul: Matmul) -> Scaled:
    wide = x.astype(jnp.float32)
    is_finite, limit = jnp.isfinite(wide), float(jnp.finfo(dtype).max)
    exponent = jnp.zeros((), jnp.int32)
    if matmul.scaling == "per_example":
        largest = jnp.max(jnp.where(is_finite, jnp.abs(wide), 0), initial=0)
        # The bits of a positive number begin with its exponent; 0 stands for what is not normal.
        found = jax.lax.bitcast_convert_type(largest, jnp.int32) >> _DIGITS
        to = min(_MOST, math.frexp(limit)[1] - 2)
        exponent = jnp.where(found > 0, jnp.maximum(found - _BIAS - to, 1 - _BIAS), 0)
        # A scale known to the compiler would be moved into the operand, or multiplied with another.
        exponent = jax.lax.optimization_barrier(exponent)
        wide = wide * _power(-exponent)
    values = jnp.where(is_finite, jnp.clip(wide, -limit, limit), wide).astype(dtype)
    return Scaled(values, exponent)


def restored(operand: Scaled, dtype: np.dtype[Any]) -> Float[Array, "..."]:
    """What was multiplied, in another dtype: what is finite stays so, by the largest number."""
    values = operand.values.astype(jnp.float32)
    limit = min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
    wide = jnp.clip(_times(values, operand.exponent), -limit, limit)
    return jnp.where(jnp.isfinite(values), wide, values).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_cast_cotangent(matmul: Matmul, result: Array) -> Array:
    """A result as it is, whose cotangent is as its two products have it: cast, and restored."""
    del matmul
    return result


def _unchanged(matmul: Matmul, result: Array) -> tuple[Array, None]:
    return with_cast_cotangent(matmul, result), None


def _cast(matmul: Matmul, nothing: None, cotangent: Array) -> tuple[Array]:
    del nothing
    return (restored(scaled(cotangent, matmul.backward, matmul), cotangent.dtype),)


with_cast_cotangent.defvjp(_unchanged, _cast)


def scaled_product(equation: jex_core.JaxprEqn, matmul: Matmul) -> Callable[[Array, Array], Array]:
    """A contraction or convolution of scaled operands, as a function of its operands.

    The derivative is that of the product of the cast operands with respect to these, as if a cast
    were none: the cotangent is scaled and cast, and multiplied with the other operand as it was
    cast. An operand that nothing is differentiated by costs no product.

    Args:
        equation: a contraction or a convolution.
        matmul: the dtypes, and whether operands are scaled.
    """
    result: Any = equation.outvars[0].aval
    avals: list[Any] = [variable.aval for variable in equation.invars]
    product = _Product(equation.primitive, _wide(equation.params))

    @jax.custom_vjp
    def multiplied(left: Array, right: Array) -> Array:
        with at(equation):
            sides = [scaled(x, matmul.forward, matmul) for x in (left, right)]
            return product(*sides).astype(result.dtype)

    def forward(left: Any, right: Any) -> tuple[Array, list[Scaled | None]]:
        is_needed = right.perturbed, left.perturbed
        with at(equation):
            sides = [scaled(x.value, matmul.forward, matmul) for x in (left, right)]
            held = [side if its else None for side, its in zip(sides, is_needed, strict=True)]
            return product(*sides).astype(result.dtype), held

    def backward(held: list[Scaled | None], cotangent: Any) -> tuple[Array | None, ...]:
        if isinstance(cotangent, SymbolicZero):
            return None, None
        found: list[Array | None] = []
        with at(equation):
            cast = scaled(cotangent, matmul.backward, matmul)
            for operand, aval in enumerate(avals):
                other = held[1 - operand]
                by = None if other is None else product.transposed(operand, aval, other, cast)
                found.append(None if by is None else by.astype(aval.dtype))
        return tuple(found)

    multiplied.defvjp(forward, backward, symbolic_zeros=True)
    return multiplied


class _Product(NamedTuple):
    """A contraction or a convolution.

    Attributes:
        primitive: which.
        params: its parameters; the result is in float32.
    """

    primitive: jex_core.Primitive
    params: dict[str, Any]

    def __call__(self, left: Scaled, right: Scaled) -> Float[Array, "..."]:
        with in_narrow_product():
            values = self.primitive.bind(*_alike(self.primitive, left, right), **self.params)
        return _times(values, left.exponent + right.exponent)

    def transposed(
        self, operand: int, aval: Any, other: Scaled, cotangent: Scaled
    ) -> Float[Array, "..."]:
        """The cotangent of an operand, by the product that JAX transposes this one to."""

        def of_operand(other: Array, cotangent: Array) -> Array:
            def product(x: Array) -> Array:
                sides = (x, other) if operand == 0 else (other, x)
                return self.primitive.bind(*sides, **self.params)

            there = jax.ShapeDtypeStruct(aval.shape, jnp.float32, sharding=_placed(aval))
            (found,) = jax.linear_transpose(product, there)(cotangent)
            return found

        shapes = [_in_float32(x.values) for x in (other, cotangent)]
        program = jax.make_jaxpr(of_operand)(*shapes)

        def of_equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
            params = equation.params
            if equation.primitive is self.primitive:
                left, right = inputs
                inputs = list(_alike(self.primitive, Scaled(left, zero), Scaled(right, zero)))
                params = _wide(params)
            with in_narrow_product():
                return bound(equation, params, inputs)

        zero = jnp.zeros((), jnp.int32)
        values = [other.values, cotangent.values]
        (found,) = interpret(program.jaxpr, program.consts, values, of_equation, literal_value)
        return _times(found, other.exponent + cotangent.exponent)


def _wide(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "preferred_element_type": jnp.dtype(jnp.float32), "precision": None}


def _in_float32(x: Array) -> Any:
    return jax.eval_shape(lambda x: x.astype(jnp.float32), x)


def _placed(aval: Any) -> Any:
    """The sharding that a type speaks of, on a mesh whose axes are Explicit."""
    return aval.sharding if any(aval.sharding.spec) else None


def _alike(primitive: jex_core.Primitive, left: Scaled, right: Scaled) -> tuple[Array, Array]:
    """Operands that the primitive takes: JAX contracts two formats of 8 bits, and no other two."""
    dtypes = {left.values.dtype, right.values.dtype}
    if len(dtypes) == 1 or (dtypes <= _FLOAT8 and primitive is dot_general_p):
        return left.values, right.values
    wide = dtypes - _FLOAT8 or {jnp.dtype(jnp.bfloat16)}  # which holds both formats of 8 bits
    to = functools.reduce(jnp.promote_types, sorted(wide, key=str))
    return left.values.astype(to), right.values.astype(to)


def _power(exponent: Int[Array, ""]) -> Float[Array, ""]:
    """A power of two, for exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + _BIAS) << _DIGITS, jnp.float32)


def _times(x: Float[Array, "..."], exponent: Int[Array, ""]) -> Float[Array, "..."]:
    """Multiplies by a power of two, for exponents from -252 to 254: none is beyond float32's."""
    half = exponent >> 1
    return x * _power(half) * _power(exponent - half)
