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


def times_power(x: Float[Array, "*n"], exponent: Int[Array, "*#n"]) -> Float[Array, "*n"]:
    """A number times two to an exponent, exactly where the result is a normal number.

    In two steps, since the power alone may be beyond the dtype's range. A result below twice the
    smallest normal number may be zero, one beyond the largest is infinite.
    """
    half = exponent >> 1
    return x * power(half, x.dtype) * power(exponent - half, x.dtype)


def power_of_two(size: Float[Array, "*n"]) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """The power of two at or below a positive number, and its inverse, both normal numbers."""
    limit = _bias(size.dtype) - 1
    exponent = jnp.clip(exponent_of(size), -limit, limit)
    return _of_bits(exponent, size.dtype), _of_bits(-exponent, size.dtype)


def _of_bits(exponent: Int[Array, "*n"], dtype: Any) -> Float[Array, "*n"]:
    info = jnp.finfo(dtype)
    bits = (exponent + _bias(dtype)).astype(f"int{info.bits}")
    return jax.lax.bitcast_convert_type(bits << info.nmant, dtype)


def _bias(dtype: Any) -> int:
    return int(jnp.finfo(dtype).maxexp) - 1
