"""Standard normal numbers of a threefry key, each computed from its position in the array alone.

`jax.random.normal` on a CPU encrypts whole arrays of counters, round by round in a loop, and keeps
them in memory. Here the same arithmetic is written out operation by operation. A compiler makes one
kernel of it and of what uses the numbers, and holds no array of them.
"""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from ..precision import stage
from .keys import is_threefry

# Of the 20 rounds, the first four rotate by the first row, the next four by the second, and so on.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_ROW = 1024


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

    Args:
        key: One key, of any generator; may be traced.
        shape: Of the result.
        dtype: Of the result; floating point.
        out_sharding: Where the result lives, on a mesh with Explicit axes; as for
            `jax.random.normal`.
    """
    if not _is_written_out(key, shape, dtype):
        return jax.random.normal(key, shape, dtype, out_sharding=out_sharding)
    draw: Any = functools.partial(_normal_of_threefry, shape=tuple(shape))
    if out_sharding is not None:
        axes = out_sharding.mesh.explicit_axes
        draw = jax.sharding.auto_axes(draw, axes=axes, out_sharding=out_sharding)
    return draw(jax.random.key_data(key))


def normal_on_one_device(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any
) -> Float[Array, "..."]:
    """Draws what `normal` draws, fast for every shape, where the array lives on one device.

    On a CPU, XLA computes several entries of a row at a time. Rows of a few entries (the kernels of
    convolutions) and vectors of odd length are slow: 12 to 16 ns a number, and 2 for others. Such
    leaves are drawn in rows of 1,024. A branch that is always taken keeps XLA from computing them
    in the leaf's own shape; 4 bytes an entry are held until the noise is added.

    **Guarantee.** As that of `normal`: bit for bit the same numbers.
    """
    if not (_is_written_out(key, shape, dtype) and _is_slow(shape)):
        return normal(key, shape, dtype)
    words, size = jax.random.key_data(key), math.prod(shape)
    rows = (-(-size // _ROW), _ROW)
    # True for any word, but the compiler does not know it.
    always = (words[0] | 1) != 0
    drawn = jax.lax.cond(
        always,
        functools.partial(_normal_of_threefry, shape=rows),
        lambda _: jnp.zeros(rows, jnp.float32),
        words,
    )
    return drawn.reshape(-1)[:size].reshape(shape)


def _is_slow(shape: tuple[int, ...]) -> bool:
    if jax.default_backend() != "cpu" or math.prod(shape) < 2 * _ROW:
        return False
    *others, last = shape
    return last % 8 != 0 and (not others or last < 4 * 8)


def is_partitionable() -> bool:
    """Whether a number that threefry draws depends on its position in the array alone."""
    return bool(cast(Any, jax.config).jax_threefry_partitionable)


def _is_written_out(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> bool:
    is_float32 = np.dtype(dtype) == np.float32
    return is_float32 and is_threefry(key) and is_partitionable() and math.prod(shape) <= 2**32


# Traced once for each shape, however many leaves have it.
@functools.partial(jax.jit, static_argnames="shape")
def _normal_of_threefry(
    words: UInt32[Array, " 2"], *, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    high, low = threefry2x32((words[0], words[1]), (np.uint32(0), positions(shape)))
    with stage("bits"):
        bits = high ^ low
    return _normal_of_bits(bits)


def positions(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Numbers the entries of an array, at most 2**32, row by row: low words of their positions."""
    found, stride = jnp.zeros(shape, jnp.uint32), 1
    for dimension, length in reversed([*enumerate(shape)]):
        if length > 1:  # else the position does not depend on it, and the stride may need 33 bits
            along = jax.lax.broadcasted_iota(jnp.uint32, shape, dimension)
            found = found + along * np.uint32(stride)
        stride *= length
    return found


def threefry2x32(
    key: tuple[Any, Any], counter: tuple[Any, Any]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Encrypts counters by threefry2x32 with 20 rounds; all are given as two words of uint32.

    Salmon et al. 2011; the rotations and the parity are those of the authors' Random123.
    """
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x = x + y
            y = ((y << np.uint32(distance)) | (y >> np.uint32(32 - distance))) ^ x
        x = x + schedule[(block + 1) % 3]
        y = y + (schedule[(block + 2) % 3] + np.uint32(block + 1))
    return x, y


def _normal_of_bits(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Makes normal numbers of random bits, in the order of JAX's own operations."""
    lowest, one = np.nextafter(np.float32(-1), np.float32(0)), np.float32(1)
    # The bits are the fraction of a number between 1 and 2, whose sign and exponent are put in.
    fraction = (bits >> np.uint32(9)) | one.view(np.uint32)
    uniform = jax.lax.bitcast_convert_type(fraction, jnp.float32) - one
    uniform = jnp.maximum(lowest, uniform * (one - lowest) + lowest)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)
