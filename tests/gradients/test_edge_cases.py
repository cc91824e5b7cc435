"""Zero, empty, padding, not finite, huge and tiny: what the edge-case tables promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models, oracle
from tests.gradients import jitted
from tests.tiers import METHODS, curated

pytestmark = pytest.mark.optimized


def bits(tree):
    """Every bit of every array: -0.0 and 0.0 differ, and so do two NaNs of different making."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("clip_norm", [0.5, {"weight": 1.0, "bias": 2.0}], ids=str)
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_an_empty_batch_gives_zeros(microbatch_size, clip_norm):
    def loss(model, x, y):
        return models.squared_error(model, x, y), 2 * x

    case = models.linear_regression()
    per_example, grads = jitted.value_and_grad(
        loss, l2_clip_norm=clip_norm, has_aux=True, microbatch_size=microbatch_size
    )(case.model, jnp.zeros((0, 5)), jnp.zeros(0))
    assert jax.tree.map(jnp.shape, grads) == {"weight": (5,), "bias": ()}
    assert not oracle.vector(grads).any()
    assert {x.shape for x in jax.tree.leaves(per_example)} == {(0,), (0, 5)}


# Examples whose gradient is not finite


HEALTHY, NAN_LOSS, INF_LOSS, NAN_LOSS_ALONE, NAN_GRADIENT_ALONE, INF_GRADIENT_ALONE = range(6)


def poisoned_loss(model, x, kind):
    """An ordinary loss, broken in the way that `kind` says."""
    a, b = model["a"], model["b"]
    loss = jnp.vdot(a, x) ** 2 + b * x[0]
    loss *= jnp.where(kind == NAN_LOSS, jnp.nan, 1.0)
    loss *= jnp.where(kind == INF_LOSS, jnp.inf, 1.0)
    # The logarithm of a negative number is NaN; its slope is a number like any other.
    loss += jnp.log(jnp.where(kind == NAN_LOSS_ALONE, -1.0, 1.0) * b)
    # The square root of zero is zero; its slope is infinite, and times zero it is NaN.
    loss += jnp.sqrt(jnp.where(kind == NAN_GRADIENT_ALONE, 0.0, 1.0) * b**2)
    loss += jnp.sqrt(jnp.where(kind == INF_GRADIENT_ALONE, b - 2.0, 1.0 + b**2))
    return loss


@functools.cache
def poisoned_engine(method):
    options = {"l2_clip_norm": 1.0}
    if method == "book_keeping":
        options = {"l2_clip_norm": {"a": np.inf, "b": 2.0}, "microbatch_size": 2}
    return jitted.value_and_grad(poisoned_loss, method=method, **options)


@pytest.mark.parametrize("method", curated(METHODS, ["ghost"]))
@pytest.mark.parametrize(
    ("kind", "first", "loss_is_finite", "gradient_is_finite"),
    [
        (HEALTHY, np.nan, False, False),
        (HEALTHY, np.inf, False, False),
        (NAN_LOSS, 1.0, False, False),
        (INF_LOSS, 1.0, False, False),
        (NAN_LOSS_ALONE, 1.0, False, True),
        (NAN_GRADIENT_ALONE, 1.0, True, False),
        (INF_GRADIENT_ALONE, 1.0, True, False),
    ],
)
def test_an_example_that_is_not_finite_is_as_good_as_padding(
    kind, first, loss_is_finite, gradient_is_finite, method
):
    model = {"a": jnp.array([1.0, -1.0, 0.5]), "b": jnp.array(2.0)}
    # The last one: padding before others would change the order in which they are added up.
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32).at[4, 0].set(first)
    kinds = jnp.full(5, HEALTHY).at[4].set(kind)
    grad_fn, nobody = poisoned_engine(method), jnp.zeros(5, bool)
    reported, grads = grad_fn(model, x, kinds, is_padding_example=nobody)
    masked, expected = grad_fn(model, x, kinds, is_padding_example=nobody.at[4].set(True))
    assert bits(grads) == bits(expected)
    assert oracle.vector(grads).any()
    assert np.isfinite(oracle.vector(grads)).all()
    # The poison is what it was meant to be, and is reported as it is.
    norms = np.stack(jax.tree.leaves(reported.grad_norm))
    assert np.isfinite(reported.loss[4]) == loss_is_finite
    assert np.isfinite(norms[:, 4]).all() == gradient_is_finite
    # The others' reports know nothing of it.
    others = np.arange(4)
    for leaf, other in zip(jax.tree.leaves(reported), jax.tree.leaves(masked), strict=True):
        np.testing.assert_array_equal(leaf[others], other[others])


# Scales


def test_a_norm_at_the_end_of_float32_is_clipped_and_one_beyond_it_adds_zero():
    largest = np.finfo(np.float32).max
    x = jnp.stack([jnp.full(16, 0.249 * largest), jnp.full(16, largest)])
    # (A factor of 1 / 3e38 would be below the smallest float32.)
    per_example, grads = jitted.value_and_grad(models.dot, l2_clip_norm=100.0)(jnp.zeros(16), x)
    np.testing.assert_allclose(per_example.grad_norm, [0.996 * largest, np.inf], rtol=1e-6)
    np.testing.assert_allclose(grads, np.full(16, 25.0), rtol=5e-6)


@pytest.mark.parametrize("method", curated(METHODS, ["book_keeping"]))
def test_terms_that_overflow_and_cancel_leave_the_others_alone(method):
    """A row looked up twice with cotangents whose squares overflow: a gradient of exactly zero."""
    loss = lambda table, rows, weights: jnp.sum(weights[:, None] * table[rows])  # noqa: E731
    rows, padding = np.array([[1, 1], [0, 2]]), np.array([True, False])
    weights = np.array([[3e38, -3e38], [1.0, 1.0]], np.float32)
    grad_fn = jitted.grad(loss, l2_clip_norm=1.0, method=method)
    found = grad_fn(jnp.ones((3, 4)), rows, weights)
    alone = grad_fn(jnp.ones((3, 4)), rows, weights, is_padding_example=padding)
    assert np.all(np.isfinite(found))
    np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e22])
def test_a_gradient_that_the_compiler_knows(method, scale):
    """It is a constant, and alone in its microbatch: nothing may be squared ahead of time."""
    loss = lambda bias, x: scale * jnp.sum(x + bias)  # noqa: E731
    grad_fn = jitted.value_and_grad(loss, l2_clip_norm=scale, method=method, microbatch_size=1)
    per_example, grads = grad_fn(jnp.ones(4), jnp.ones((3, 4)))
    np.testing.assert_allclose(per_example.grad_norm, np.full(3, 2 * scale), rtol=1e-6)
    np.testing.assert_allclose(grads, np.full(4, 3 * scale / 2), rtol=1e-5)
