"""The estimate of what a forward pass leaves for the backward pass.

It is a formula that has to agree with compilers, not with a definition: so it is tested as such.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqx_dp.gradients.activations import activation_bytes
from tests.gradients.engine.uses import traced

WEIGHT = jnp.ones((4, 4))
EXAMPLE = (jax.ShapeDtypeStruct((4,), jnp.float32),)


def held(fun, num_frozen=0):
    """Vectors that are held; the loss, a number, is linear."""

    def loss(weight, x):
        return jnp.sum(jnp.asarray(fun(weight, x)))

    program, _ = traced(loss, WEIGHT, True, EXAMPLE)
    return activation_bytes(program, 1 - num_frozen, num_frozen) / (4 * 4)


def layer(weight, x):
    return jnp.tanh(weight @ x)


def deep(layer, depth):
    def run(weight, x):
        for _ in range(depth):
            x = layer(weight, x)
        return x

    return run


@pytest.mark.parametrize(
    ("fun", "vectors"),
    [
        pytest.param(lambda w, x: w @ x, 0, id="the example itself"),
        pytest.param(lambda w, x: w @ (w @ x), 1, id="a factor of a product"),
        pytest.param(lambda w, x: w @ jnp.tanh(w @ x), 1, id="a result, once"),
        pytest.param(lambda w, x: jnp.sin(w @ x), 1, id="an operand"),
        pytest.param(lambda w, x: 3 * (w @ x) + x, 0, id="linear"),
        pytest.param(lambda w, x: (w @ x) * x, 0, id="times an example's own"),
        pytest.param(lambda w, x: (w @ x) * jnp.cos(x), 1, id="times a function of it"),
        pytest.param(lambda w, x: jnp.sin(1 + 2 * (w @ x)), 1, id="computed again"),
        pytest.param(lambda w, x: w @ (1 + 2 * (w @ x)), 1, id="computed, to be multiplied"),
        pytest.param(lambda w, x: w @ jax.nn.relu(w @ x), 2, id="both of them"),
        pytest.param(lambda w, x: jnp.sin((w @ x) + (w.T @ x)), 1, id="where two meet"),
        pytest.param(lambda w, x: jnp.sin((w @ x)[::-1].reshape(2, 2)), 1, id="rearranged"),
        pytest.param(lambda w, x: lax.stop_gradient(jnp.sin(w @ x)), 1, id="stopped behind it"),
        pytest.param(lambda w, x: jnp.sin(lax.stop_gradient(w @ x)), 0, id="stopped before"),
        pytest.param(lambda w, x: (w @ x) / (2 + jnp.sum(x)), 0, id="over an example's own"),
        pytest.param(lambda w, x: x / (w @ x), 2, id="a quotient"),
    ],
)
def test_what_derivatives_need(fun, vectors):
    assert held(fun) == vectors


def test_what_follows_from_parameters_alone_is_there_once():
    assert held(lambda weight, x: layer(jnp.tanh(weight) @ weight.T, x)) == held(layer) == 1


def test_a_frozen_matrix_needs_nothing_of_what_it_multiplies():
    assert held(deep(layer, 3)) == 3
    assert held(deep(layer, 3), num_frozen=1) == 0


def test_every_step_of_a_scan_counts():
    def scanned(length):
        return lambda w, x: lax.scan(lambda h, _: (layer(w, h), None), x, length=length)[0]

    # What each step starts from, and what it ends with.
    assert held(scanned(7)) == 7 * 2
    assert held(scanned(3)) == 3 * 2


def test_what_is_computed_again_is_held_for_one_layer_only():
    block = deep(layer, 3)
    again = jax.checkpoint(block)
    assert held(deep(block, 6)) == 18
    # What each block but the first is given, and what is within one.
    assert held(deep(again, 6)) == 5 + 3


def test_a_branch_that_depends_on_the_example_counts_by_what_comes_out():
    def branching(outputs):
        def branch(x):
            return tuple(x * n for n in range(1, outputs + 1))

        return lambda weight, x: lax.cond(x[0] > 0, branch, branch, weight @ x)[0]

    assert held(branching(3)) - held(branching(1)) == 2


def test_arrays_of_several_dtypes():
    half = lambda w, x: jnp.sin((w @ x).astype(jnp.bfloat16)).astype(jnp.float32)  # noqa: E731
    assert held(half) == 1
    keyed = lambda w, x: jnp.sin(w @ x) * jax.random.normal(jax.random.key(0), (4,))  # noqa: E731
    assert held(keyed) == 1
