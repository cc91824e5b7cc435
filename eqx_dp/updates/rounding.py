"""Rounding to a narrower floating-point dtype, up or down at random."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt


class _Format(NamedTuple):
    """How an IEEE format, or bfloat16, lays out its bits: sign, exponent, fraction."""

    word: Any
    bits: int
    fraction: int
    bias: int

    @classmethod
    def of(cls, dtype: Any) -> "_Format":
        limits = jnp.finfo(dtype)
        word = np.dtype(f"uint{limits.bits}")
        return cls(word, limits.bits, limits.nmant, 1 - int(limits.minexp))


def word_of(dtype: Any) -> np.dtype[Any]:
    """The unsigned integers with as many bits as numbers of a dtype."""
    return _Format.of(dtype).word


def rounded_stochastically(
    x: Float[Array, "*shape"], dtype: Any, bits: UInt[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Rounds to one of the two neighbors in a narrower dtype, the nearer one more likely.

    A number x between neighbors a < b becomes b with probability (x - a) / (b - a), and else a, so
    its expectation is x (Gupta et al. 2015, "Deep learning with limited numerical precision", doi
    10.48550/arXiv.1502.02551, equation 1; Croci et al. 2022, doi 10.1098/rsos.211631).

    **Guarantee.** With independent uniform bits the expectation is x, exactly where x has at most
    as many bits behind the last place of the result as a word has (32 for float32, 64 for float64).
    For the others, subnormal numbers of float16 among them, it differs from x by less than 2**-32
    of the distance of the neighbors (2**-64). Integers alone are computed with, so nothing depends
    on whether a processor flushes subnormal numbers to zero.

    | case | what happens |
    |---|---|
    | a number that the dtype holds, zero (of either sign) among them | itself, whatever the bits |
    | between zero and the smallest subnormal number | one of the two, with the sign of x |
    | subnormal in the result | as any other number: the neighbors are equally spaced there |
    | beyond the largest finite number of the dtype | as by `x.astype(dtype)`: that or infinity |
    | infinity | infinity |
    | NaN | NaN |

    Args:
        x: float32 or float64.
        dtype: a dtype with fewer digits and no more range than that of `x`.
        bits: a random word for each number, as many bits as `x` has.
    """
    wide, narrow = _Format.of(x.dtype), _Format.of(dtype)
    word = wide.word.type
    drop, width = wide.fraction - narrow.fraction, wide.bits
    raw = jax.lax.bitcast_convert_type(x, wide.word)
    magnitude = raw & word(2 ** (width - 1) - 1)
    # What is kept, as the magnitude's bits in the result; and the rest, as a fraction of 2**width.
    shift = word(wide.bias - narrow.bias)
    kept = (magnitude >> word(drop)) - (shift << word(narrow.fraction))
    rest = magnitude << word(width - drop)
    if shift:  # where x is subnormal in the result, the more is dropped, the smaller it is
        is_subnormal = magnitude < ((shift + word(1)) << word(wide.fraction))
        low_kept, low_rest = _split_subnormal(magnitude, wide, drop, int(shift))
        kept = jnp.where(is_subnormal, low_kept, kept)
        rest = jnp.where(is_subnormal, low_rest, rest)
    sign = (raw >> word(width - narrow.bits)).astype(narrow.word)
    sign = sign & narrow.word.type(1 << (narrow.bits - 1))
    result = sign | (kept + (bits < rest).astype(wide.word)).astype(narrow.word)
    largest = np.asarray(jnp.finfo(dtype).max, x.dtype).view(wide.word)
    finite = jax.lax.bitcast_convert_type(result, np.dtype(dtype))
    return jnp.where(magnitude > word(largest), x.astype(dtype), finite)


def _split_subnormal(
    magnitude: UInt[Array, "*shape"], wide: _Format, drop: int, shift: int
) -> tuple[UInt[Array, "*shape"], UInt[Array, "*shape"]]:
    """The same for numbers below the smallest normal one of the result."""
    word, most = wide.word.type, wide.word.type(wide.bits - 1)
    exponent = magnitude >> word(wide.fraction)
    one = word(1 << wide.fraction)
    significand = (magnitude & (one - word(1))) | jnp.where(exponent > 0, one, word(0))
    dropped = word(drop + 1 + shift) - jnp.maximum(exponent, word(1))
    # Shifts by the whole width and more are not defined; a significand is far below 2**most.
    kept = significand >> jnp.minimum(dropped, most)
    inside = significand << jnp.minimum(
        word(wide.bits) - jnp.minimum(dropped, word(wide.bits)), most
    )
    below = significand >> jnp.minimum(
        jnp.maximum(dropped, word(wide.bits)) - word(wide.bits), most
    )
    return kept, jnp.where(dropped <= word(wide.bits), inside, below)
