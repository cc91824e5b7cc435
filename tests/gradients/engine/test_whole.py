"""What makes a parameter be differentiated as a whole, and what does not."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from tests import models
from tests.gradients.engine import agreement


@jax.custom_vjp
def doubled(w, x):
    return 2 * w * x


doubled.defvjp(lambda w, x: (doubled(w, x), (w, x)), lambda kept, g: (2 * g * kept[1], g * kept[0]))


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


def test_the_loss_itself():
    case = models.Case("itself", jnp.array([0.4, 2.0]), lambda w, x: w[1], draw)
    agreement.check(case)


def test_data_in_cond_and_custom_rules_is_no_reason():
    """Only the parameter itself must stay out of them."""

    def use(w, x):
        y = jax.nn.relu(w["a"] * x)
        y = lax.cond(y[0] > 0, jnp.sin, jnp.cos, y)
        y = doubled(y, x)
        return w["a"] * lax.fori_loop(0, 2, lambda i, y: jnp.tanh(y), y)

    case = case_of(use)
    agreement.check(case, by_leaf=True)


def test_through_jit_and_named_functions():
    @jax.jit
    def inner(w, x):
        return eqx.filter_jit(lambda v: v.T)(w), x

    def use(w, x):
        a, y = inner(w["a"][:, None], x)
        return (a * y).ravel()
