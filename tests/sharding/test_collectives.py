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
from tests.sharding import losses
from tests.sharding.compiled import collectives, compiled
from tests.sharding.losses import mesh_of

assert_like_one_device = functools.partial(losses.assert_like_one_device, rtol=1e-5)

MODEL = eqx.nn.MLP(16, 8, 24, 1, key=jax.random.key(0))
BATCH = (
    np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32),
    np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32),
)


def loss(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def program(accumulators="params", policy=None, kind="auto", axes=None, **options):
    """What a device does in a step: clipped gradients and noise."""
    mesh = mesh_of(kind, **(axes or {"data": 8}))
    rules = dp.ShardingRules(mesh, examples=tuple(mesh.axis_names), accumulators=accumulators)
    grad_fn = dp.filter_clipped_grad(
        loss, l2_clip_norm=1.0, sharding=rules, policy=policy, **options
    )
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=jax.random.key(0), sharding=rules)

    def step(model, state, is_padding_example, *batch):
        grads = grad_fn(model, *batch, is_padding_example=is_padding_example)
        return privatizer.update(grads, state)[0]

    with jax.set_mesh(mesh):
        args = rules.shard(MODEL), privatizer.init(None)
        spread = rules.shard_batch((np.zeros(64, bool), *BATCH))
        return compiled(step, *args, *spread)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("method", ["book_keeping", "ghost", "per_example"])
@pytest.mark.parametrize("microbatch_size", [pytest.param(None, marks=pytest.mark.exhaustive), 2])
def test_sums_cross_devices_once(kind, method, microbatch_size):
    found = program(kind=kind, method=method, microbatch_size=microbatch_size).collectives
    assert {collective.name for collective in found} == {"all-reduce"}
    assert len(found) <= len(jax.tree.leaves(eqx.filter(MODEL, eqx.is_array)))
    assert not any(collective.in_loop for collective in found)


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_with_zero_accumulators_they_are_scattered(microbatch_size):
    found = program("examples", microbatch_size=microbatch_size).collectives
    # Every weight and bias has a dimension that eight devices divide.
    assert {collective.name for collective in found} == {"reduce-scatter"}
    assert not any(collective.in_loop for collective in found)


def test_a_collective_in_a_loop_is_seen():
    """The reader of programs, held against a sum over devices in every round of a scan."""
    mesh = mesh_of("auto", data=8)
    spec = P("data")

    def step(x):
        total, _ = jax.lax.scan(lambda c, x: (c + jax.lax.psum(x, "data"), None), 0.0 * x[0], x)
        return total

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=P(None, "data"),
        out_specs=spec,
        check_vma=False,
    )
    text = jax.jit(mapped).lower(jnp.ones((3, 8), jnp.bfloat16)).compile().as_text()
    assert any(c.in_loop and c.name == "all-reduce" for c in collectives(text))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_noise_is_drawn_where_it_lives_and_the_same_everywhere(kind):
    key, shapes = jax.random.key(7), {"a": (16, 24), "b": (8,), "c": (), "d": None}
    zeros = {name: None if s is None else jnp.zeros(s) for name, s in shapes.items()}
    alone = dp.gaussian_privatizer(stddev=2.0, key=key)
    expected, _ = alone.update(zeros, alone.init(zeros))
    model_axis = (("a", P(None, "model")),)
    meshes = [({"data": 8}, ()), ({"data": 4, "model": 2}, model_axis)]
    for axes, params in meshes:
        for accumulators in ("params", "examples"):
            mesh = mesh_of(kind, **axes)
            rules = dp.ShardingRules(mesh, params=params, accumulators=accumulators)
            privatizer = dp.gaussian_privatizer(stddev=2.0, key=key, sharding=rules)
            with jax.set_mesh(mesh):
                spread = rules.shard_accumulators(zeros)
                state = privatizer.init(spread)
                noise, _ = jax.jit(privatizer.update)(spread, state)
                program = jax.jit(privatizer.update).lower(spread, state).compile()
            jax.tree.map(np.testing.assert_array_equal, noise, expected)
            assert collectives(program.as_text()) == []
            for name in "abc":
                ndim = noise[name].ndim
                assert noise[name].sharding.is_equivalent_to(spread[name].sharding, ndim)


@pytest.mark.parametrize("num_examples", [0, 8, 64])
def test_examples_are_clipped_one_by_one_on_every_device(num_examples):
    """The sum over devices is that of one device, example by example."""
    rules, padding = dp.ShardingRules(mesh_of("auto", data=8)), np.arange(num_examples) % 3 == 0
    batch = tuple(part[:num_examples] for part in BATCH)
    assert_like_one_device(loss, MODEL, batch, rules, padding=padding, microbatch_size=3)


