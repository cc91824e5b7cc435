"""Optimizers that know of noise: what they compute (what it is worth: `examples/optimizers.py`)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp import optimizers
from tests import oracle
from tests.tiers import curated

SIZES = np.array([0.3, 1, 3], np.float32)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_corrected_steps_are_those_without_noise(noise):
    """Adam's own are smaller where the gradient is small: no more than gradient descent."""

    def moved(optimizer):
        step = lambda state, noise: optimizer.update(SIZES + noise, state)[::-1]  # noqa: E731
        return -jax.lax.scan(step, optimizer.init(drawn[0]), drawn)[1]

    drawn = noise * jax.random.normal(jax.random.key(0), (3000, 300, 3))
    adam, corrected = moved(optax.adam(1.0)), moved(optimizers.adam_corrected(1.0, noise))
    if noise == 0:
        np.testing.assert_allclose(corrected, adam, rtol=1e-4)
    np.testing.assert_allclose(corrected[-500:].mean((0, 1)), 1, atol=0.1)
    expected = SIZES / np.sqrt(SIZES**2 + noise**2)
    np.testing.assert_allclose(adam[-500:].mean((0, 1)), expected, atol=0.03)


@pytest.mark.parametrize("inner", [optax.sgd(0.1, momentum=0.5), optax.adamw(0.1)])
def test_filtered_gradients_of_a_quadratic_are_those_of_the_iterate(inner):
    curvature, optimizer = jnp.asarray([1.0, 4.0, 9.0]), optimizers.disk(inner, 0.3)
    model = plain = jnp.asarray([1.0, -2.0, 3.0])
    state, of_plain = optimizer.init(model), inner.init(plain)
    for _ in range(20):
        updates, state = optimizer.update(curvature * model, state, model)
        model = model + updates
        updates, of_plain = inner.update(curvature * plain, of_plain, plain)
        plain = plain + updates
        np.testing.assert_allclose(optimizers.disk_iterate(model, state), plain, 1e-4, 1e-5)


@pytest.mark.slow
def test_gradients_are_clipped_after_they_are_scaled():
    x, y = np.random.default_rng(0).normal(size=(2, 8, 5)).astype(np.float32)
    plan = dp.PrivacyPlan(0.1, 10, noise_multiplier=1.0, delta=1e-5)
    loss = lambda w, x, y: jnp.logaddexp(0, x @ w) - y.sum() * (x @ w)  # noqa: E731
    options = {"filter_spec": optimizers.Scaled(eqx.is_inexact_array, False)}
    grad_fn = dp.filter_clipped_grad(optimizers.scaled_loss(loss), l2_clip_norm=0.5, **options)
    optimizer = optax.chain(plan.privatizer(grad_fn), optimizers.adam_scaled(0.1, 0.25))

    def step(model, state, x, y, is_padding_example):
        grads = grad_fn(model, x, y, is_padding_example=is_padding_example)
        updates, state = optimizer.update(grads, state)
        return optimizers.rescaled(eqx.apply_updates(model, updates), state), state

    model, mask = optimizers.Scaled(jnp.ones(5)), np.zeros(8, bool)
    state = optimizer.init(grad_fn.trainable(model))
    model, jitted = optimizers.rescaled(model, state), eqx.filter_jit(step)
    np.testing.assert_array_equal(model.scale, 4)
    for _ in range(3):
        of_scaled = lambda u, x, y, w=model: loss(w.model + w.scale * u, x, y)  # noqa: E731
        truth = oracle.clipped_gradients(of_scaled, jnp.zeros(5), x, y, l2_clip_norm=0.5)
        np.testing.assert_allclose(grad_fn(model, x, y).model, truth.grads, 1e-3, 1e-6)
        model, state = jitted(model, state, x, y, mask)
    adam = state[1].adam[0]
    root = np.sqrt(adam.nu / (1 - 0.999**adam.count))
    np.testing.assert_allclose(model.scale, 1 / (0.25 + root), rtol=1e-5)
    report = dp.check_privacy(step, model, state, x, y, mask, private=(2, 3, 4), plan=plan)
    report.raise_if_violated()


def pairs(model):
    return [(model["right"][0], model["right"][1]), (model["left"][0], model["left"][1])]


@pytest.mark.parametrize("scale", curated([0.1, 1.0, 10.0], []))
def test_norms_and_noise_of_lora_do_not_depend_on_its_factors(scale):
    """Two adapters, U F on the left and F U on the right of an input, against a product alone."""
    rng = np.random.default_rng(0)
    inner, outer, x = (rng.normal(size=s).astype(np.float32) for s in ((2, 7), (5, 2), (4, 7)))
    factors = (inner * scale, outer / scale)
    given = {"right": factors, "left": tuple(one.T for one in factors)}
    model = optimizers.orthonormalized(jax.tree.map(jnp.asarray, given), pairs)
    product = outer.astype(float) @ inner
    np.testing.assert_allclose(model["right"][1] @ model["right"][0], product, 1e-4, 1e-5)
    np.testing.assert_allclose(model["left"][0] @ model["left"][1], product.T, 1e-4, 1e-5)
    np.testing.assert_allclose(model["right"][0] @ model["right"][0].T, np.eye(2), atol=1e-5)
    loss = lambda m, x: jnp.sum(jnp.sin(m["right"][1] @ (m["right"][0] @ x)))  # noqa: E731
    grad_fn = dp.filter_value_and_clipped_grad(loss, l2_clip_norm=1.0)
    norms = grad_fn(model, x)[0].grad_norm
    q = np.linalg.qr(inner.T.astype(float))[0]
    for found, one in zip(norms, x.astype(float), strict=True):
        of_product = np.outer(np.cos(product @ one), one)
        squares = np.sum((of_product @ q) ** 2) + np.sum((q.T @ product.T @ of_product) ** 2)
        np.testing.assert_allclose(found, np.sqrt(squares), rtol=1e-4)
    optimizer = optimizers.lora_orthonormal(optax.adam(0.1), pairs)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, model), optimizer.init(model), model)
    moved, after = jax.tree.map(lambda p: p - 0.1, model), optax.apply_updates(model, updates)
    for (f, u), (g, v) in zip(pairs(moved)[:1], pairs(after)[:1], strict=True):
        np.testing.assert_allclose(v @ g, u @ f, 1e-4, 1e-4)
        np.testing.assert_allclose(g @ g.T, np.eye(2), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: optimizers.adam_corrected(0.1, -1.0), "noise_stddev must be at least 0"),
        (lambda: optimizers.disk(optax.sgd(0.1), 0.0), "kappa must be above 0"),
        (lambda: optimizers.disk_iterate(0, optax.sgd(1).init(0)), "optimizers.disk in it"),
        (lambda: optimizers.adam_scaled(0.1, 0.0), "scale_eps must be above 0"),
        (lambda: optimizers.lora_orthonormal(optax.sgd(0.1), None), "factors"),
    ],
)
def test_what_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()
