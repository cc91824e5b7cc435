"""check_precision follows an un-noised sum that a step keeps into the next call."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_dp as dp
from eqx_dp.precision import stage
from tests import models
from tests.checks.test_precision import training_step

MIXED = dp.load_policy("mixed_bfloat16")
BF16, F32 = jnp.bfloat16, jnp.float32
X = jax.ShapeDtypeStruct((4, 3), F32)
LEAF = jax.ShapeDtypeStruct((3,), F32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def summed(x):
    with stage("sum"):
        return jnp.sum(x, 0)


def noise(key):
    return jax.random.normal(key, (3,))


def narrow(g):
    return g.astype(BF16).astype(F32)


def found(step, *args):
    report = dp.check_precision(step, *args, X, KEY, policy=MIXED)
    assert any("returned without noise" in note for note in report.notes)
    assert all("test_precision_state.py:" in row.where for row in report.violations)
    return {(row.stage, row.found) for row in report.violations}


class State(eqx.Module):
    weight: jax.Array
    total: jax.Array
    before: jax.Array


# Each step holds a sum back, and adds noise to it one call later, or two.


def in_a_tuple(change):
    def step(weight, total, x, key):
        return weight + change(total) + noise(key), summed(x)

    return step, LEAF, LEAF


def added_up(change):
    def step(weight, total, x, key):
        total = change(total) + summed(x)
        return weight + noise(key) + total, total

    return step, LEAF, LEAF


def in_one_tree(change):
    def step(state, x, key):
        return State(state.weight + change(state.total) + noise(key), summed(x), state.before)

    return step, State(LEAF, LEAF, LEAF)


def behind_a_loss(change):
    step, state = in_one_tree(change)
    return lambda state, x, key: (jnp.sum(x), step(state, x, key)), state


def two_calls_later(change):
    def step(state, x, key):
        weight = state.weight + change(state.before) + noise(key)
        return State(weight, summed(x), state.total)

    return step, State(LEAF, LEAF, LEAF)


def in_a_scan(change):
    step, state = in_one_tree(change)

    def steps(state, x, key):
        return jax.lax.scan(lambda state, x: (step(state, x, key), None), state, x[:, None])[0]

    return steps, state


@pytest.mark.parametrize(
    "held", [in_a_tuple, added_up, in_one_tree, behind_a_loss, two_calls_later, in_a_scan]
)
def test_a_sum_that_goes_narrow_in_a_later_call(held):
    assert found(*held(lambda g: g)) == set()
    assert found(*held(narrow)) == {("between clip and noise", "bfloat16")}


def test_a_sum_by_name():
    def step(weight, x, key, *, total):
        return {"weight": weight + narrow(total) + noise(key), "total": summed(x)}

    report = dp.check_precision(step, LEAF, X, KEY, total=LEAF, policy=MIXED)
    assert {row.found for row in report.violations} == {"bfloat16"}


def test_other_arguments_are_no_sums():
    """Neither what stands elsewhere nor what has another shape is taken for what comes back."""

    def step(weight, total, x, key):
        return narrow(weight) + total + noise(key), summed(x)

    assert found(step, LEAF, LEAF) == set()
    wide = jax.ShapeDtypeStruct((3,), jnp.float16)

    def other(total, x, key):
        return narrow(total) + noise(key), summed(x)

    assert found(other, wide) == set()


def test_no_alarm_on_a_gradient_that_is_returned():
    """It has the places of the parameters, which the loss computes with in bfloat16."""
    case = models.mlp()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, policy=MIXED)

    def step(params, *batch):
        return grad_fn(eqx.combine(params, case.model), *batch)

    params = eqx.filter(case.model, eqx.is_inexact_array)
    dp.check_precision(step, params, *case.batch(8), policy=MIXED).raise_if_violated()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.slow
def test_gradients_accumulated_by_optax(dtype):
    """`optax.MultiSteps` keeps an un-noised mean; here, before the noise."""
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=jax.random.key(0), policy=MIXED)
    several = optax.MultiSteps(optax.chain(privatizer, optax.adam(1e-3)), 4)

    def update(updates, state, params=None):
        kept = jax.tree.map(lambda x: x.astype(dtype).astype(F32), state.acc_grads)
        return several.update(updates, state._replace(acc_grads=kept), params)

    optimizer = optax.GradientTransformation(several.init, update)
    case = models.mlp()
    step = training_step(case, MIXED, noise=optimizer)
    report = dp.check_precision(*step, policy=MIXED)
    assert {row.found for row in report.violations} == ({"bfloat16"} if dtype == BF16 else set())
