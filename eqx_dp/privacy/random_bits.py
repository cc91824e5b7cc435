"""Random bits of a threefry key, each computed from its position in the array alone.

`jax.random.bits` on a CPU encrypts whole arrays of counters, round by round in a loop, and keeps
them in memory. Here the same arithmetic is written out operation by operation. A compiler makes one
kernel of it and of what uses the bits, and holds no array of them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, PRNGKeyArray, UInt, UInt32

from ..precision import stage
from .keys import is_threefry

# Of the 20 rounds, the first four rotate by the first row, the next four by the second, and so on.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def random_bits(
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype: Any = jnp.uint32,
    *,
    out_sharding: NamedSharding | None = None,
) -> UInt[Array, "..."]:
    """Draws what `jax.random.bits` draws, in one kernel and without memory beside the result.

    **Guarantee.** The numbers are those of `jax.random.bits(key, shape, dtype)`, bit for bit, on
    any number of devices. Whatever is not uint32, has more than 2**32 entries or comes from another
    generator than threefry2x32 is drawn by `jax.random.bits` itself.
    """
    if np.dtype(dtype) != np.uint32 or not is_written_out(key, shape):
        return jax.random.bits(key, shape, dtype, out_sharding=out_sharding)
    draw = functools.partial(_bits_of_threefry, shape=tuple(shape))
    return drawn_where(draw, key, out_sharding)


def drawn_where(
    draw: Callable[[UInt32[Array, " 2"]], Array],
    key: PRNGKeyArray,
    out_sharding: NamedSharding | None,
) -> Array:
    """Draws from the words of a key, on a mesh with Explicit axes each device its own part."""
    if out_sharding is not None:
        axes = out_sharding.mesh.explicit_axes
        draw = cast(Any, jax.sharding).auto_axes(draw, axes=axes, out_sharding=out_sharding)
    return draw(jax.random.key_data(key))


def is_partitionable() -> bool:
    """Whether a number that threefry draws depends on its position in the array alone."""
    return bool(cast(Any, jax.config).jax_threefry_partitionable)


def is_written_out(key: PRNGKeyArray, shape: tuple[int, ...]) -> bool:
    """Whether bits of these many entries can be computed from 32 bits of their positions."""
    return is_threefry(key) and is_partitionable() and math.prod(shape) <= 2**32


def bits_of_threefry(words: UInt32[Array, " 2"], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The bits of the key with these words."""
    high, low = threefry2x32((words[0], words[1]), (np.uint32(0), positions(shape)))
    with stage("bits"):
        return high ^ low


# Traced once for each shape, however many leaves have it.
@functools.partial(jax.jit, static_argnames="shape")
def _bits_of_threefry(
    words: UInt32[Array, " 2"], *, shape: tuple[int, ...]
) -> UInt32[Array, "..."]:
    return bits_of_threefry(words, shape)


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
