"""The oracle itself, against formulas that can be checked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models, oracle


def test_linear_regression_has_a_closed_form():
    case = models.linear_regression()
    x, y = case.batch(7)
    truth = oracle.clipped_gradients(case.loss, case.model, x, y, l2_clip_norm=0.7)
    rows = np.concatenate([np.asarray(x, np.float64), np.ones((7, 1))], axis=1)
    parameters = np.append(np.asarray(case.model["weight"], np.float64), float(case.model["bias"]))
    residual = rows @ parameters - np.asarray(y, np.float64)
    gradients = residual[:, None] * rows
    norms = np.linalg.norm(gradients, axis=1)
    assert norms.min() < 0.7 < norms.max()
    expected = (gradients * np.minimum(1, 0.7 / norms)[:, None]).sum(0)
    np.testing.assert_allclose(truth.loss, residual**2 / 2, rtol=1e-12)
    np.testing.assert_allclose(truth.grad_norm, norms, rtol=1e-12)
    np.testing.assert_allclose(truth.grads["weight"], expected[:5], rtol=1e-12)
    np.testing.assert_allclose(truth.grads["bias"], expected[5], rtol=1e-12)


@pytest.mark.parametrize(
    ("clip_norm", "rescale", "expected"),
    [
        (1.0, False, [0.6, 0.8]),
        (10.0, False, [3.0, 4.0]),
        (0.0, False, [0.0, 0.0]),
        (np.inf, False, [3.0, 4.0]),
        (2.0, True, [0.6, 0.8]),
        (10.0, True, [0.3, 0.4]),
        (0.0, True, [0.6, 0.8]),
        (np.inf, True, [0.0, 0.0]),
    ],
)
def test_clipping_of_three_and_four(clip_norm, rescale, expected):
    model, x = jnp.zeros(2), jnp.array([[3.0, 4.0]])
    truth = oracle.clipped_gradients(
        models.dot, model, x, l2_clip_norm=clip_norm, rescale_to_unit_norm=rescale
    )
    np.testing.assert_allclose(truth.grads, expected, rtol=1e-15)
    np.testing.assert_allclose(truth.grad_norm, [5.0])


def test_a_tree_of_clip_norms_clips_each_group_alone():
    model = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(1), "d": jnp.zeros(1)}}
    x = {"a": jnp.array([[3.0, 4.0]]), "b": {"c": jnp.array([[6.0]]), "d": jnp.array([[8.0]])}}
    truth = oracle.clipped_gradients(models.dot, model, x, l2_clip_norm={"a": 1.0, "b": 5.0})
    np.testing.assert_allclose(oracle.vector(truth.grads), [0.6, 0.8, 3.0, 4.0])
    np.testing.assert_allclose(oracle.vector(truth.grad_norm), [5.0, 10.0])


def test_an_example_that_is_not_finite_adds_nothing_and_keeps_its_norm():
    x = {"a": jnp.array([1.0, jnp.nan]), "b": jnp.array([2.0, 3.0])}
    model = jax.tree.map(lambda _: jnp.zeros(()), x)
    truth = oracle.clipped_gradients(models.dot, model, x, l2_clip_norm={"a": 9.0, "b": 9.0})
    np.testing.assert_allclose(oracle.vector(truth.grads), [1.0, 2.0])
    np.testing.assert_allclose(truth.grad_norm["a"], [1.0, np.nan])
    np.testing.assert_allclose(truth.grad_norm["b"], [2.0, 3.0])
