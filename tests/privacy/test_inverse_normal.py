"""From the words of a cipher to normal numbers, against extended precision (mpmath)."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from eqx_dp.privacy.inverse_normal import (
    CENTRAL,
    FAR,
    MIDDLE,
    WORDS,
    minus_log,
    tail_probability,
    tail_quantile,
)

pytestmark = pytest.mark.optimized

U = 2.0**-53
mp.mp.dps = 120


def exact_tail(words):
    """The probability that the words stand for."""
    number = sum(int(word) << (32 * i) for i, word in enumerate(words))
    return (mp.mpf(number) + mp.mpf(1) / 2) / mp.mpf(2) ** (32 * WORDS + 1)


def exact_quantile(p, near):
    """What a standard normal exceeds with probability p, by Newton's method."""
    z = mp.mpf(near)
    for _ in range(6):
        z += (mp.erfc(z / mp.sqrt(2)) / 2 - p) / mp.npdf(z)
    return z


def inputs():
    """Words at random, at both ends, on both sides of the borders of regions, and deep in the tail.

    The last word counts most.
    """
    rng = np.random.default_rng(0)
    found = [rng.integers(2**32, size=WORDS) for _ in range(300)]
    for zeros in range(1, WORDS):  # the highest words are zero, and the next is small
        for top in (0, 1, 3, 2**31, 2**32 - 1):
            words = rng.integers(2**32, size=WORDS)
            words[WORDS - zeros :] = 0
            words[WORDS - zeros - 1] = top
            found.append(words)
    found += [np.zeros(WORDS, int), np.full(WORDS, 2**32 - 1)]
    for border in (mp.mpf("0.075"), mp.exp(-25)):
        whole = int(border * mp.mpf(2) ** (32 * WORDS + 1))
        for step in (-(2**200), -1, 0, 1, 2**200):
            found.append([((whole + step) >> (32 * i)) % 2**32 for i in range(WORDS)])
    return np.array(found, np.uint32)


@pytest.fixture(scope="module")
def computed():
    words = inputs()
    with jax.enable_x64(True):
        p = jax.jit(tail_probability)([jnp.asarray(column) for column in words.T])
        z = jax.jit(tail_quantile)(p)
    return words, np.asarray(p), np.asarray(z)


def test_probabilities_have_few_roundings(computed):
    words, p, _ = computed
    for row, found in zip(words, p, strict=True):
        assert abs(mp.mpf(float(found)) / exact_tail(row) - 1) <= 5 * U


def test_normal_numbers_are_as_exact_as_the_proof_says(computed):
    words, p, z = computed
    assert p.min() < 2.0**-256
    assert z.max() > 18
    for row, found in zip(words, z, strict=True):
        exact = exact_quantile(exact_tail(row), found)
        error = abs(mp.mpf(float(found)) - exact)
        # The proof says 46 |z| + 7. Far less is seen.
        assert error <= (6 * exact + 7) * U


def test_logarithm():
    middle = np.array([0.5, 0.075, 1e-10, 2.0**-256, np.sqrt(0.5), 0.7071067811865477])
    with jax.enable_x64(True):
        values = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, 1)])
        found = np.asarray(jax.jit(minus_log)(values))
    for value, one in zip(values, found, strict=True):
        assert abs(mp.mpf(float(one)) / -mp.log(mp.mpf(float(value))) - 1) <= 5 * U


REGIONS = [
    # Where the argument is r, and the number that the quotient is times.
    (CENTRAL, "0.180625", lambda r: mp.mpf(1) / 2 - mp.sqrt(mp.mpf("0.180625") - r), "q"),
    (MIDDLE, "3.4", lambda r: mp.exp(-((r + mp.mpf("1.6")) ** 2)), "1"),
    (FAR, "8.4", lambda r: mp.exp(-((r + 5) ** 2)), "1"),
]


@pytest.mark.parametrize(("coefficients", "most", "probability", "times"), REGIONS)
def test_quotients_of_wichura(coefficients, most, probability, times):
    """Their own error, without rounding; and what the bound of the rounding rests on."""
    mp.mp.dps = 50
    tops = [[mp.mpf(x) for x in row] for row in coefficients]
    assert all(x > 0 for row in tops for x in row)
    first = mp.mpf("0.0094") if times == "1" and coefficients is MIDDLE else mp.mpf(0)
    for i in range(1, 200):
        r = first + (mp.mpf(most) - first) * i / 200
        p = probability(r)
        scale = mp.mpf(1) / 2 - p if times == "q" else 1
        upper, lower = (mp.polyval(row[::-1], r) for row in tops)
        exact = exact_quantile(p, float(scale * upper / lower))
        assert abs(scale * upper / lower / exact - 1) < 2 * U
