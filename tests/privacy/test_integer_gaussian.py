"""From the words of a cipher to normal numbers: by exact numbers (mpmath), and by enumeration."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from eqx_dp.privacy import integer_gaussian
from eqx_dp.privacy.grid import cells_of

pytestmark = pytest.mark.optimized

UNIT = mp.mpf(2) ** -64


@pytest.fixture(autouse=True)
def with_integers_of_64_bits():
    with mp.workdps(60), jax.enable_x64(True):
        yield


def computed(function, *arrays):
    """The results of a compiled function, as Python integers."""
    found = jax.tree.leaves(jax.jit(function)(*map(jnp.asarray, arrays)))
    return [list(map(int, np.asarray(x))) for x in found]


def fractions(count=1000, seed=0):
    """At random, at both ends, and at powers of two."""
    rng = np.random.default_rng(seed)
    ends = [0, 1, 2**64 - 1, 2**64 - 2, *(2**i for i in range(1, 64))]
    return np.array([*ends, *rng.integers(2**64, size=count, dtype=np.uint64)], np.uint64)


def octaves(size):
    """Zeros and pieces: the first piece of all, and any."""
    rng = np.random.default_rng(1)
    zeros = np.where(np.arange(size) % 3, rng.integers(257, size=size), 0).astype(np.uint32)
    return zeros, np.where(np.arange(size) % 2, rng.integers(16, size=size), 0).astype(np.uint32)


def exact_p(zeros, piece, fraction):
    return mp.mpf(2) ** -int(zeros) * (1 - (int(piece) + int(fraction) * UNIT) / 32)


@pytest.mark.parametrize(
    ("function", "exact", "bits"),
    [
        (integer_gaussian.sine, lambda u: mp.sin(mp.pi / 4 * u), 51),
        (integer_gaussian.versine, lambda u: 1 - mp.cos(mp.pi / 4 * u), 54),
        (integer_gaussian.square_root, mp.sqrt, 52),
    ],
)
def test_functions_are_as_exact_as_the_proof_says(function, exact, bits):
    u = fractions()
    u = np.maximum(u, np.uint64(2**62)) if function is integer_gaussian.square_root else u
    for x, found in zip(u, *computed(function, u), strict=True):
        assert abs(found * UNIT - exact(int(x) * UNIT)) <= mp.mpf(2) ** -bits


def test_logarithm():
    u = fractions()
    zeros, piece = octaves(u.size)
    found = computed(integer_gaussian.minus_log, zeros, piece, u)
    for base, tail, *each in zip(*found, zeros, piece, u, strict=True):
        exact = -mp.log(exact_p(*each))
        error = abs(base * mp.mpf(2) ** -56 + tail * UNIT - exact)
        allowed = (int(each[0]) + 2) * mp.mpf(2) ** -57 + mp.mpf(2) ** -54.7
        assert error <= (allowed if base else exact * mp.mpf(2) ** -54 + 4 * UNIT)


@pytest.mark.parametrize("stddev", [1.0, 1.3, 1.9999999])
def test_radius(stddev):
    u, cells = fractions(), cells_of(stddev)
    zeros, piece = octaves(u.size)
    (found,) = computed(lambda *x: integer_gaussian.radius_of(*x, cells), zeros, piece, u)
    for number, *each in zip(found, zeros, piece, u, strict=True):
        exact = mp.sqrt(-2 * mp.log(exact_p(*each)))
        error = abs(number * mp.mpf(2) ** -50 / mp.mpf(float(cells)) - exact)
        if exact > 2**-10:
            assert error <= mp.mpf(2) ** -51 * (exact + 1)


def test_zeros_are_counted_in_256_bits():
    numbers = [2**i + 2 ** max(i - 5, 0) for i in range(256)] + [0, 2**256 - 1]
    words = [[(x >> (32 * i)) % 2**32 for x in numbers] for i in reversed(range(8))]
    zeros = lambda *words: integer_gaussian.leading_zeros(words)  # noqa: E731
    (found,) = computed(zeros, *np.array(words, np.uint32))
    assert found == [256 - x.bit_length() for x in numbers]


def words_for(angle, fraction, choices, zeros):
    """Words of which each part is as given; arrays of one shape."""
    marks = [np.where(zeros // 32 == i, 2 ** (31 - zeros % 32), 0) for i in range(8)]
    halves = [angle >> 32, angle % 2**32, fraction >> 32, fraction % 2**32]
    return [np.asarray(x, np.uint32) for x in (*halves, choices, *marks)]


def test_enumeration_at_reduced_width():
    """All pairs of 5 bits of the angle, 5 of the place in a piece, 3 octaves, all pieces and signs.

    Each value stands for the middle of those that begin with its bits. Cells get the mass of exact
    points, and the whole has the symmetry and the moments of a Gaussian.
    """
    rows = np.array([*itertools.product(range(32), range(32), range(128), range(3))], np.uint64)
    angle, fraction, choices, zeros = rows.T
    middle = np.uint64(2**58)
    choices = ((choices >> np.uint64(3)) << np.uint64(28)) | (choices % np.uint64(8))
    angle, fraction = (x * np.uint64(2**59) + middle for x in (angle, fraction))
    words = words_for(angle, fraction, choices, zeros.astype(int))
    first, second = jax.jit(lambda *x: integer_gaussian.pair_of_normals(x, Fraction(32)))(*words)
    first, second = (np.asarray(x) / 2.0**50 / 32 for x in (first, second))
    p = 2.0 ** -zeros.astype(float) * (1 - ((choices >> np.uint64(28)) + fraction * 2.0**-64) / 32)
    phi = np.pi / 4 * angle * 2.0**-64
    r, points = np.sqrt(-2 * np.log(p)), [np.cos(phi), np.sin(phi)]
    is_swapped = choices % np.uint64(2) == 1
    for found, bit, (one, other) in ((first, 2, points), (second, 4, points[::-1])):
        sign = np.where(choices & np.uint64(bit), -1, 1)
        exact = sign * r * np.where(is_swapped, other, one)
        np.testing.assert_allclose(found, exact, rtol=1e-13, atol=1e-14)
    mass = 2.0 ** -zeros.astype(float)
    mass /= mass.sum()
    for found in (first, second):
        assert abs(np.sum(mass * found)) < 1e-15
    assert abs(np.sum(mass * first * second)) < 1e-15
    assert np.sum(mass * first**2) == pytest.approx(np.sum(mass * r**2) / 2, rel=1e-12)
    # r^2 / 2 is exponential, up to the octaves that are left out: p at least 1/8, uniform.
    expected = 1 - np.log(1 / 8) * (1 / 8) / (1 / 8 - 1)
    assert np.sum(mass * r**2) / 2 == pytest.approx(expected, rel=1e-3)


def test_no_float_and_no_table_in_memory():
    words = [jax.ShapeDtypeStruct((4,), jnp.uint32)] * integer_gaussian.WORDS
    jaxpr = jax.make_jaxpr(lambda *x: integer_gaussian.pair_of_normals(x, Fraction(45)))(*words)
    text = str(jaxpr)
    assert "f32" not in text
    assert "f64" not in text
    assert "gather" not in text
    assert integer_gaussian.FRACTION_BITS == 50
