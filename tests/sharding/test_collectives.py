"""What devices tell each other: sums of gradients once a step, wide, and nothing else."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests import oracle
from tests.sharding import fully_sharded_net, losses
from tests.sharding.compiled import compiled
from tests.sharding.losses import mesh_of
from tests.tiers import curated

assert_like_one_device = functools.partial(
    losses.assert_like_one_device, rtol=1e-5 + oracle.room(64)
)

MODEL = eqx.nn.MLP(16, 8, 24, 1, key=jax.random.key(0))
BATCH = (
    np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32),
    np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32),
)


def loss(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def program(accumulators, kind, **options):
    """What a device does in a step: clipped gradients and noise."""
    rules = dp.ShardingRules(mesh_of(kind, data=8), accumulators=accumulators)
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, sharding=rules, **options)
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=0, sharding=rules)

    def step(model, state, is_padding_example, *batch):
        grads = grad_fn(model, *batch, is_padding_example=is_padding_example)
        return privatizer.update(grads, state)[0]

    with jax.set_mesh(rules.mesh):
        args = rules.shard(MODEL), privatizer.init(None)
        return compiled(step, *args, *rules.shard_batch((np.zeros(64, bool), *BATCH)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "accumulators"),
    [("auto", "per_example", "params"), ("explicit", "ghost", "examples")],
)
def test_sums_cross_devices_once(kind, method, accumulators):
    """Every weight and bias has a dimension that eight devices divide, to scatter a sum along."""
    found = program(accumulators, kind=kind, method=method, microbatch_size=2).collectives
    name = {"params": "all-reduce", "examples": "reduce-scatter"}[accumulators]
    assert {collective.name for collective in found} == {name}
    assert len(found) <= len(jax.tree.leaves(eqx.filter(MODEL, eqx.is_array)))
    assert not any(collective.in_loop for collective in found)


@pytest.mark.parametrize("num_examples", [0, 64])
def test_examples_are_clipped_one_by_one_on_every_device(num_examples):
    """The sum over devices is that of one device, example by example."""
    rules, padding = dp.ShardingRules(mesh_of("auto", data=8)), np.arange(num_examples) % 3 == 0
    batch = tuple(part[:num_examples] for part in BATCH)
    assert_like_one_device(loss, MODEL, batch, rules, padding=padding, microbatch_size=3)


WEIGHTS = {"params": (("layers.*.weight", P("data")),)}
REPLICAS = {"examples": ("replica", "data")}
SCATTERED = {
    "zero": ("auto", {"data": 8}, {"accumulators": "examples"}),
    "zero explicit": ("explicit", {"data": 8}, {"accumulators": "examples"}),
    # Parameters over one of two example axes: scattered over it, summed over the other.
    "two example axes": ("auto", {"replica": 2, "data": 4}, WEIGHTS | REPLICAS),
    "a model axis": ("auto", {"data": 4, "model": 2}, WEIGHTS | {"accumulators": "examples"}),
}


@pytest.mark.parametrize("name", curated(SCATTERED, ["zero"]))
def test_sums_that_are_scattered_are_those_of_one_device(name):
    kind, axes, options = SCATTERED[name]
    rules = dp.ShardingRules(mesh_of(kind, **axes), **options)
    assert_like_one_device(loss, MODEL, BATCH, rules, padding=np.arange(64) % 5 == 0)


# In which dtype arrays go from device to device.
WIDE = {"all_reduce": "f32", "reduce_scatter": "f32", "all_gather": "bf16"}


@pytest.mark.parametrize(
    ("params", "accumulators", "names", "policy"),
    [
        ((), "params", {"all_reduce"}, "bfloat16"),
        ((), "examples", {"all_reduce", "reduce_scatter"}, "mixed_bfloat16"),
        (fully_sharded_net.SPECS, "params", {*WIDE}, "mixed_bfloat16"),
    ],
    ids=["whole", "scattered", "spread"],
)
def test_sums_cross_devices_wide_and_parameters_narrow(params, accumulators, names, policy):
    """A CPU widens narrow collectives by itself, so this looks at the program that it is given."""
    rules = fully_sharded_net.rules_of(params=params, accumulators=accumulators)
    options = {"l2_clip_norm": 1.0, "sharding": rules, "policy": dp.load_policy(policy)}
    grad_fn = dp.filter_clipped_grad(fully_sharded_net.loss, method="ghost", **options)
    with jax.set_mesh(rules.mesh):
        model = rules.shard(fully_sharded_net.net())
        batch = rules.shard_batch(fully_sharded_net.batch_of(16))
        text = eqx.filter_jit(grad_fn).lower(model, *batch).as_text()
    kinds = "|".join(WIDE)
    pattern = rf'"stablehlo\.({kinds})".*?\) -> (?:tuple<)?tensor<(?:\d+x)+(\w+)>'
    assert set(re.findall(pattern, text, re.DOTALL)) == {(name, WIDE[name]) for name in names}
