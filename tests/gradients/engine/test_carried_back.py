"""What a parameter is used for without a gradient coming back to it is no use of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqx_dp as dp
from tests import models, oracle
from tests.gradients.engine import agreement, uses
from tests.gradients.engine.kinds import check, examples, normal


def steps_counted(w, x):
    """A while loop has no gradient backwards: what it says is used, not what it could teach."""
    _, y = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.cos(s[1] * w)), (0, x))
    return w * x + lax.stop_gradient(y)


def carried_beside(w, x):
    """A scan that carries the parameter for what no gradient comes from."""

    def step(carry, now):
        state, seen, turned = carry
        return (jnp.sin(state * w + now), jnp.sign(turned) + seen, -turned), jnp.argmax(seen)

    (state, seen, turned), at = lax.scan(step, (x[0], x[0], w), x)
    return state + lax.stop_gradient(seen + turned) + at.sum()


def one_branch_is_flat(w, x):
    y = lax.cond(x[0] > 0, lambda w: jnp.floor(w * 3), jnp.zeros_like, w)
    return w * x + lax.stop_gradient(lax.cond(x[0] > 0, jnp.sin, jnp.cos, w)) + y


NO_USE = {
    "stop_gradient": lambda w, x: w * x + lax.stop_gradient(jnp.exp(w) @ x) * x,
    "compared": lambda w, x: w * x + jnp.where(jnp.exp(w) > x, x, 2 * x),
    "argmax": lambda w, x: w * x + jnp.argmax(w**2 * x),
    "rounded": lambda w, x: w * x + jnp.round(w * x) + jnp.floor(w**2) + jnp.sign(w),
    "steps_counted": steps_counted,
    "carried_beside": carried_beside,
    "one_branch_is_flat": one_branch_is_flat,
    "not_used": lambda w, x: jax.jit(lambda w, x: (jnp.exp(w) * x, w * x))(w, x)[1],
    "cast": lambda w, x: w * x + (1000 * w * x).astype(int),
    "in_checkpoint": lambda w, x: jax.checkpoint(lambda w: w * x + (jnp.exp(w) > x))(w),
}


@pytest.mark.parametrize("name", NO_USE)
def test_no_use(name):
    data = examples(2, 3) if name == "carried_beside" else examples(3)
    check(NO_USE[name], normal(3), data, kinds=["scale"], ghost=False)


def test_nothing_comes_back():
    """The loss depends on the parameter, and not so that there is a gradient."""

    def loss(model, x):
        y = x * jnp.round(jnp.exp(model["a"])) + lax.stop_gradient(model["a"])
        return jnp.sum(y * model["b"])

    model = {"a": jnp.array([0.4, -0.7, 1.1]), "b": jnp.ones(3)}
    case = models.Case("flat", model, loss, draw)
    assert uses.whole(case) == {}
    assert uses.kinds(case) == {"['a']": [], "['b']": ["scale"]}
    agreement.check(case)


def test_what_a_loop_brings_back_a_step_later():
    """The first result of the body goes nowhere itself, but into the second at the next step."""

    def use(w, x):
        def step(carry, now):
            kept, state = carry
            return (jnp.sin(w * now), state + kept), None

        return lax.scan(step, (x[0], x[0]), x)[0][1]

    check(use, normal(3), examples(3, 3), kinds=["scale"], ghost=False)


def test_a_parameter_in_aux_alone():
    """Only the loss has a gradient."""

    def loss(model, x):
        y = jnp.sin(model["a"] * x)
        return jnp.sum(y * x), {"a": model["a"], "seen": jnp.exp(model["b"]) * x}

    model = {"a": jnp.array([0.4, -0.7, 1.1]), "b": jnp.ones(3)}
    batch = models.Case("aux", model, lambda model, x: loss(model, x)[0], draw).batch(3)
    truth = oracle.clipped_gradients(
        lambda model, x: loss(model, x)[0], model, *batch, l2_clip_norm=1.0
    )
    for method in agreement.METHODS:
        grad_fn = dp.filter_value_and_clipped_grad(
            loss, l2_clip_norm=1.0, has_aux=True, method=method
        )
        per_example, grads = uses.freshly_jitted(grad_fn, model)(*batch)
        assert oracle.relative_error(grads, truth.grads) < 1e-5
        assert oracle.relative_error(per_example.aux["a"][1], model["a"]) == 0
    _, found = uses.traced(
        lambda model, x: loss(model, x)[0], model, True, (jax.ShapeDtypeStruct((3,), float),)
    )
    assert found.whole == {}


def draw(rng, size):
    return (jnp.asarray(rng.normal(size=(size, 3)), jnp.float32),)
