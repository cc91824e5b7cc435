"""A clipped gradient is used like Equinox's own: as decorator and call, under jit and scan."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models, oracle
from tests.tiers import METHODS, curated

CASE = models.linear_regression()
BATCH = CASE.batch(5)


def expected(**options):
    return oracle.clipped_gradients(CASE.loss, CASE.model, *BATCH, l2_clip_norm=1.0, **options)


class Regression(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    @dp.filter_clipped_grad(l2_clip_norm=1.0)
    def gradient(self, x, y):
        """What it does."""
        return models.squared_error({"weight": self.weight, "bias": self.bias}, x, y)


def test_as_a_decorator_of_a_method():
    model = Regression(**CASE.model)
    grads = model.gradient(*BATCH)
    assert isinstance(grads, Regression)
    found = {"weight": grads.weight, "bias": grads.bias}
    assert oracle.relative_error(found, expected().grads) < 1e-5
    padding = np.array([True, False, False, False, True])
    grads = eqx.filter_jit(lambda model: model.gradient(*BATCH, is_padding_example=padding))(model)
    found = {"weight": grads.weight, "bias": grads.bias}
    truth = expected(is_padding_example=padding)
    assert oracle.relative_error(found, truth.grads) < 1e-5
    method = Regression.gradient
    assert (method.__name__, method.__doc__) == ("gradient", "What it does.")
    assert method.l2_norm_bound == 1.0


def test_filter_jit_compiles_once():
    traces = []

    def loss(model, x, y):
        traces.append(None)
        return CASE.loss(model, x, y)

    grad_fn = eqx.filter_jit(dp.filter_clipped_grad(loss, l2_clip_norm=1.0))
    grad_fn(CASE.model, *BATCH)
    once = len(traces)
    grad_fn(jax.tree.map(jnp.sin, CASE.model), *CASE.batch(5, seed=1))
    assert len(traces) == once > 0


@pytest.mark.parametrize("clip_norm", [1.0, {"weight": 0.5, "bias": 0.7}], ids=str)
def test_inside_scan(clip_norm):
    """Four steps of gradient descent, each held against the oracle."""
    grad_fn = dp.filter_value_and_clipped_grad(CASE.loss, l2_clip_norm=clip_norm, microbatch_size=2)
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(CASE.batch(3, s) for s in range(4)))

    @jax.jit
    def descend(model, batches):
        def step(model, batch):
            per_example, grads = grad_fn(model, *batch)
            return jax.tree.map(lambda w, g: w - 0.1 * g, model, grads), per_example.loss

        return jax.lax.scan(step, model, batches)

    final, losses = descend(CASE.model, batches)
    model = jax.tree.map(np.asarray, CASE.model)
    for s in range(4):
        batch = CASE.batch(3, s)
        truth = oracle.clipped_gradients(CASE.loss, model, *batch, l2_clip_norm=clip_norm)
        assert oracle.relative_error(losses[s], truth.loss) < 1e-5
        model = jax.tree.map(lambda w, g: w - 0.1 * g, model, truth.grads)
    assert oracle.relative_error(final, model) < 1e-5


@pytest.mark.parametrize("method", curated(METHODS, ["book_keeping", "ghost"]))
def test_forward_mode(method):
    """How the sum changes with the model, which a search for settings may ask for."""

    def loss(model, x):
        wide = jnp.tanh(jax.checkpoint(jnp.dot)(x, model["wide"]))  # ghost does not form it
        return jnp.sum(jnp.tanh(wide[:, :3] @ model["small"] + model["shift"]) ** 2)

    rng = np.random.default_rng(0)
    shapes = {"wide": (8, 8), "small": (3, 2), "shift": (2,)}
    model = {name: jnp.asarray(rng.normal(size=its), jnp.float32) for name, its in shapes.items()}
    x = jnp.asarray(rng.normal(size=(3, 20, 8)), jnp.float32)
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=0.5, method=method)
    _, found = jax.jvp(jax.jit(lambda model: grad_fn(model, x)), (model,), (model,))

    def truth(scale):
        scaled = {name: scale * np.asarray(leaf, np.float64) for name, leaf in model.items()}
        return oracle.clipped_gradients(loss, scaled, x, l2_clip_norm=0.5).grads

    slope = jax.tree.map(lambda up, down: (up - down) / 2e-4, truth(1 + 1e-4), truth(1 - 1e-4))
    assert oracle.relative_error(found, slope) < 1e-4
