"""Keys of 256 bits, and random numbers of the cipher ChaCha (RFC 8439), as a JAX generator.

A number follows from the key, the position in an array, and what it is for. So it is the same for
any number of devices, with or without `jit`, and nothing is communicated or kept. Each entry
encrypts its own position. This discards most words of a block, and in return a compiler makes one
kernel of the cipher and of what uses its words.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jaxtyping import Array, UInt, UInt32

Words: TypeAlias = Sequence[Any]

_CONSTANTS = np.frombuffer(b"expand 32-byte k", np.dtype("<u4")).astype(np.uint32)
_COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
# What a block is for: the second word of its nonce. From 2^31 on it names a leaf's noise.
_OTHER_KEYS, _BITS, NOISE = np.uint32(1), np.uint32(2), np.uint32(2**31)
_ZERO = np.uint32(0)

ROUNDS = 12
"""Of 20 that the RFC has; the best known attack breaks 7."""


def block(
    key: Words,
    counter: UInt32[Array, "*shape"],
    nonce: Words,
    rounds: int,
    *,
    is_loop: bool = False,
) -> list[UInt32[Array, "*shape"]]:
    """The 16 words of ChaCha's block function (RFC 8439, section 2.3), for each of many counters.

    Args:
        key: 8 words.
        counter: first of the words that change.
        nonce: the other 3; each a scalar, or of the counter's shape.
        rounds: 20 as in the RFC, or 12.
        is_loop: whether rounds are a loop, which compiles quickly; else they are one kernel.
    """
    first = [
        jnp.broadcast_to(jnp.asarray(word, jnp.uint32), counter.shape)
        for word in (*_CONSTANTS, *key, counter, *nonce)
    ]
    words, turns = first, rounds // 2
    if is_loop:
        words = jax.lax.fori_loop(0, turns, lambda _, words: _double_round(words), words)
    else:
        for _ in range(turns):
            words = _double_round(words)
    return [word + start for word, start in zip(words, first, strict=True)]


# Traced once for each shape.
@jax.jit
def _double_round(words: list[UInt32[Array, "..."]]) -> list[UInt32[Array, "..."]]:
    found = list(words)
    for places in (*_COLUMNS, *_DIAGONALS):
        mixed = _quarter_round(*(found[place] for place in places))
        for place, word in zip(places, mixed, strict=True):
            found[place] = word
    return found


def _quarter_round(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any, Any]:
    for left, right in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(d ^ a, left)
        c = c + d
        b = _rotated(b ^ c, right)
    return a, b, c, d


def _rotated(word: Any, distance: int) -> Any:
    return (word << np.uint32(distance)) | (word >> np.uint32(32 - distance))


def positions(shape: tuple[int, ...], dtype: Any = jnp.uint32) -> UInt[Array, "..."]:
    """Numbers the entries of an array, row by row, modulo 2**32 or 2**64."""
    number = np.dtype(dtype)
    found, stride = jnp.zeros(shape, number), 1
    for dimension, length in reversed([*enumerate(shape)]):
        if length > 1:
            along = jax.lax.broadcasted_iota(number, shape, dimension)
            found = found + along * number.type(stride % 2 ** (8 * number.itemsize))
        stride *= length
    return found


@jax.jit
def _other_keys(
    key: UInt32[Array, " 8"], numbers: UInt32[Array, "*shape"]
) -> UInt32[Array, "*shape 8"]:
    """The first half of a block for each number."""
    words = block([*key], numbers, (_ZERO, _OTHER_KEYS, _ZERO), ROUNDS, is_loop=True)
    return jnp.stack(words[:8], axis=-1)


@functools.partial(jax.jit, static_argnames=("bit_width", "shape"))
def _bits(key: UInt32[Array, " 8"], bit_width: int, shape: tuple[int, ...]) -> UInt[Array, "..."]:
    """Bits by position; for more than 2**32 entries, the leading dimensions are in the nonce."""
    size, split = 1, len(shape)
    while split and size * shape[split - 1] <= 2**32:
        split, size = split - 1, size * shape[split - 1]
    low = positions((1,) * split + shape[split:])
    high = positions(shape[:split] + (1,) * (len(shape) - split))
    counter = jnp.broadcast_to(low, shape)
    words = block([*key], counter, (jnp.broadcast_to(high, shape), _BITS, _ZERO), ROUNDS)
    if bit_width == 64:
        return (words[1].astype(jnp.uint64) << np.uint64(32)) | words[0].astype(jnp.uint64)
    return words[0].astype(f"uint{bit_width}")


def _seeded(number: Any) -> UInt32[Array, " 8"]:
    words = [jnp.asarray(number).astype(jnp.uint32)]
    if jnp.asarray(number).dtype.itemsize == 8:
        words.append((jnp.asarray(number) >> 32).astype(jnp.uint32))
    return jnp.concatenate([jnp.stack(words), jnp.zeros(8 - len(words), jnp.uint32)])


GENERATOR: Any = define_prng_impl(
    key_shape=(8,),
    name=f"chacha{ROUNDS}",
    tag=f"chacha{ROUNDS}",
    seed=_seeded,
    split=lambda key, shape: _other_keys(key, positions(tuple(shape))),
    random_bits=lambda key, bit_width, shape: _bits(key, bit_width, tuple(shape)),
    fold_in=_other_keys,
)
"""The type of keys."""
