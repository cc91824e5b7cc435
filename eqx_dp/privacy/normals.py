"""Standard normal numbers of a threefry key, each computed from its position in the array alone.

They are made of the bits of `random_bits.py`, so that a compiler makes one kernel of them and of
what uses them, and holds no array of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from .random_bits import bits_of_threefry, drawn_where, is_written_out


def normal(
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype: Any,
    *,
    out_sharding: NamedSharding | None = None,
) -> Float[Array, "..."]:
    """Draws what `jax.random.normal` draws, in one kernel and without memory beside the result.

    **Guarantee.** The numbers are those of `jax.random.normal(key, shape, dtype)`, bit for bit, on
    any number of devices. An entry follows from the key and its position in the array: threefry2x32
    with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", doi
    10.1145/2063384.2063405) encrypts the 64 bits of its position; the two words of the result are
    joined by exclusive or; 23 bits of that make a number u, uniform between -1 and 1 (neither
    included), and the entry is sqrt(2) * erf_inv(u).

    | case | what happens |
    |---|---|
    | `dtype` is not float32 | drawn by `jax.random.normal` itself |
    | the key's generator is not threefry2x32 | the same |
    | `jax_threefry_partitionable` is off | the same; an entry then depends on the whole shape |
    | more than 2**32 entries, positions of more than 32 bits | the same |
    | no dimensions | one number, that of position 0 |
    | no entries | an empty array |
    | a raw key (`jax.random.PRNGKey`) | the numbers of the typed key with the same words |
    | `vmap` over keys | each key's numbers are those that it gives alone |
    | the array is spread over devices | each device computes its own part, without communication |
    """
    if not _is_written_out(key, shape, dtype):
        return jax.random.normal(key, shape, dtype, out_sharding=out_sharding)
    draw = functools.partial(_normal_of_threefry, shape=tuple(shape))
    return drawn_where(draw, key, out_sharding)


def _is_written_out(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> bool:
    return np.dtype(dtype) == np.float32 and is_written_out(key, shape)


# Traced once for each shape, however many leaves have it.
@functools.partial(jax.jit, static_argnames="shape")
def _normal_of_threefry(
    words: UInt32[Array, " 2"], *, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    return _normal_of_bits(bits_of_threefry(words, shape))


def _normal_of_bits(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Makes normal numbers of random bits, in the order of JAX's own operations."""
    lowest, one = np.nextafter(np.float32(-1), np.float32(0)), np.float32(1)
    # The bits are the fraction of a number between 1 and 2, whose sign and exponent are put in.
    fraction = (bits >> np.uint32(9)) | one.view(np.uint32)
    uniform = jax.lax.bitcast_convert_type(fraction, jnp.float32) - one
    uniform = jnp.maximum(lowest, uniform * (one - lowest) + lowest)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)
