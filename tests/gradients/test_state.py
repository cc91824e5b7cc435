"""What an `eqx.nn.State` holds is not trained, and its misuse is refused with what to do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.gradients import jitted

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


class RunningMean(eqx.nn.StatefulLayer):
    """A stateful layer of one's own: it writes its state whenever it is called."""

    index: eqx.nn.StateIndex
    linear: eqx.nn.Linear

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.full(3, 0.5, jnp.float32))
        self.linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))

    def __call__(self, x, state, *, key=None):
        mean = 0.9 * state.get(self.index) + 0.1 * x
        return self.linear(x - mean), state.set(self.index, mean)


class Normalised(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="ema")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def batch_norm():
    """With running statistics of its own, as after pretraining on public data."""
    model, state = eqx.nn.make_with_state(Normalised)()
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    _, state = apply(2 * X + 1, state)
    return eqx.nn.inference_mode(model), state


KINDS = {"running mean": eqx.nn.make_with_state(RunningMean), "batch norm at inference": batch_norm}


def loss(model_and_state, x):
    model, state = model_and_state
    out, _ = model(x, state)
    return jnp.sum(out**2)


def parameters(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


# Not trained


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_comes_with_the_model_is_not_trained(kind):
    model, state = KINDS[kind]()
    grads = jitted.grad(loss, l2_clip_norm=0.5)((model, state), X)
    assert jax.tree.leaves(grads[1]) == []
    trained = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(grads[0]) == jax.tree.structure(trained)
    # As where the state is a constant of the loss.
    constant = jax.tree.map(np.asarray, state)
    closed = jitted.grad(
        lambda model, x: loss((model, jax.tree.map(jnp.asarray, constant)), x), l2_clip_norm=0.5
    )(model, X)
    for found, expected in zip(parameters(grads[0]), parameters(closed), strict=True):
        assert found.any()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_function_of_a_leaf_does_not_select_state():
    pair, any_leaf = KINDS["running mean"](), lambda leaf: leaf is not None
    for spec in (any_leaf, (True, any_leaf)):
        grads = jitted.grad(loss, l2_clip_norm=1.0, filter_spec=spec)(pair, X)
        assert jax.tree.leaves(grads[1]) == []


@pytest.mark.parametrize("form", ["above", "in"])
def test_a_tree_may_ask_for_state(form):
    model, state = KINDS["running mean"]()
    chosen = True if form == "above" else jax.tree.map(lambda _: True, state)
    spec = eqx.is_inexact_array, chosen
    grads = jitted.grad(loss, l2_clip_norm=1.0, filter_spec=spec)((model, state), X)
    assert [leaf.shape for leaf in jax.tree.leaves(grads[1])] == [(3,)]


# Misuse


@pytest.mark.parametrize("nested", [False, True])
def test_state_as_a_batch_argument(nested):
    model, state = KINDS["running mean"]()
    of_three = lambda model, state, x: loss((model, state), x)  # noqa: E731
    grad_fn = dp.filter_clipped_grad(of_three, l2_clip_norm=1.0)
    with pytest.raises(ValueError, match=r"batch argument 0 .*eqx\.nn\.State.*\(model, state\)"):
        grad_fn(model, {"state": state} if nested else state, X)


def test_state_that_the_loss_closes_over_and_writes():
    model, state = KINDS["running mean"]()
    grad_fn = dp.filter_clipped_grad(lambda model, x: loss((model, state), x), l2_clip_norm=1.0)
    grad_fn(model, X)  # the first trace uses it up
    with pytest.raises(ValueError, match=r"(?s)eqx\.nn\.State.*used up.*\(model, state\)"):
        grad_fn(model, X)


def test_state_as_aux():
    def with_state(model_and_state, x):
        out, state = model_and_state[0](x, model_and_state[1])
        return jnp.sum(out**2), {"state": state}

    grad_fn = dp.filter_clipped_grad(with_state, l2_clip_norm=1.0, has_aux=True)
    with pytest.raises(ValueError, match=r"aux\.state is an eqx\.nn\.State"):
        grad_fn(KINDS["running mean"](), X)
