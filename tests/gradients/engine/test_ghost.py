"""How ghost goes about it: what it does once, and what it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.gradients.engine import agreement
from tests.models import Case

LAYERS, TOKENS, WIDTH = 2, 33, 3


def drawn(rng, size):
    return (jnp.asarray(rng.normal(size=(size, TOKENS, WIDTH)), jnp.float32),)


def model():
    rng = np.random.default_rng(0)
    return {
        "scale": jnp.asarray(rng.normal(size=(LAYERS, WIDTH)), jnp.float32),
        "shift": jnp.asarray(rng.normal(size=(LAYERS, 2, WIDTH)), jnp.float32),
        "weight": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)), jnp.float32),
        "head": jnp.asarray(rng.normal(size=(WIDTH, 2)), jnp.float32),
    }


def repeated(model, x):
    """Scales and biases that are repeated to the shape of their data before they meet it."""

    def layer(x, its):
        scale = jnp.broadcast_to(its["scale"] * 1.0, x.shape)
        # The first row for the first tokens, the second for the last, one token for none.
        shift = jnp.broadcast_to(its["shift"][:, None], (2, TOKENS // 2, WIDTH))
        shift = shift.reshape(-1, WIDTH)
        x = x * scale
        x = x.at[1:].add(0) + jnp.concatenate([jnp.zeros((1, WIDTH)), x[1:] + shift])
        return jnp.tanh(x @ (its["weight"] * 1.0)), None

    layers = {name: its for name, its in model.items() if name != "head"}
    # One vector alone meets the head: that is what ghost takes a second pass for.
    return jnp.sum((jnp.sum(jax.lax.scan(layer, x, layers)[0], axis=0) @ model["head"]) ** 2)


@pytest.mark.parametrize("by_leaf", [False, True])
def test_scales_and_biases_that_are_repeated(by_leaf):
    agreement.check(Case("repeated", model(), repeated, drawn), by_leaf=by_leaf)


def text(loss, method, width=WIDTH):
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method=method)
    return jax.jit(grad_fn).lower(model(), jnp.ones((2, TOKENS, width))).as_text()


@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
def test_repeated_ones_are_small(method):
    """Nothing of the shape of their data is held for them: the scan stacks no such cotangent."""

    def loss(model, x, repeats):
        def layer(x, its):
            its = jnp.broadcast_to(its, x.shape) if repeats else its
            return jnp.tanh(x * its), None

        return jnp.sum(jax.lax.scan(layer, x, model["scale"])[0] ** 2)

    def stacked(repeats):
        found = text(lambda model, x: loss(model, x, repeats), method)
        return found.count("stablehlo.dynamic_update_slice")

    assert stacked(repeats=True) == stacked(repeats=False)


def test_one_pass_where_most_is_held_in_any_case():
    """Of a recurrent network ghost is book-keeping: a second pass would save nothing."""

    def recurrent(model, x):
        def step(state, now):
            return jnp.tanh(state @ model["weight"][0] + now), None

        return jnp.sum(jax.lax.scan(step, x[0], x)[0])

    assert text(recurrent, "ghost") == text(recurrent, "book_keeping")
    assert text(repeated, "ghost") != text(repeated, "book_keeping")


def test_the_loss_is_evaluated_once():
    """Both passes go back from what one forward pass leaves."""
    calls = []

    def loss(model, x):
        jax.debug.callback(lambda x: calls.append(x.shape), x[0, 0])
        return jnp.sum(jnp.tanh(x @ model["weight"][0]))

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method="ghost")
    jax.block_until_ready(jax.jit(grad_fn)(model(), jnp.ones((2, TOKENS, WIDTH))))
    jax.effects_barrier()
    assert len(calls) == 2
