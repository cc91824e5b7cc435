"""The estimate of what a forward pass leaves for the backward pass."""

import jax
import jax.numpy as jnp
import pytest

from eqx_dp.gradients.activations import activation_bytes
from tests.gradients.engine.uses import traced

WEIGHT = jnp.ones((4, 4))
EXAMPLE = (jax.ShapeDtypeStruct((4,), jnp.float32),)
_VECTOR = 4 * 4


def held(fun):
    """Bytes of all results that count: the estimate says that a third of them is held."""
    program, _ = traced(lambda weight, x: fun(weight, x)[0], WEIGHT, True, EXAMPLE)
    return 3 * activation_bytes(program, 1)


def difference(fun, other):
    return held(fun) - held(other)


def layer(weight, x):
    return jnp.tanh(weight @ x)


def test_what_follows_from_parameters_alone_is_there_once():
    heavy = lambda weight, x: layer(jnp.tanh(weight) @ weight.T, x)  # noqa: E731
    assert difference(heavy, layer) == pytest.approx(0, abs=3)


def test_every_step_of_a_scan_counts():
    def scanned(length):
        return lambda w, x: jax.lax.scan(lambda h, _: (layer(w, h), None), x, length=length)[0]

    assert difference(scanned(7), scanned(3)) == pytest.approx(4 * 2 * _VECTOR, abs=3)


def test_what_is_computed_again_is_held_for_one_layer_only():
    def deep(layer, depth=6):
        def run(weight, x):
            for _ in range(depth):
                x = layer(weight, x)
            return x

        return run

    block = lambda w, x: layer(w, layer(w, layer(w, x)))  # noqa: E731
    again = jax.checkpoint(block)
    # Six results, and the six within one block, instead of six within each of the blocks.
    assert held(deep(block)) == pytest.approx(36 * _VECTOR + held(lambda w, x: x), abs=3)
    assert held(deep(again)) == pytest.approx(12 * _VECTOR + held(lambda w, x: x), abs=3)


def test_a_branch_that_depends_on_the_example_counts_by_what_comes_out():
    def branching(outputs):
        def branch(x):
            return tuple(x * n for n in range(1, outputs + 1))

        return lambda weight, x: jax.lax.cond(x[0] > 0, branch, branch, x)[0]

    assert difference(branching(3), branching(1)) == pytest.approx(2 * _VECTOR, abs=3)
