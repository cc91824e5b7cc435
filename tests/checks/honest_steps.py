"""Training steps that are differentially private as their plan says, each by another idea."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from dp_accounting import NeighboringRelation
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.checks.privacy_steps import (
    CLASSES,
    EXPECTED,
    NUM_EXAMPLES,
    OPTIMIZER,
    PLAN,
    SECRET,
    SLOTS,
    STDDEV,
    WIDTH,
    State,
    added,
    beside,
    by_hand,
    clipped,
    data,
    dropout_loss,
    first_state,
    listed,
    made,
    mlp,
    next_key,
    noised_by,
    scaled,
    sliced,
    squared_error,
    updated,
    with_noise,
)
from tests.sharding.losses import mesh_of

HONEST = {}
honest = listed(HONEST)
MULTIPLIER = PLAN.noise_multiplier


# make_step in its forms.


@honest
def method_auto():
    return made()


@honest
def method_book_keeping():
    return made(method="book_keeping")


@honest
def method_ghost():
    return made(method="ghost")


@honest
def method_per_example():
    return made(method="per_example")


@honest
def microbatches_of_one():
    return made(microbatch_size=1)


@honest
def microbatches_of_two():
    return made(microbatch_size=2)


@honest
def microbatches_that_do_not_divide_the_batch():
    return made(microbatch_size=3, method="book_keeping")


@honest
def policy_float32():
    return made(policy=dp.load_policy("float32"))


@honest
def policy_mixed_bfloat16():
    return made(policy=dp.load_policy("mixed_bfloat16"))


@honest
def policy_mixed_float16():
    return made(policy=dp.load_policy("mixed_float16"))


@honest
def policy_bfloat16():
    policy = dp.load_policy("bfloat16")
    return made(policy=policy, model=policy.cast_to_param(mlp()))


@honest
def loss_with_keys():
    return made(dropout_loss)


@honest
def loss_with_keys_in_microbatches():
    return made(dropout_loss, microbatch_size=2)


def batch_loss(model, x, y):
    return jnp.mean(jnp.sum((jax.vmap(model)(x) - y) ** 2, axis=-1))


@honest
def loss_of_a_batch():
    return made(batch_loss, keep_batch_dim=True)


@honest
def loss_disclosed():
    return made(disclose=("loss",))


@honest
def all_disclosed_that_can_be():
    return made(disclose=("loss", "grad_norm", "num_examples"))


@honest
def rescaled_to_unit_norm():
    return made(l2_clip_norm=0.1, rescale_to_unit_norm=True)


def clip_norms_by_layer(model):
    """As a tree prefix: another clip norm for each layer."""
    prefix = jax.tree.map(lambda _: None, model)
    return eqx.tree_at(lambda m: m.layers, prefix, (0.5, 2.0), is_leaf=lambda x: x is None)


@honest
def clip_norms_of_layers():
    return made(l2_clip_norm=clip_norms_by_layer(mlp()))


@honest
def frozen_first_layer():
    spec = jax.tree.map(lambda _: False, mlp())
    spec = eqx.tree_at(lambda m: (m.layers[-1].weight, m.layers[-1].bias), spec, (True, True))
    return made(filter_spec=spec)


class LoRA(eqx.Module):
    """A linear layer, and beside it a product of two thin matrices."""

    base: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __call__(self, x):
        return self.base(x) + self.up @ (self.down @ x)


def lora():
    base = eqx.nn.Linear(WIDTH, CLASSES, key=jax.random.key(0))
    return LoRA(base, jax.random.normal(jax.random.key(1), (1, WIDTH)), jnp.zeros((CLASSES, 1)))


def adapters(model):
    spec = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: (m.down, m.up), spec, (True, True))


@honest
def lora_made():
    return made(model=lora(), filter_spec=adapters(lora()))


@honest
def optimizer_sgd_with_momentum():
    return made(optimizer=optax.sgd(0.1, momentum=0.9, nesterov=True))


@honest
def optimizer_adamw_with_schedule():
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return made(optimizer=optax.adamw(rate, weight_decay=0.1))


@honest
def optimizer_lion():
    return made(optimizer=optax.lion(1e-3))


@honest
def optimizer_prodigy():
    return made(optimizer=optax.contrib.prodigy(1.0))


@honest
def optimizer_schedule_free():
    return made(optimizer=optax.contrib.schedule_free(optax.adam(1e-2), 1e-2))


@honest
def optimizer_chain_with_decay_and_clip():
    return made(
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)
        )
    )


@honest
def optimizer_that_reads_a_public_value():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    return made(optimizer=optax.chain(optax.sgd(1e-2), plateau), extra={"value": 0.5})


@honest
def optimizer_multi_steps():
    return made(optimizer=optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation())


@honest
def optimizer_that_skips_what_is_not_finite():
    return made(optimizer=optax.apply_if_finite(optax.adam(1e-2), 2))


def sharded(kind, **more):
    rules = dp.ShardingRules(
        mesh_of(kind, data=4, model=2), params=(("**.weight", P("model", None)),)
    )
    return made(sharding=rules, **more)


@honest
def sharded_on_auto_axes():
    return sharded("auto")


@honest
def sharded_on_explicit_axes():
    return sharded("explicit")


@honest
def sharded_in_microbatches_of_bfloat16():
    return sharded("auto", microbatch_size=1, policy=dp.load_policy("mixed_bfloat16"))


def plan_under(relation, **more):
    return dp.PrivacyPlan(
        **{
            "sampling_prob": 0.5,
            "steps": 10,
            "noise_multiplier": 1.2,
            "delta": 1e-5,
            "neighboring_relation": relation,
            **more,
        }
    )


@honest
def replace_one():
    return made(plan=plan_under(NeighboringRelation.REPLACE_ONE))


@honest
def replace_special():
    return made(plan=plan_under(NeighboringRelation.REPLACE_SPECIAL))


@honest
def all_examples_in_every_step():
    plan = plan_under(NeighboringRelation.ADD_OR_REMOVE_ONE, sampling_prob=1.0)
    return made(plan=plan, method="per_example")


@honest
def another_run_of_one_seed():
    case = made()
    return case._replace(fn=case.fn.for_run("second"))
