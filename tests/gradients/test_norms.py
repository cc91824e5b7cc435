"""The norm of an array, and what is said of its error, for awkward lengths and at any scale."""

import jax
import numpy as np
import pytest

from eqx_dp.gradients.leaves import weighted_sum
from eqx_dp.gradients.norms import norm_error, norms

pytestmark = pytest.mark.optimized

norm = jax.jit(norms)


# Lengths that divide into blocks evenly, that have to be filled up, and that take several levels.
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 96, 1009, 4096, 64**2 + 1, 127 * 131])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_are_as_near_as_is_said(size, scale):
    random = np.random.default_rng(size)
    rows = [random.normal(size=size), np.full(size, 1 + 2.0**-12), np.geomspace(1, 1e-6, size)]
    rows += [np.full(size, c) for c in random.uniform(1, 2, 5)]
    x = (np.stack(rows) * scale).astype(np.float32)
    exact = np.linalg.norm(x.astype(np.float64), axis=1)
    error = np.abs(np.asarray(norm(x), np.float64) - exact) / exact
    assert (error <= norm_error(size, np.dtype("float32"))).all()


def test_the_error_stays_small_however_long_the_array():
    assert norm_error(2**30, np.dtype("float32")) < 1e-5


@pytest.mark.parametrize("shape", [(0,), (3, 0), (7, 5, 3)])
def test_every_entry_counts_whatever_the_shape(shape):
    x = np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32)
    expected = np.linalg.norm(x.reshape(4, int(np.prod(shape))).astype(np.float64), axis=1)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-6)
    assert norm(x[:0]).shape == (0,)


@pytest.mark.parametrize("batch", [0, 1, 8, 9, 65])
@pytest.mark.parametrize("size", [3, 2**15])
def test_what_does_not_contribute_is_selected_away(batch, size):
    """Of few examples and many, small gradients and large: each is added up in its own way."""
    random = np.random.default_rng(batch)
    gradients = random.normal(size=(batch, size)).astype(np.float32)
    factors = random.uniform(size=batch).astype(np.float32)
    contributes = np.arange(batch) % 3 > 0
    expected = np.float64(factors * contributes) @ gradients
    gradients[~contributes] = np.nan
    found = jax.jit(weighted_sum)(gradients, factors, contributes)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
