"""check_precision: parameters are stored in the dtype that the policy declares."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp
from tests import models

MIXED, NARROW = dp.load_policy("mixed_bfloat16"), dp.load_policy("bfloat16")
BF16, F32 = jnp.bfloat16, jnp.float32


def kept(policy, dtype, store, filter_spec=eqx.is_inexact_array):
    """Checks a step on a model of some dtype; it returns an average and gradients as well."""
    grad_fn = dp.filter_clipped_grad(
        models.mlp_loss, l2_clip_norm=1.0, policy=policy, filter_spec=filter_spec
    )
    noise = dp.gaussian_privatizer(stddev=1.0, policy=policy)

    @eqx.filter_jit
    def step(model, average, state, *batch):
        grads, state = noise.update(grad_fn(model, *batch), state)
        after = store(eqx.apply_updates(model, grads), dtype)
        average = jax.tree.map(lambda a, p: a + p.astype(a.dtype), average, weights(after))
        return after, average, state, grads

    def weights(model):
        return eqx.filter(model, eqx.is_inexact_array)

    def start(model):
        average = jax.tree.map(lambda x: x.astype(F32), weights(model))
        return model, average, noise.init(grad_fn.trainable(model))

    model = eqx.filter_eval_shape(cast, models.mlp().model, dtype)
    arguments = *eqx.filter_eval_shape(start, model), *models.mlp().batch(4)
    return dp.check_precision(step, *arguments, policy=policy)


def cast(model, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)


@pytest.mark.parametrize(
    ("policy", "given", "store", "stored"),
    [
        (NARROW, F32, cast, "float32"),
        (NARROW, BF16, lambda model, dtype: model, "float32"),  # eqx.apply_updates widens it
        (MIXED, BF16, cast, "bfloat16"),
        (MIXED, jnp.float16, cast, "float16"),
    ],
)
def test_parameters_stored_in_another_dtype_than_declared(policy, given, store, stored):
    (found,) = kept(policy, given, store).violations
    assert found[:3] == ("stored parameters", str(policy.param_dtype), stored)
    assert found.where == "the result[0].layers[0].weight and 5 more"


@pytest.mark.parametrize(("policy", "dtype"), [(NARROW, BF16), (MIXED, F32)])
def test_no_alarm_on_what_is_stored_as_declared(policy, dtype):
    """The average and the gradients are float32, and made of parameters or like them."""
    kept(policy, dtype, cast).raise_if_violated()
    rules = (dp.ModuleRule("layers.0", F32),)  # of computing, not of storing
    kept(dataclasses.replace(policy, modules=rules), dtype, cast).raise_if_violated()