@pytest.mark.parametrize("accumulators", ["params", "examples"])
def test_an_example_axis_of_one_device(accumulators):
    rules = dp.ShardingRules(
        mesh_of("auto", data=1, model=2), params=HEADS, accumulators=accumulators
    )
    fun = lambda model, x: jnp.sum(model(x) ** 2)  # noqa: E731
    assert_like_one_device(fun, ATTENTION, (SEQUENCES,), rules)


def test_one_key_an_example_on_any_number_of_devices():
    def noisy(model, x, y, key):
        return loss(model, x + jax.random.normal(key, x.shape), y)

    rules, options = dp.ShardingRules(mesh_of("auto", data=8)), {"l2_clip_norm": 0.7}
    found, expected = (
        dp.filter_clipped_grad(noisy, sharding=its, **options)(MODEL, *BATCH, key=jax.random.key(3))
        for its in (rules, None)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_one_example_that_is_not_finite_changes_no_others():
    rules = dp.ShardingRules(mesh_of("auto", data=8))
    grad_fn = eqx.filter_jit(dp.filter_clipped_grad(loss, l2_clip_norm=0.7, sharding=rules))
    poisoned = BATCH[0].copy()
    poisoned[5, 3] = np.nan
    alone = np.arange(64) == 5
    found = grad_fn(MODEL, poisoned, BATCH[1], is_padding_example=np.zeros(64, bool))
    expected = grad_fn(MODEL, *BATCH, is_padding_example=alone)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


class Attention(eqx.Module):
    """Heads in one array, so that splitting them moves data between devices over `model`."""

    qkv: jax.Array
    out: jax.Array

    def __call__(self, x):
        q, k, v = jnp.split(x @ self.qkv, 3, axis=-1)
        return (jax.nn.softmax(q @ k.T) @ v) @ self.out


ATTENTION = Attention(
    jax.random.normal(jax.random.key(0), (8, 24)), jax.random.normal(jax.random.key(1), (8, 8))
)
SEQUENCES = np.random.default_rng(0).normal(size=(16, 6, 8)).astype(np.float32)
HEADS = (("qkv", P(None, "model")), ("out", P("model", None)))


@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_a_device_that_has_padding_alone_waits_for_nobody(microbatch_size):
    """Devices over `model` meet within an example; those over `data` may have nothing to do."""
    assert_like_one_device(
        lambda model, x: jnp.sum(model(x) ** 2),
        ATTENTION,
        (SEQUENCES,),
        dp.ShardingRules(mesh_of("auto", data=4, model=2), params=HEADS),
        padding=np.arange(16) >= 11,
        microbatch_size=microbatch_size,
    )


WEIGHTS = (("layers.*.weight", P("data")),)


@pytest.mark.parametrize(
    "rules",
    [
        lambda: dp.ShardingRules(mesh_of("auto", data=8), accumulators="examples"),
        lambda: dp.ShardingRules(mesh_of("explicit", data=8), accumulators="examples"),
        # Parameters over one of two example axes: scattered over it, summed over the other.
        lambda: dp.ShardingRules(
            mesh_of("auto", replica=2, data=4), examples=("replica", "data"), params=WEIGHTS
        ),
        lambda: dp.ShardingRules(
            mesh_of("auto", data=4, model=2), params=WEIGHTS, accumulators="examples"
        ),
    ],
    ids=["zero", "zero explicit", "two example axes", "with a model axis"],
)
def test_sums_that_are_scattered_are_those_of_one_device(rules):
    assert_like_one_device(loss, MODEL, BATCH, rules(), padding=np.arange(64) % 5 == 0)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("accumulators", ["params", "examples"])
def test_sums_cross_devices_wide_before_a_compiler_has_a_say(policy, accumulators):
    """A CPU widens narrow collectives by itself, so this looks at the program that it is given."""
    rules = dp.ShardingRules(mesh_of("auto", data=8), accumulators=accumulators)
    grad_fn = dp.filter_clipped_grad(
        loss, l2_clip_norm=1.0, sharding=rules, policy=dp.load_policy(policy)
    )
    text = eqx.filter_jit(grad_fn).lower(MODEL, *BATCH).as_text()
    reductions = re.findall(
        r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?\}\) : (\(.*?\)) ->', text, re.DOTALL
    )
    assert reductions
    assert all(re.findall(r"tensor<(?:\d+x)*(\w+)>", types) == ["f32"] for types in reductions)
