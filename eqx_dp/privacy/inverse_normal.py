"""Standard normal numbers in float64, from the words of a cipher.

Multiplications, additions, divisions, one square root, and integers: no function of a library,
which would round in its own way on each platform. `finite_precision.md` bounds the error of all.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float64, UInt32

# Wichura 1988, "Algorithm AS 241: the percentage points of the normal distribution" (PPND16):
# numerator and denominator for each region, from the constant term on. All are positive.
_NUMBERS = """
3.3871328727963666080e0 1.3314166789178437745e2 1.9715909503065514427e3 1.3731693765509461125e4
4.5921953931549871457e4 6.7265770927008700853e4 3.3430575583588128105e4 2.5090809287301226727e3
1 4.2313330701600911252e1 6.8718700749205790830e2 5.3941960214247511077e3 2.1213794301586595867e4
3.9307895800092710610e4 2.8729085735721942674e4 5.2264952788528545610e3
1.42343711074968357734e0 4.63033784615654529590e0 5.76949722146069140550e0 3.64784832476320460504e0
1.27045825245236838258e0 2.41780725177450611770e-1 2.27238449892691845833e-2
7.74545014278341407640e-4
1 2.05319162663775882187e0 1.67638483018380384940e0 6.89767334985100004550e-1
1.48103976427480074590e-1 1.51986665636164571966e-2 5.47593808499534494600e-4
1.05075007164441684324e-9
6.65790464350110377720e0 5.46378491116411436990e0 1.78482653991729133580e0 2.96560571828504891230e-1
2.65321895265761230930e-2 1.24266094738807843860e-3 2.71155556874348757815e-5
2.01033439929228813265e-7
1 5.99832206555887937690e-1 1.36929880922735805310e-1 1.48753612908506148525e-2
7.86869131145613259100e-4 1.84631831751005468180e-5 1.42151175831644588870e-7
2.04426310338993978564e-15
"""
CENTRAL, MIDDLE, FAR = np.array(_NUMBERS.split(), np.float64).reshape(3, 2, 8).tolist()
WORDS = 8
"""Words of a tail probability: 256 bits."""


def tail_probability(words: Sequence[UInt32[Array, "*shape"]]) -> Float64[Array, "*shape"]:
    """A number uniform between 0 and 1/2, from 256 bits; rounded in relative terms.

    With the bits as a whole number N, it is (N + 1/2) 2^-257, rounded a few times.
    """
    found: Any = 0.5
    for word in words:
        found = (found + word.astype(jnp.float64)) * 2.0**-32
    return 0.5 * found


def tail_quantile(p: Float64[Array, "*shape"]) -> Float64[Array, "*shape"]:
    """The value that a standard normal number exceeds with probability p, at most 1/2."""
    q = 0.5 - p
    r = jnp.sqrt(minus_log(p))
    is_central, is_far = q <= 0.425, r > 5

    def selected(i: int) -> Any:
        return jnp.where(
            is_central,
            _polynomial(CENTRAL[i], 0.180625 - q * q),
            jnp.where(is_far, _polynomial(FAR[i], r - 5), _polynomial(MIDDLE[i], r - 1.6)),
        )

    # One division, whose result is used once: XLA keeps all in one kernel.
    return jnp.where(is_central, q, 1.0) * selected(0) / selected(1)


def minus_log(x: Float64[Array, "*shape"]) -> Float64[Array, "*shape"]:
    """-log(x) of a positive normal number."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint64)
    exponent = (bits >> np.uint64(52)).astype(jnp.int32) - 1023
    fraction = (bits & np.uint64(2**52 - 1)) | np.uint64(1023 << 52)
    m = jax.lax.bitcast_convert_type(fraction, jnp.float64)
    is_large = m > math.sqrt(2)
    m = jnp.where(is_large, 0.5 * m, m)
    exponent = (exponent + is_large).astype(jnp.float64)
    # 1 / (m + 1) by Newton's method, because XLA would begin another kernel after a division.
    y = 0.98 - 0.24 * (m + 1)
    for _ in range(4):
        y = y * (2 - (m + 1) * y)
    s = (m - 1) * y
    # log(m) = 2 artanh(s), by its Taylor series: s is at most 0.172.
    return -math.log(2) * exponent - 2 * s * _polynomial(
        [1 / (2 * k + 1) for k in range(12)], s * s
    )


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    found: Any = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        found = found * x + coefficient
    return found
