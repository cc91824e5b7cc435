"""Powers of two made of bits, and norms and sums of many leaves at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients.norms import (
    exponent_of,
    norm_error,
    norms_of_parts,
    power,
    power_of_two,
)
from tests import oracle

pytestmark = pytest.mark.optimized

# At both ends of the normal numbers, beside powers of two, and in between.
NORMAL = np.float32([2.0**-126, 1e-30, 0.999, 1.0, 1.5, 2.0, 1e30, 2.0**127, 3.4e38])


def test_exponents_are_those_of_frexp():
    found = jax.jit(exponent_of)(NORMAL)
    np.testing.assert_array_equal(found, np.frexp(NORMAL)[1] - 1)
    assert jax.jit(exponent_of)(jnp.zeros(())) == -127


def test_powers_end_at_zero_and_at_the_largest():
    exponents = np.array([-(2**20), -127, -126, 0, 127, 2**20])
    found = jax.jit(lambda e: power(e, np.dtype("float32")))(exponents)
    np.testing.assert_array_equal(found, np.float32([0, 0, 2.0**-126, 1, 2.0**127, 2.0**127]))


def test_scales_and_their_inverses_are_normal():
    scale, inverse = jax.jit(power_of_two)(np.append(NORMAL, np.float32([0, np.inf])))
    np.testing.assert_array_equal(scale * inverse, np.ones(11))
    assert (np.float32([scale, inverse]) >= 2.0**-126).all()
    assert (scale[1:-4] <= NORMAL[1:-2]).all()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("count", [2, pytest.param(70, marks=pytest.mark.slow)])
def test_norms_of_parts_are_as_near_as_is_said(count, scale):
    random = np.random.default_rng(count)
    sizes = [int(n) for n in random.integers(0, 300, count)]
    parts = [
        (random.normal(size=(5, n)) * scale * 10.0 ** random.integers(-8, 1)).astype(np.float32)
        for n in sizes
    ]
    exact = np.linalg.norm(np.concatenate(parts, axis=1).astype(np.float64), axis=1)
    found = np.float64(jax.jit(norms_of_parts)(parts))
    error = norm_error(max(sizes), np.dtype("float32"), count)
    assert (np.abs(found - exact) <= error * exact).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
def test_small_leaves_side_by_side(method):
    """Two groups of several shapes, with a leaf that is zero, one that is empty, and NaN."""
    rng = np.random.default_rng(0)
    groups = {"one": {"a": (3,), "b": (2, 5), "large": (70, 70)}, "other": {"c": (), "d": (0,)}}
    groups["other"]["e"] = (7,)

    def normal(*batch):
        def of(shape):
            return jnp.asarray(rng.normal(size=(*batch, *shape)))

        return jax.tree.map(of, groups, is_leaf=lambda x: isinstance(x, tuple))

    model, batch = normal(), normal(6)
    batch["one"]["b"] = batch["one"]["b"].at[1, 0, 0].set(jnp.nan)
    batch["other"]["e"] = batch["other"]["e"] * 0

    def loss(model, x):
        terms = jax.tree.map(lambda w, x: jnp.sum(w * x + jnp.sin(w)), model, x)
        return sum(jax.tree.leaves(terms))

    clip = {"one": 0.5, "other": 1.0}
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=clip, method=method)
    found = jax.jit(grad_fn)(model, batch)
    for group, leaves in model.items():
        each = {name: np.float64(batch[group][name] + jnp.cos(w)) for name, w in leaves.items()}
        rows = np.concatenate([x.reshape(6, -1) for x in each.values()], axis=1)
        factors = np.minimum(1, clip[group] / np.linalg.norm(rows, axis=1))
        for name, x in each.items():
            others = np.delete(np.arange(6), 1)
            expected = np.tensordot(factors[others], x[others], axes=1)
            np.testing.assert_allclose(found[group][name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_clip_norm_for_all_of_them():
    model = {str(i): jnp.full(i + 1, 0.5) for i in range(9)}
    batch = {str(i): jnp.linspace(-2, 3, 4 * (i + 1)).reshape(4, i + 1) for i in range(9)}

    def loss(model, x):
        return sum(jnp.sum(jnp.sin(model[name]) * x[name]) for name in model)

    truth = oracle.clipped_gradients(loss, model, batch, l2_clip_norm=0.7)
    for method in ("per_example", "book_keeping", "ghost"):
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=0.7, method=method)
        assert oracle.relative_error(jax.jit(grad_fn)(model, batch), truth.grads) < 1e-5
