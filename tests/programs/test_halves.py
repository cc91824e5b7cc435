"""A program in two halves: what it finds is the same, and little is left by the first half."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_dp.programs import equations, halved

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
WEIGHT = jnp.linspace(-2.0, 1.0, 12).reshape(3, 4)


def halves_of(function, *late):
    """Both halves of the program of a function of X and something that comes later, evaluated."""
    program = jax.make_jaxpr(function)(X, *late)
    halves = halved(program, [False, *[True] * len(late)])
    left = jex_core.jaxpr_as_fun(halves.first)(X)
    (found,) = jex_core.jaxpr_as_fun(halves.second)(*left, *late)
    np.testing.assert_allclose(found, function(X, *late), rtol=1e-6)
    return halves


def names(program):
    return [equation.primitive.name for equation in equations(program)]


def shapes_left(halves):
    return sorted(variable.aval.shape for variable in halves.first.jaxpr.outvars)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.04 * x**3)))


def plain(x, late):
    product = x @ WEIGHT
    return late * (gelu(product) + jnp.cos(product))


def of_several(x, late):
    """A sum of two products is as large as one of them: it is left, not they."""
    product = x @ WEIGHT + jnp.cos(x) @ WEIGHT
    return late * jnp.sin(product)


def normalised(x, late):
    product = x @ WEIGHT
    return late * (product - product.mean(1, keepdims=True)) * jnp.ones((2, 4))


def unused(x, late):
    jnp.sort(x @ WEIGHT)
    return late * x.sum()


def only_later(x, late):
    return jnp.sin(late) @ WEIGHT * x.sum()


LATE = jnp.full((2, 4), 0.5)
CASES = {
    "plain": (plain, LATE, [(2, 4)]),
    "of_several": (of_several, LATE, [(2, 4)]),
    "normalised": (normalised, LATE, [(2, 1), (2, 4)]),
    "unused": (unused, LATE, [()]),
    "only_later": (only_later, X, [()]),
}


@pytest.mark.parametrize("case", CASES)
def test_little_is_left_and_nothing_costly_is_done_again(case):
    function, late, left = CASES[case]
    halves = halves_of(function, late)
    found = [shape for shape in shapes_left(halves) if np.prod(shape) > 1 or shape == ()]
    squeezed = [tuple(n for n in shape if n > 1) for shape in found]
    assert squeezed == [tuple(n for n in shape if n > 1) for shape in left]
    assert names(halves.second).count("dot_general") == (case == "only_later")


@pytest.mark.parametrize("depth", [1, 3])
def test_a_call_is_divided_once(depth):
    """Of layers in a row each leaves its product, and all have the same two programs."""

    @jax.jit
    def layer(x):
        product = x @ WEIGHT @ WEIGHT.T
        return gelu(product), (jnp.cos(product), jnp.tanh(product), x)

    def function(x, late):
        beside = []
        for _ in range(depth):
            x, found = layer(x)
            beside.append(found)
        for cos, tanh, before in reversed(beside):
            late = late * cos * before + late * tanh
        return late

    halves = halves_of(function, X)
    # What goes into the first layer, and a product of each.
    assert shapes_left(halves) == [(2, 3)] * (depth + 1)
    assert "dot_general" not in names(halves.second)
    for half in halves:
        calls = [one for one in half.jaxpr.eqns if one.primitive.name in ("jit", "pjit")]
        assert len({id(one.params["jaxpr"]) for one in calls}) <= 2


def test_what_a_call_hands_on_is_left_once():
    @jax.jit
    def call(x):
        return x, jnp.sin(x), jnp.sort(x)

    def function(x, late):
        same, sin, ordered = call(x @ WEIGHT)
        return late * same * sin * ordered

    assert shapes_left(halves_of(function, LATE)) == [(2, 4), (2, 4)]
