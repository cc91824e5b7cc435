"""Losses that constrain shardings, unmodified: the gradient, and what a device does for it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.compiled import compiled
from tests.sharding.losses import (
    GPT,
    Says,
    gpt_rules,
    language_loss,
    mean_estimation,
    mesh_of,
    tokens,
)

pytestmark = pytest.mark.sampled(4)

METHODS = ["book_keeping", "ghost", "per_example"]
KINDS = ["auto", "explicit"]
DATA = np.random.default_rng(0).normal(size=1024).astype(np.float32)


def assert_close(found, expected, atol=2e-6):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=1e-5)


# Mean estimation: the loss that is known to break.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["input", "intermediate"])
@pytest.mark.parametrize("method", METHODS)
def test_without_clipping_it_is_the_plain_gradient(kind, where, method):
    mesh, param = mesh_of(kind, data=8), jnp.float32(0.3)
    rules = dp.ShardingRules(mesh)
    grad_fn = dp.filter_clipped_grad(
        mean_estimation(Says(kind), where),
        l2_clip_norm=np.inf,
        normalize_by=1024,
        keep_batch_dim=True,
        sharding=rules,
        method=method,
    )
    plain = jax.grad(lambda param: 0.5 * jnp.mean((DATA.astype(np.float64) - param) ** 2))
    with jax.set_mesh(mesh):
        data = rules.shard_batch(DATA)
        for call in (grad_fn, eqx.filter_jit(grad_fn)):
            np.testing.assert_allclose(call(param, data), plain(param), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scalar_per_example_costs_a_device_its_part(kind):
    mesh, param = mesh_of(kind, data=8), jnp.float32(0.3)
    rules = dp.ShardingRules(mesh)

    def cost(says):
        grad_fn = dp.filter_clipped_grad(
            mean_estimation(says, "intermediate"),
            l2_clip_norm=1.0,
            keep_batch_dim=True,
            sharding=rules,
        )
        return compiled(grad_fn, param, rules.shard_batch(DATA))

    with jax.set_mesh(mesh):
        constrained, free = cost(Says(kind)), cost(Says(kind, constrained=False))
    one = compiled(
        dp.filter_clipped_grad(
            mean_estimation(Says("auto", False), "input"), l2_clip_norm=1.0, keep_batch_dim=True
        ),
        param,
        DATA,
    )
    assert constrained.flops <= 1.1 * free.flops
    assert constrained.temporary_bytes <= 1.2 * free.temporary_bytes
    assert constrained.flops <= 1.3 * one.flops / 8


def test_a_sharding_of_the_mesh_itself_without_a_mesh_in_context():
    mesh = mesh_of("auto", data=8)
    rules = dp.ShardingRules(mesh)

    def loss(param, data):
        data = jax.lax.with_sharding_constraint(data, NamedSharding(mesh, P("data")))
        return 0.5 * jnp.mean((data - param) ** 2)

    grad_fn = dp.filter_clipped_grad(
        loss, l2_clip_norm=np.inf, normalize_by=1024, keep_batch_dim=True, sharding=rules
    )
    expected = 0.3 - DATA.astype(np.float64).mean()
    np.testing.assert_allclose(grad_fn(jnp.float32(0.3), DATA), expected, rtol=1e-5)


# A GPT on 4 x 2 devices.


def gpt_grad_fn(rules, method="auto", **options):
    return dp.filter_value_and_clipped_grad(
        language_loss,
        l2_clip_norm=0.5,
        keep_batch_dim=True,
        sharding=rules,
        method=method,
        **options,
    )


def assert_like_one_device(found, expected, model):
    """Values and gradients of one device, gradients where their parameters are."""
    (per_example, grads), (expected_values, expected_grads) = found, expected
    assert_close(grads, expected_grads)
    assert_close(per_example, expected_values)
    assert per_example.loss.sharding.spec[0] == "data"
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(model), strict=True):
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim)


@pytest.mark.slow
def test_a_gpt_with_its_layers_in_a_list():
    """What a device does for it, and other ways: `examples/sharded_loss.py` and its test."""
    mesh = mesh_of("explicit", data=4, model=2)
    rules = gpt_rules(mesh)
    free = GPT(Says("auto", False), depth=1)
    expected = eqx.filter_jit(gpt_grad_fn(None, "per_example"))(free, *tokens(16))
    with jax.set_mesh(mesh):
        model = rules.shard(GPT(Says("explicit"), depth=1))
        grad_fn = gpt_grad_fn(rules, "ghost", microbatch_size=2)
        found = eqx.filter_jit(grad_fn)(model, *rules.shard_batch(tokens(16)))
    assert_like_one_device(found, expected, model)


@pytest.mark.exhaustive
def test_a_gpt_with_its_layers_under_scan_and_remat():
    mesh, batch = mesh_of("auto", data=4, model=2), tokens(16)
    rules = gpt_rules(mesh, is_stacked=True)

    def program(says, rules):
        model, spread = GPT(says, is_stacked=True), batch
        if rules is not None:
            model, spread = rules.shard(model), rules.shard_batch(batch)
        return compiled(gpt_grad_fn(rules, "ghost"), model, *spread), (model, *spread)

    one, on_one = program(Says("auto", False), None)
    with jax.set_mesh(mesh):
        free, _ = program(Says("auto", constrained=False), rules)
        constrained, on_mesh = program(Says("auto"), rules)
        assert_like_one_device(constrained.program(*on_mesh), one.program(*on_one), on_mesh[0])
    assert constrained.flops <= 1.1 * free.flops
    assert constrained.temporary_bytes <= 1.2 * free.temporary_bytes
    assert constrained.flops <= 1.3 * one.flops / 8
