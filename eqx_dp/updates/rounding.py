"""Rounding to a narrower floating-point dtype, up or down at random."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt


def word_of(dtype: Any) -> np.dtype[Any]:
    """The unsigned integers with as many bits as numbers of a dtype."""
    return np.dtype(f"uint{jnp.finfo(dtype).bits}")


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
    of the distance of the neighbors (2**-64). Only integers are used, so the result does not depend
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
    wide, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    word, short = word_of(x.dtype).type, word_of(dtype)
    width = word(wide.bits)
    raw = jax.lax.bitcast_convert_type(x, word)
    magnitude = raw & word(2 ** (wide.bits - 1) - 1)
    exponent, one = magnitude >> word(wide.nmant), word(1 << wide.nmant)
    significand = (magnitude & (one - word(1))) | jnp.where(exponent > 0, one, word(0))
    # The exponent at which the result's normal numbers begin. The further x is below that, the more
    # of its significand is dropped.
    exponent = jnp.maximum(exponent, word(1))
    least = word(int(narrow.minexp) - int(wide.minexp) + 1)
    above = jnp.maximum(exponent, least)
    dropped = word(wide.nmant - narrow.nmant) + (above - exponent)
    # Shifts by the whole width or more are undefined; a significand is far below 2**(width - 1).
    kept = significand >> jnp.minimum(dropped, width - word(1))
    kept += (above - least) << word(narrow.nmant)
    # The rest, as a fraction of 2**width.
    within = significand << (width - jnp.minimum(dropped, width))
    below = significand >> jnp.minimum(jnp.maximum(dropped, width) - width, width - word(1))
    rest = jnp.where(dropped <= width, within, below)
    sign = (raw >> (width - word(1)) << word(narrow.bits - 1)).astype(short)
    result = sign | (kept + (bits < rest).astype(word)).astype(short)
    largest = np.asarray(narrow.max, x.dtype).view(word)
    finite = jax.lax.bitcast_convert_type(result, np.dtype(dtype))
    return jnp.where(magnitude > word(largest), x.astype(dtype), finite)
