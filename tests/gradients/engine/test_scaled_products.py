"""Operands in narrow dtypes: what becomes of every kind of entry, and at what scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients.narrow_products import restored, scaled

NARROW = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"]
NORMALS = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
UNITS = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "float16": 2**-11, "bfloat16": 2**-8}


CAST = jax.jit(lambda x, matmul: scaled(x, matmul.forward, matmul), static_argnums=1)


def cast(x, dtype, scaling="per_example"):
    return CAST(jnp.asarray(x, jnp.float32), dp.Matmul(dtype, scaling=scaling))


def back(operand, dtype="float32"):
    return np.asarray(restored(operand, jnp.dtype(dtype)), np.float64)


@pytest.mark.parametrize("dtype", NARROW)
def test_entries_keep_the_digits_of_the_format(dtype):
    found, largest = back(cast(NORMALS, dtype)), np.abs(NORMALS).max()
    is_normal = np.abs(NORMALS) > largest * 2**-12
    error = np.abs(found - NORMALS)
    assert (error <= np.where(is_normal, UNITS[dtype] * np.abs(NORMALS), largest * 2**-12)).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_a_power_of_two_changes_the_exponent_alone(dtype):
    plain = cast(NORMALS, dtype)
    for exponent in (-100, -40, 17, 100, 120):
        other = cast(np.ldexp(NORMALS, exponent), dtype)
        np.testing.assert_array_equal(
            np.asarray(plain.values, np.float32), np.asarray(other.values, np.float32)
        )
        assert int(other.exponent) - int(plain.exponent) == exponent
        np.testing.assert_array_equal(back(other), np.ldexp(back(plain), exponent))


@pytest.mark.parametrize("dtype", NARROW)
def test_the_largest_entry_is_put_near_the_end(dtype):
    for largest in (1.0, 1.999, 3e38, 1.2e-38, 7e-30):
        found = cast([largest, -largest / 3], dtype)
        size = float(jnp.max(jnp.abs(found.values)).astype(jnp.float32))
        most = min(2.0**15, float(jnp.finfo(dtype).max))
        assert 2.0**-1 <= size <= most, largest
        assert np.isfinite(back(found)).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_zero_and_denormals_have_exponent_0(dtype):
    for x in ([0.0, -0.0], [1e-40, 0.0], np.zeros((0, 3))):
        found = cast(x, dtype)
        assert int(found.exponent) == 0
        assert not np.asarray(found.values, np.float32).any()


@pytest.mark.parametrize("dtype", NARROW[:3])
def test_one_huge_entry_leaves_zeros(dtype):
    found = back(cast([1e30, 1.0, -3.0], dtype))
    np.testing.assert_allclose(found, [1e30, 0, 0], rtol=UNITS[dtype])


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scaling", ["per_example", "none"])
def test_what_is_not_finite_stays_so_and_changes_no_other_entry(dtype, scaling):
    plain = back(cast([1.0, 0.0, 0.0, 0.0, -0.3], dtype, scaling))
    found = back(cast([1.0, np.nan, np.inf, -np.inf, -0.3], dtype, scaling))
    assert not np.isfinite(found[1:4]).any()
    assert np.isnan(found[1])
    np.testing.assert_array_equal(found[[0, 4]], plain[[0, 4]])


@pytest.mark.parametrize("dtype", NARROW)
def test_without_scaling_the_largest_number_is_the_end(dtype):
    limit = float(jnp.finfo(dtype).max)
    found = cast([2 * limit if dtype != "bfloat16" else limit, -3e38, 1.0], dtype, "none")
    assert int(found.exponent) == 0
    np.testing.assert_allclose(back(found), [limit, max(-limit, back(found)[1]), 1])


def test_a_cotangent_of_float16_does_not_overflow_as_it_is_rounded():
    found = back(cast([65504.0, np.inf, 1.0], "float8_e5m2"), "float16")
    np.testing.assert_array_equal(found[:2], [65504, np.inf])
