"""What one example adds has, measured in float64, a norm of at most the clip norm."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models

METHODS = ["per_example", "book_keeping"]


def added(grads):
    """The exact norm of a gradient."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grads)]
    return np.linalg.norm(np.concatenate(leaves))


def matrix(model, x, g):
    """The gradient is the sum over time of g_t (outer) x_t."""
    return jnp.sum(jax.vmap(lambda x: model @ x)(x) * g)


def one_at_a_time(loss, model, *batch, clip_norm, method, policy=None):
    """The norm that each example adds when it is alone."""
    grad_fn = eqx.filter_jit(
        dp.filter_value_and_clipped_grad(loss, l2_clip_norm=clip_norm, method=method, policy=policy)
    )
    results = [grad_fn(model, *(x[i : i + 1] for x in batch)) for i in range(len(batch[0]))]
    return np.array([added(grads) for _, grads in results]), np.array(
        [float(per_example.grad_norm[0]) for per_example, _ in results]
    )


def tokens(time, kind, seed=0):
    rng = np.random.default_rng(seed)
    x, g = rng.normal(size=(6, time, 8)), rng.normal(size=(6, time, 5))
    if kind == "cancelling":
        half = time // 2
        x[:, half : 2 * half] = x[:, :half]
        g[:, half : 2 * half] = -g[:, :half] * (1 + 1e-6 * rng.normal(size=(6, half, 1)))
    if kind == "aligned":
        x[:], g[:] = 0.1 + x[:, :1], 0.1 + g[:, :1]
    if kind == "one huge":
        x[:, 0, 0] = 1e15
    if kind == "tiny":
        x *= 1e-18
        g *= 1e-12
    if kind == "huge":
        x *= 1e15
        g *= 1e14
    return jnp.asarray(x, jnp.float32), jnp.asarray(g, jnp.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["random", "cancelling", "aligned", "one huge", "tiny", "huge"])
@pytest.mark.parametrize("time", [1, 7, 256])
def test_sums_over_time(time, kind, method):
    x, g = tokens(time, kind)
    clip_norm = 1e-31 if kind == "tiny" else 0.1
    norms, _ = one_at_a_time(matrix, jnp.zeros((5, 8)), x, g, clip_norm=clip_norm, method=method)
    assert (norms <= clip_norm).all()
    assert (norms > 0).all()
    if kind in ("random", "aligned", "one huge"):
        assert (norms >= 0.9999 * clip_norm).all()


@pytest.mark.parametrize("method", METHODS)
def test_models_keep_within_and_near_the_clip_norm(method):
    for case in (models.mlp(), models.cnn()):
        norms, before = one_at_a_time(
            case.loss, case.model, *case.batch(6), clip_norm=0.37, method=method
        )
        assert (norms <= 0.37).all()
        assert (norms[before > 0.4] >= 0.9999 * 0.37).all()
        assert (before > 0.4).any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_narrow_policies(preset, method):
    policy = dp.load_policy(preset)
    x, g = tokens(64, "random")
    norms, _ = one_at_a_time(
        matrix, jnp.zeros((5, 8)), x, g, clip_norm=0.1, method=method, policy=policy
    )
    assert (norms <= 0.1).all()
    assert (norms >= 0.99 * 0.1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 31, 4096, 100_003])
def test_long_gradients_of_equal_entries(size, method):
    """The worst case for a long sum: every rounding goes the same way."""
    x = jnp.full((2, size), 0.1) * jnp.array([[1.0], [3.0]])
    norms, before = one_at_a_time(models.dot, jnp.zeros(size), x, clip_norm=0.3, method=method)
    exact = np.linalg.norm(np.asarray(x, np.float64), axis=1)
    np.testing.assert_allclose(before, exact, rtol=5e-6)
    assert (norms <= 0.3).all()
    assert (norms[exact > 0.3] >= 0.9999 * 0.3).all()


@pytest.mark.parametrize("method", METHODS)
def test_at_the_clip_norm_itself(method):
    """Gradients whose norm is the clip norm, or off by a rounding, on either side."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(64, 33))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x = jnp.asarray(x * (1 + np.linspace(-3e-7, 3e-7, 64))[:, None], jnp.float32)
    norms, _ = one_at_a_time(models.dot, jnp.zeros(33), x, clip_norm=1.0, method=method)
    assert (norms <= 1.0).all()
