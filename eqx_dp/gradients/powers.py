"""Powers of two, made from the bits of floating-point numbers and taken apart again.

`jnp.frexp` and `jnp.ldexp` do the same with ten times as many operations, each of which a compiler
repeats for every consumer.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def exponent_of(size: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """The binary exponent of a positive normal number: the floor of its logarithm.

    Of what is smaller, or zero, it is one below that of the smallest normal number; of what is not
    finite it is any number.
    """
    # A scale known to the compiler would be squared where what it multiplies is, and overflow.
    size = jax.lax.optimization_barrier(size)
    # The bits of a positive number begin with its exponent.
    info = jnp.finfo(size.dtype)
    bits = jax.lax.bitcast_convert_type(size, f"int{info.bits}")
    return (bits >> info.nmant).astype(jnp.int32) - _bias(size.dtype)


def power(exponent: Int[Array, "*n"], dtype: np.dtype[Any]) -> Float[Array, "*n"]:
    """Two to an exponent; zero where that is no normal number, and no more than the largest."""
    # The bits of a power of two end with its exponent, and those of zero are zero.
    bias = _bias(dtype)
    return _of_bits(jnp.clip(exponent, -bias, bias), dtype)


def times_power(x: Float[Array, "*#n"], exponent: Int[Array, "*#n"]) -> Float[Array, "*n"]:
    """A number times two to an exponent, exactly where the result is a normal number.

    A result below four times the smallest normal number may be zero, one beyond the largest is
    infinite.
    """
    one, other = halves(exponent, x.dtype)
    return x * one * other


def halves(exponent: Int[Array, "*n"], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Two powers whose product is two to an exponent, which may be beyond the dtype's range.

    Both are on the same side of 1: a number is multiplied by one, then by the other, and overflows
    or vanishes on the way only if it does in the end.
    """
    half = exponent >> 1
    return power(half, dtype), power(exponent - half, dtype)


def without_subnormal(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Numbers, with zero for what is no normal number: some machines keep it, with few digits."""
    return jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).tiny, 0, x)


def power_of_two(size: Float[Array, "*n"]) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """The power of two at or below a positive number, and its inverse, both normal numbers."""
    # In few operations: the compiler repeats them in every kernel that needs the result.
    info, bias = jnp.finfo(size.dtype), _bias(size.dtype)
    bits = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(size), f"int{info.bits}")
    exponent = jnp.clip(bits >> info.nmant, 1, 2 * bias - 1)
    scale, inverse = (
        jax.lax.bitcast_convert_type(e << info.nmant, size.dtype)
        for e in (exponent, 2 * bias - exponent)
    )
    return scale, inverse


def _of_bits(exponent: Int[Array, "*n"], dtype: Any) -> Float[Array, "*n"]:
    info = jnp.finfo(dtype)
    bits = (exponent + _bias(dtype)).astype(f"int{info.bits}")
    return jax.lax.bitcast_convert_type(bits << info.nmant, dtype)


def _bias(dtype: Any) -> int:
    return int(jnp.finfo(dtype).maxexp) - 1
