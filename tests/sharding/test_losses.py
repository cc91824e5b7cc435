"""Losses that constrain shardings, unmodified: the gradient, and what a device does for it."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests import oracle
from tests.sharding.losses import mesh_of
from tests.test_examples import load
from tests.tiers import curated

example = load("sharded_loss")

KINDS = {"auto": example.AUTO, "explicit": example.EXPLICIT}
MEANS = {
    "ghost": example.mean_of_constrained_data,
    "per_example": example.mean_with_constrained_residual,
}
DATA = np.random.default_rng(0).normal(size=1024).astype(np.float32)
MEAN = {"l2_clip_norm": np.inf, "normalize_by": 1024, "keep_batch_dim": True}


# Mean estimation: the loss that is known to break.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", MEANS)
def test_without_clipping_it_is_the_plain_gradient(kind, method):
    mesh, param = mesh_of(kind, data=8), jnp.float32(0.3)
    rules, loss = dp.ShardingRules(mesh), functools.partial(MEANS[method], KINDS[kind])
    grad_fn = dp.filter_clipped_grad(loss, sharding=rules, method=method, **MEAN)
    plain = float(param) - DATA.astype(np.float64).mean()
    with jax.set_mesh(mesh):
        data = rules.shard_batch(DATA)
        for call in (grad_fn, eqx.filter_jit(grad_fn)):
            np.testing.assert_allclose(call(param, data), plain, rtol=1e-6)


def test_a_sharding_of_the_mesh_itself_without_a_mesh_in_context():
    mesh = mesh_of("auto", data=8)

    def loss(param, data):
        data = jax.lax.with_sharding_constraint(data, NamedSharding(mesh, P("data")))
        return 0.5 * jnp.mean((data - param) ** 2)

    grad_fn = dp.filter_clipped_grad(loss, sharding=dp.ShardingRules(mesh), **MEAN)
    expected = 0.3 - DATA.astype(np.float64).mean()
    np.testing.assert_allclose(grad_fn(jnp.float32(0.3), DATA), expected, rtol=1e-5)


# The example's GPT on 4 x 2 devices: a list of layers, or layers under scan and remat.


class Scanned(eqx.Module):
    """In the place of a layer: some, whose arrays are stacked."""

    layers: example.Block

    def __call__(self, x, sharding):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        body = jax.checkpoint(lambda x, layer: (eqx.combine(layer, static)(x, sharding), None))
        return jax.lax.scan(body, x, arrays)[0]


def gpt(is_stacked):
    """The model, and rules for its parameters."""
    model, params = example.GPT(jax.random.key(0)), example.GPT_PARAMS
    if is_stacked:
        layers = eqx.filter_vmap(example.Block)(jax.random.split(jax.random.key(1)))
        model = eqx.tree_at(lambda m: m.blocks, model, [Scanned(layers)])
        params = [(name.replace("*", "*.layers"), P(None, *spec)) for name, spec in params]
    return model, tuple(params)


# Parameters that are spread over devices have one scale each.
FLOAT8 = dp.Policy(
    "float32", "float32", "float32", matmul=dp.Matmul("float8_e4m3fn", "float8_e5m2")
)
GPTS = {
    "list": ("explicit", False, {"method": "ghost", "microbatch_size": 2}),
    "scan": ("auto", True, {"method": "ghost"}),
    "explicit scan": ("explicit", True, {"method": "book_keeping"}),
    "float8": ("explicit", False, {"method": "per_example", "policy": FLOAT8}),
    "auto float8": ("auto", False, {"method": "ghost", "policy": FLOAT8}),
}


@pytest.mark.parametrize("name", curated(GPTS, (), every=2))
def test_a_gpt(name):
    """Values and gradients of one device, gradients where their parameters are.

    What a device does for it is held in `examples/sharded_loss.py` and its test.
    """
    kind, is_stacked, options = GPTS[name]
    options = {"l2_clip_norm": 0.5, "keep_batch_dim": True} | options
    (model, params), mesh = gpt(is_stacked), mesh_of(kind, data=4, model=2)
    rules, batch = dp.ShardingRules(mesh, params=params), example.make_cases()[-1].batch

    def gradient(says, **its):
        loss = functools.partial(example.next_token_loss, says)
        return eqx.filter_jit(dp.filter_value_and_clipped_grad(loss, **options, **its))

    expected = gradient(example.SILENT)(model, *batch)
    with jax.set_mesh(mesh):
        model = rules.shard(model)
        found = gradient(KINDS[kind], sharding=rules)(model, *rules.shard_batch(batch))
    # A sum over devices may round an operand in 8 bits the other way.
    tolerance = 1e-3 if "policy" in options else 1e-5 + oracle.room(16)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)
    assert found[0].loss.sharding.spec[0] == "data"
    for grad, param in zip(*map(jax.tree.leaves, (found[1], model)), strict=True):
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim)
