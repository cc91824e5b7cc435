"""Optimizers that know of noise: what they compute, and what their papers say of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.privacy.optimizers import (
    Scaled,
    adam_corrected,
    adam_scaled,
    disk,
    disk_iterate,
    rescaled,
    scaled_loss,
)
from tests import oracle

SIZES = np.array([0.3, 1, 3], np.float32)
TRAINED = Scaled(eqx.is_inexact_array, False)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_corrected_steps_are_those_without_noise(noise):
    """Adam's own are smaller where the gradient is small: no more than gradient descent."""

    def moved(optimizer):
        def step(state, noise):
            return optimizer.update(SIZES + noise, state)[::-1]

        return jax.lax.scan(step, optimizer.init(drawn[0]), drawn)[1]

    drawn = noise * jax.random.normal(jax.random.key(0), (3000, 300, 3))
    adam, corrected = moved(optax.adam(1.0)), moved(adam_corrected(1.0, noise))
    if noise == 0:
        np.testing.assert_allclose(corrected, adam, rtol=1e-4)
    np.testing.assert_allclose(-corrected[-500:].mean((0, 1)), 1, atol=0.1)
    expected = SIZES / np.sqrt(SIZES**2 + noise**2)
    np.testing.assert_allclose(-adam[-500:].mean((0, 1)), expected, atol=0.03)


@pytest.mark.parametrize("inner", [optax.sgd(0.1, momentum=0.5), optax.adamw(0.1)])
def test_filtered_gradients_of_a_quadratic_are_those_of_the_iterate(inner):
    curvature, start = jnp.asarray([1.0, 4.0, 9.0]), jnp.asarray([1.0, -2.0, 3.0])
    filtered, plain = disk(inner, 0.3), start
    model, state, of_plain = start, filtered.init(start), inner.init(start)
    for _ in range(20):
        updates, state = filtered.update(curvature * model, state, model)
        model = model + updates
        updates, of_plain = inner.update(curvature * plain, of_plain, plain)
        plain = plain + updates
        np.testing.assert_allclose(disk_iterate(model, state), plain, rtol=1e-4, atol=1e-5)


def test_a_filter_leaves_that_much_noise():
    optimizer, noise = disk(optax.sgd(1.0), 0.3), jax.random.normal(jax.random.key(0), (30, 50_000))
    state = optimizer.init(noise[0])
    for drawn in noise:
        _, state = optimizer.update(drawn, state)
    assert jnp.var(state.filtered) == pytest.approx(0.3 / 1.7, rel=0.03)


def logistic(w, x, y):
    return jnp.logaddexp(0, x @ w) - y * (x @ w)


def test_gradients_are_clipped_after_they_are_scaled():
    x, y = np.random.default_rng(0).normal(size=(2, 8, 5)).astype(np.float32)
    plan = dp.PrivacyPlan(0.1, 10, noise_multiplier=1.0, delta=1e-5)
    grad_fn = dp.filter_clipped_grad(scaled_loss(logistic), l2_clip_norm=0.5, filter_spec=TRAINED)
    optimizer = optax.chain(plan.privatizer(grad_fn), adam_scaled(0.1, 0.25))
    model, batch = Scaled(jnp.ones(5)), (x, y[:, 0])

    @eqx.filter_jit
    def step(model, state, x, y, is_padding_example):
        grads = grad_fn(model, x, y, is_padding_example=is_padding_example)
        updates, state = optimizer.update(grads, state)
        return rescaled(eqx.apply_updates(model, updates), state), state, grads.model

    state, mask = optimizer.init(grad_fn.trainable(model)), np.zeros(8, bool)
    model = rescaled(model, state)
    np.testing.assert_array_equal(model.scale, 4)
    for _ in range(3):
        with_scale = lambda u, x, y, w=model: logistic(w.model + w.scale * u, x, y)  # noqa: E731
        truth = oracle.clipped_gradients(with_scale, jnp.zeros(5), *batch, l2_clip_norm=0.5)
        model, state, grads = step(model, state, *batch, mask)
        np.testing.assert_allclose(grads, truth.grads, rtol=1e-3, atol=1e-6)
    mu, count = state[1].adam[0].nu, state[1].adam[0].count
    np.testing.assert_allclose(
        model.scale, 1 / (0.25 + np.sqrt(mu / (1 - 0.999**count))), rtol=1e-5
    )
    released = lambda *arguments: step(*arguments)[:2]  # noqa: E731
    report = dp.check_privacy(released, model, state, *batch, mask, private=(2, 3, 4), plan=plan)
    report.raise_if_violated()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: adam_corrected(0.1, -1.0), "noise_stddev must be at least 0"),
        (lambda: adam_corrected(0.1, 1.0, b2=1.0), "b2 must be at least 0 and below 1"),
        (lambda: disk(optax.sgd(0.1), 0.0), "kappa must be above 0"),
        (lambda: disk(0.1), "optimizer must be an optax"),
        (lambda: disk_iterate(jnp.ones(2), optax.adam(1).init(jnp.ones(2))), "optimizers.disk in"),
        (lambda: adam_scaled(0.1, 0.0), "scale_eps must be above 0"),
    ],
)
def test_what_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()
