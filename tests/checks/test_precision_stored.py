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
    options = {"l2_clip_norm": 1.0, "policy": policy, "filter_spec": filter_spec}
    grad_fn = dp.filter_clipped_grad(models.mlp_loss, **options)
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


ROUNDED = dp.parse_policy("p=bf16,c=bf16,rounding=stochastic,module:layers.0=bf16:params=f32")
KEYS = {
    "nearest": (lambda root, count: None, "rounded without random bits"),
    "one key": (lambda root, count: jax.random.key(0), "the same random bits in each step"),
    "one root": (lambda root, count: root, "the same random bits in each step"),
    "a key of each step": (jax.random.fold_in, None),
}


@pytest.mark.parametrize(("key_of", "how"), KEYS.values(), ids=KEYS)
def test_stochastic_rounding_is_done_with_another_key_in_each_step(key_of, how):
    grad_fn = dp.filter_clipped_grad(models.mlp_loss, l2_clip_norm=1.0, policy=ROUNDED)

    def step(model, state, root, count, *batch):
        noisy, state = dp.add_noise(grad_fn(model, *batch), state, 1.0)
        key = key_of(root, count)
        policy = ROUNDED if key is not None else dataclasses.replace(ROUNDED, rounding="nearest")
        return dp.apply_updates(model, noisy, policy, key=key), state, root, count + 1

    model, batch = ROUNDED.cast_to_param(models.mlp().model), models.mlp().batch(4)
    args = model, dp.noise_stream(), jax.random.key(1), jnp.zeros((), int), *batch
    rows = dp.check_precision(step, *args, policy=ROUNDED).violations
    expected = [("stored parameters", "rounding stochastic", how)] if how else []
    assert [row[:3] for row in rows] == expected


class Norm(eqx.Module):
    """A norm layer whose code undoes the rule that says float32."""

    weight: jax.Array
    dtype: type = eqx.field(static=True)

    def __call__(self, x):
        x = x.astype(self.dtype)
        return (x * jax.lax.rsqrt(jnp.sum(x * x) + 1e-3)).astype(BF16) * self.weight


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_rule_of_float32_that_the_code_undoes(dtype):
    policy = dataclasses.replace(MIXED, modules=(dp.ModuleRule("norm", F32),))
    model = {"norm": Norm(jnp.ones(6), dtype), "head": eqx.nn.Linear(6, 2, key=jax.random.key(0))}
    loss = lambda model, x: jnp.sum(model["head"](model["norm"](x)) ** 2)  # noqa: E731
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, policy=policy)

    def step(model, state, x):
        return dp.add_noise(grad_fn(model, x), state, 1.0)

    rows = dp.check_precision(step, model, dp.noise_stream(), jnp.ones((4, 6)), policy=policy)
    expected = {"rsqrt of bfloat16, narrower"} if dtype is BF16 else set()
    assert {row.found for row in rows.violations} == expected
