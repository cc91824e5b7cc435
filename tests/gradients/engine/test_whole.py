"""Which parameters have no use that is known, why, and that they are right all the same."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests import models
from tests.gradients.engine import agreement, uses


@jax.custom_vjp
def doubled(w, x):
    return 2 * w * x


doubled.defvjp(lambda w, x: (doubled(w, x), (w, x)), lambda kept, g: (2 * g * kept[1], g * kept[0]))


@jax.custom_jvp
def tripled(w, x):
    return 3 * w * x


tripled.defjvps(lambda d, out, w, x: 3 * d * x, lambda d, out, w, x: 3 * w * d)


def in_cond(w, x):
    return jnp.sin(lax.cond(x[0] > 0, lambda: w["a"] * x, lambda: x))


def in_while(w, x):
    _, y = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.cos(s[1] * w["a"])), (0, x))
    # A while loop has no gradient: what it says is used, not what it could teach.
    return x * w["a"] + lax.stop_gradient(y)


CASES = {
    "cond": (in_cond, "no kind of use knows 'cond'"),
    "while": (in_while, "no kind of use knows 'while'"),
    "nonlinear": (lambda w, x: jnp.exp(w["a"]) * x, "no kind of use knows 'exp'"),
    "power": (lambda w, x: w["a"] ** 2 * x, "no kind of use knows 'integer_pow'"),
    "custom_vjp": (lambda w, x: doubled(w["a"], x), "no kind of use knows 'custom_vjp_call'"),
    "custom_jvp": (lambda w, x: tripled(w["a"], x), "no kind of use knows 'custom_jvp_call'"),
    "stopped": (
        lambda w, x: w["a"] * x + lax.stop_gradient(w["a"]) * x**2,
        "no kind of use knows 'stop_gradient'",
    ),
    "concatenated": (
        lambda w, x: jnp.sin(jnp.concatenate([w["a"], x])),
        "no kind of use knows 'concatenate'",
    ),
    "squared": (lambda w, x: w["a"] * w["a"] * x, "it meets another parameter"),
    "carried": (
        lambda w, x: lax.scan(lambda c, x: (jnp.sin(c + x), None), w["a"], x[None])[0],
        "a scan carries it",
    ),
    "returned by a scan": (
        lambda w, x: x @ lax.scan(lambda c, x: (c, w["a"]), 0.0, x)[1],
        "a scan returns it",
    ),
    "leaves a checkpoint": (
        lambda w, x: jax.checkpoint(lambda w: w)(w["a"]) * x,
        "it leaves a jax.checkpoint",
    ),
}


def case_of(use):
    """Beside the leaf in question, one that is used as usual, and one that is not used."""

    def loss(model, x):
        y = use(model, x) + jnp.zeros_like(x[:1])
        return jnp.sum((1 + jnp.arange(y.size)) * y) + jnp.sum(jnp.sin(model["b"] * x))

    numbers = jnp.array([0.4, -0.7, 1.1])
    model = {"a": numbers, "b": jnp.cos(numbers), "unused": jnp.ones(2)}
    return models.Case("one leaf", model, loss, draw)


def draw(rng, size):
    return (jnp.asarray(rng.normal(size=(size, 3)), jnp.float32),)


@pytest.mark.parametrize("name", CASES)
def test_reasons(name):
    use, reason = CASES[name]
    case = case_of(use)
    assert uses.whole(case) == {"['a']": reason}
    assert uses.kinds(case)["['b']"] == ["scale"]
    assert uses.kinds(case)["['unused']"] == []


RIGHT = ("cond", "while", "custom_vjp", "stopped", "carried")


@pytest.mark.parametrize("name", RIGHT)
def test_whole_is_right(name):
    agreement.check(case_of(CASES[name][0]), by_leaf=True)


def test_the_loss_itself():
    case = models.Case("itself", jnp.array([0.4, 2.0]), lambda w, x: w[1], draw)
    assert uses.whole(case) == {"": "it is a result of the loss itself"}
    agreement.check(case)


def test_two_parameters_that_meet():
    case = case_of(lambda w, x: (w["a"] * w["b"]) * x)
    reason = "it meets another parameter"
    assert uses.whole(case) == {"['a']": reason, "['b']": reason}
    agreement.check(case, by_leaf=True)


def test_a_leaf_is_whole_if_any_use_is():
    def use(w, x):
        return w["a"] * x + jnp.exp(w["a"])

    assert uses.whole(case_of(use)) == {"['a']": "no kind of use knows 'exp'"}
    assert uses.kinds(case_of(use))["['a']"] == []
    agreement.check(case_of(use), by_leaf=True)


def test_data_in_cond_and_custom_rules_is_no_reason():
    """Only the parameter itself must stay out of them."""

    def use(w, x):
        y = jax.nn.relu(w["a"] * x)
        y = lax.cond(y[0] > 0, jnp.sin, jnp.cos, y)
        y = doubled(y, x)
        return w["a"] * lax.fori_loop(0, 2, lambda i, y: jnp.tanh(y), y)

    case = case_of(use)
    assert uses.whole(case) == {}
    assert uses.kinds(case)["['a']"] == ["scale", "scale"]
    agreement.check(case, by_leaf=True)


def test_through_jit_and_named_functions():
    @jax.jit
    def inner(w, x):
        return eqx.filter_jit(lambda v: v.T)(w), x

    def use(w, x):
        a, y = inner(w["a"][:, None], x)
        return (a * y).ravel()

    assert uses.whole(case_of(use)) == {}
    assert uses.kinds(case_of(use))["['a']"] == ["scale"]
