"""Products of a loss in a narrow dtype: which ones, and the program that computes them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from jaxtyping import Array, Float, Int

from ..precision import Matmul, Policy
from ..precision.stages import in_narrow_product, rules_at
from ..programs import (
    Call,
    Cond,
    Scan,
    While,
    at,
    bound,
    has_free_dimensions,
    inlined,
    inside,
    interpret,
    literal_value,
    with_programs,
)
from ..programs.rewriting import rewritten
from .norms import exponent_of, halves, power

# The largest entry of a scaled operand is below twice this power of two. The product of two such
# operands keeps its sum over 2^90 entries below the end of float32.
_MOST = 14
_FLOAT8 = frozenset(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))


class Scaled(NamedTuple):
    """An operand as it enters a product; or its shapes.

    Attributes:
        values: in the narrow dtype.
        exponent: of the power of two that the operand was divided by, a whole number.
    """

    values: Any
    exponent: Any


def scaled(x: Float[Array, "..."], dtype: np.dtype[Any], matmul: Matmul) -> Scaled:
    """Casts an operand of one example, or a parameter, after a power of two was divided out of it.

    Guarantee: the power depends on this operand alone. The division is exact, except for entries
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
        wide = x.astype(jnp.float32)
        is_finite, limit = jnp.isfinite(wide), float(jnp.finfo(dtype).max)
        exponent = jnp.zeros((), jnp.int32)
        if matmul.scaling == "per_example":
            largest = jnp.max(jnp.where(is_finite, jnp.abs(wide), 0), initial=0)
            found, least = exponent_of(largest), jnp.finfo(jnp.float32).minexp
            to = min(_MOST, math.frexp(limit)[1] - 2)
            exponent = jnp.where(found >= least, jnp.maximum(found - to, least), 0)
            # The compiler would move a known scale into the operand, or multiply it with another.
            exponent = jax.lax.optimization_barrier(exponent)
            wide = wide * power(-exponent, wide.dtype)
        values = jnp.where(is_finite, jnp.clip(wide, -limit, limit), wide).astype(dtype)
        return Scaled(values, exponent)


def restored(operand: Scaled, dtype: np.dtype[Any]) -> Float[Array, "..."]:
    """The operand in another dtype; finite numbers stay finite, clipped to the largest number."""
    values = operand.values.astype(jnp.float32)
    # A number that bfloat16 holds, as all others here: sums may split it.
    limit = min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.bfloat16).max))
    wide = jnp.clip(_times(values, operand.exponent), -limit, limit)
    return jnp.where(jnp.isfinite(values), wide, values).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_cast_cotangent(matmul: Matmul, result: Array) -> Array:
    """The unchanged result; its cotangent is cast and restored, as both products have it."""
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

    The derivative is that of the product of the cast operands, and treats a cast as the identity:
    the cotangent is scaled and cast, and multiplied with the other cast operand. An operand without
    a derivative costs no product.

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

            placed = aval.sharding if any(aval.sharding.spec) else None  # on Explicit axes
            there = jax.ShapeDtypeStruct(aval.shape, jnp.float32, sharding=placed)
            (found,) = jax.linear_transpose(product, there)(cotangent)
            return found

        values = [other.values, cotangent.values]
        shapes = jax.eval_shape(lambda *its: [x.astype(jnp.float32) for x in its], *values)
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
        (found,) = interpret(program.jaxpr, program.consts, values, of_equation, literal_value)
        return _times(found, other.exponent + cotangent.exponent)


def _wide(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "preferred_element_type": jnp.dtype(jnp.float32), "precision": None}


def _alike(primitive: jex_core.Primitive, left: Scaled, right: Scaled) -> tuple[Array, Array]:
    """Operands that the primitive takes: JAX contracts two formats of 8 bits, and no other two."""
    dtypes = {left.values.dtype, right.values.dtype}
    if len(dtypes) == 1 or (dtypes <= _FLOAT8 and primitive is dot_general_p):
        return left.values, right.values
    wide = dtypes - _FLOAT8 or {jnp.dtype(jnp.bfloat16)}  # which holds both formats of 8 bits
    to = functools.reduce(jnp.promote_types, sorted(wide, key=str))
    return left.values.astype(to), right.values.astype(to)


def _times(x: Float[Array, "..."], exponent: Int[Array, ""]) -> Float[Array, "..."]:
    """Multiplies by a power of two, for exponents from -252 to 254: none is beyond float32's."""
    first, second = halves(exponent, x.dtype)
    return x * first * second


_FLOATS = frozenset(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


class Narrow(NamedTuple):
    """The part of a policy about the products of a loss.

    Attributes:
        matmul: the dtypes of products.
        rules: the patterns of the policy's module rules; whether each keeps products wide.
    """

    matmul: Matmul
    rules: tuple[tuple[str, bool], ...]

    def is_wide(self, equation: jex_core.JaxprEqn, around: bool) -> bool:
        """Whether products under a name stack are wide: the innermost rule says so."""
        known, scope = dict(self.rules), str(equation.source_info.name_stack)
        return next((known[m] for m in reversed(rules_at(scope)) if m in known), around)

    def program(self, program: Any, around: bool = False) -> Any:
        """An open or closed program with narrow products; each replaces one equation.

        Products inside functions with custom derivative rules do not change, nor do those in a
        `shard_map`.

        Args:
            program: the program.
            around: whether the products around it are wide.
        """

        def of_equation(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn] | None:
            is_wide = self.is_wide(equation, around)
            match inside(equation):
                case None if not is_wide and is_product(equation):
                    return inlined(scaled_product(equation, self.matmul), equation)
                case Call("jit" | "remat") | Scan() | Cond() | While():
                    if is_wide == around:
                        return None
                    its = with_programs(equation, lambda its: self.program(its, is_wide))
                    return [equation.replace(params=its)]
                case _:
                    return [equation]

        return rewritten(program, of_equation)


def narrow_products(policy: Policy | None) -> Narrow | None:
    """The part of a policy about products; None if they stay in the compute dtype."""
    if policy is None or policy.matmul is None:
        return None
    return Narrow(policy.matmul, tuple((r.match, r.is_wide) for r in policy.modules))


def is_product(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation multiplies matrices of real numbers: inner products of vectors do not."""
    if equation.primitive not in (dot_general_p, conv_general_dilated_p):
        return False
    avals: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    if any(aval.dtype not in _FLOATS or 0 in aval.shape for aval in avals):
        return False
    return has_free_dimensions(equation)
