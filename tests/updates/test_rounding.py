"""Stochastic rounding against neighbors found in a list of all numbers of a format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_dp.updates.rounding import rounded_stochastically
from tests.tiers import curated

pytestmark = pytest.mark.optimized

NARROW = ["bfloat16", "float16"]


def numbers_of(dtype):
    """All finite numbers of a format of 16 bits from zero up, as float64."""
    numbers = np.arange(2**15, dtype=np.uint16).view(jnp.dtype(dtype))
    return numbers[np.isfinite(numbers.astype(np.float32))].astype(np.float64)


def oracle(x, dtype, bits):
    """The neighbor above where the bits, as a fraction, are below the part of the way to it."""
    numbers, size = numbers_of(dtype), np.abs(x.astype(np.float64))
    below = np.searchsorted(numbers, size, side="right") - 1
    low, high = numbers[below], numbers[np.minimum(below + 1, len(numbers) - 1)]
    part = np.where(high > low, (size - low) / np.where(high > low, high - low, 1), 0)
    return np.copysign(np.where(bits < np.floor(part * 2.0**32), high, low), x)


def of_any_size(dtype, rng):
    """float32 numbers of any bits; some around the format's subnormal numbers; all of its own."""
    anything = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    small = rng.normal(size=20_000) * 2.0 ** rng.integers(-32, 17, 20_000)
    own = numbers_of(dtype)
    x = np.concatenate([anything, small.astype(np.float32), own, -own]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return x[np.abs(x.astype(np.float64)) <= numbers_of(dtype)[-1]]


@pytest.mark.parametrize("dtype", curated(NARROW, ["bfloat16"]))
def test_every_number_goes_to_the_neighbor_that_its_bits_say(dtype):
    rng = np.random.default_rng(0)
    x = of_any_size(dtype, rng)
    bits = rng.integers(0, 2**32, x.size, dtype=np.uint32)
    found = rounded_stochastically(jnp.asarray(x), dtype, jnp.asarray(bits))
    assert found.dtype == dtype
    expected = oracle(x, dtype, bits)
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(np.asarray(found)), np.signbit(expected))
    assert x.size > 90_000


@pytest.mark.parametrize("dtype", curated(["bfloat16", "float32"], ["bfloat16"]))
def test_from_float64(dtype):
    """By the numbers that nextafter says, since there are too many of float32 for a list."""
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        x = rng.normal(size=5_000) * 2.0 ** rng.integers(-150, 17, 5_000)
        x = x[np.abs(x) <= float(jnp.finfo(dtype).max)]
        bits = rng.integers(0, 2**64, x.size, dtype=np.uint64)
        found = np.asarray(rounded_stochastically(jnp.asarray(x), dtype, jnp.asarray(bits)))
        words = np.abs(found).view(f"uint{jnp.finfo(dtype).bits}")
        size, got = np.abs(x), np.abs(found).astype(np.float64)
        toward = np.where(got > size, words - 1, words + (got < size)).astype(words.dtype)
        other = toward.view(found.dtype).astype(np.float64)
        low, high = np.minimum(got, other), np.maximum(got, other)
        assert np.all((low <= size) & (size <= high))
        part = np.where(high > low, (size - low) / np.where(high > low, high - low, 1), 0)
        fraction = bits / 2.0**64
        sure = np.abs(fraction - part) > 1e-9
        np.testing.assert_array_equal((got > size)[sure], (fraction < part)[sure])


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
@pytest.mark.parametrize(
    ("x", "dtype", "expected"),
    [
        (np.inf, "bfloat16", np.inf),
        (np.nan, "bfloat16", np.nan),
        (65519.0, "float16", 65504.0),  # as by rounding to the nearest
        (65520.0, "float16", np.inf),
        (3.4e38, "bfloat16", np.inf),
        (3.39e38, "bfloat16", float(jnp.finfo(jnp.bfloat16).max)),
        (-0.0, "float16", -0.0),
    ],
)
def test_ends_of_the_range(x, dtype, expected, bits):
    found = rounded_stochastically(jnp.float32(x), dtype, jnp.uint32(bits))
    np.testing.assert_array_equal(np.float64(found), expected)
    if not np.isnan(expected):
        assert np.signbit(np.float64(found)) == np.signbit(expected)
