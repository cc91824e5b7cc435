"""What is equal is traced once: tracing a deeper model makes no more leaf programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from equinox import nn

import eqx_dp as dp
from eqx_dp.gradients import leaves

WIDTH = 13  # of no other test, whose traces would be found


def trace(method, depth, width=WIDTH):
    """Traces the clipped gradient of a network of equal layers that see three steps."""
    model = nn.MLP(width, width, width, depth, key=jax.random.key(0))

    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method=method)
    params, static = eqx.partition(model, eqx.is_array)
    jitted = jax.jit(lambda params, x: grad_fn(eqx.combine(params, static), x))
    return jitted.trace(params, jnp.ones((2, 3, width)))


@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
def test_equal_leaves_are_traced_once(method, monkeypatch):
    traced = []
    for name in ("_factored",):
        whole = getattr(leaves, name)
        monkeypatch.setattr(
            leaves, name, lambda *args, whole=whole: traced.append(args[0]) or whole(*args)
        )
    trace(method, depth=1)
    assert traced
    few = len(traced)
    trace(method, depth=6)
    assert len(traced) == few
    trace(method, depth=1, width=WIDTH + 4)
    assert len(traced) > few


@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
def test_a_jitted_function_is_evaluated_once(method):
    """Its uses are in it: the call stays a call, and equal calls have one body."""

    @jax.jit
    def layer(weight, x):
        return jnp.tanh(x @ weight)

    def loss(weights, x):
        for weight in weights:
            x = layer(weight, x)
        return jnp.sum(x)

    def lines(depth):
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method=method)
        weights = [jnp.eye(5) for _ in range(depth)]
        text = jax.jit(grad_fn).lower(weights, jnp.ones((2, 5))).as_text()
        return text.count("stablehlo.tanh")

    assert lines(6) == lines(3)
