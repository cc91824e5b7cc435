"""Parameters spread over the example axes: gradients are one device's, and no device holds a whole.

The oracle is the clipped gradient without a mesh, which knows nothing of shards.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.losses import mesh_of

LAYERS, WIDTH, TIME, VOCABULARY, OUT = 3, 16, 6, 24, 3
METHODS = ("ghost", "book_keeping", "per_example")


def layer(x, its):
    up, down, scale, bias = its
    hidden = jnp.tanh((x * scale) @ up + bias)
    return x + hidden @ down.reshape(WIDTH, -1).T, None


class Net(eqx.Module):
    """Every way to a use: lookups, stacked layers, transposed and cast weights, small leaves."""

    embedding: jax.Array
    up: jax.Array
    down: jax.Array
    scale: jax.Array
    bias: jax.Array
    head: jax.Array
    shift: jax.Array
    remat: bool = eqx.field(static=True, default=True)

    def __call__(self, tokens):
        x = self.embedding[tokens]
        body = jax.checkpoint(layer) if self.remat else layer
        x, _ = jax.lax.scan(body, x, (self.up, self.down, self.scale, self.bias))
        return x @ self.head + self.shift


def net(remat=True):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "up": (LAYERS, WIDTH, 2 * WIDTH),
        "down": (LAYERS, WIDTH, 2, WIDTH),
        "scale": (LAYERS, WIDTH),
        "bias": (LAYERS, 2 * WIDTH),
        "head": (WIDTH, OUT),
        "shift": (OUT,),
    }
    arrays = {name: jax.random.normal(next(keys), shape) / 4 for name, shape in shapes.items()}
    return Net(**arrays, remat=remat)


def loss(model, tokens, targets):
    return jnp.sum((model(tokens) - targets) ** 2)


def batch_of(num_examples):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (num_examples, TIME))
    return tokens, rng.normal(size=(num_examples, TIME, OUT)).astype(np.float32)


SPECS = (
    ("embedding", P("data")),
    ("up", P(None, "data")),
    ("down", P(None, "data")),
    ("scale", P(None, "data")),
    ("bias", P(None, "data")),
    ("head", P("data")),
)


def rules_of(kind="auto", axes=None, examples=("data",), params=SPECS, accumulators="params"):
    mesh = mesh_of(kind, **(axes or {"data": 8}))
    return dp.ShardingRules(mesh, examples=examples, params=params, accumulators=accumulators)


def assert_like_one_device(fun, model, batch, rules, padding=None, rtol=1e-4, **options):
    options = {"l2_clip_norm": 0.7, **options}
    expected = eqx.filter_jit(dp.filter_value_and_clipped_grad(fun, **options))(
        model, *batch, is_padding_example=padding
    )
    on_mesh = dp.filter_value_and_clipped_grad(fun, sharding=rules, **options)
    with jax.set_mesh(rules.mesh):
        found = eqx.filter_jit(on_mesh)(
            rules.shard(model), *rules.shard_batch(batch), is_padding_example=padding
        )
        specs = rules.accumulator_specs(found[1])
        for leaf, spec in zip(
            jax.tree.leaves(found[1]), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True
        ):
            sharding = jax.sharding.NamedSharding(rules.mesh, spec)
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def _is_spec(x):
    return isinstance(x, P)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("microbatch_size", [1, None])
def test_gradients_are_those_of_one_device(method, remat, microbatch_size):
    assert_like_one_device(
        loss,
        net(remat),
        batch_of(16),
        rules_of(),
        padding=np.arange(16) >= 11,
        method=method,
        microbatch_size=microbatch_size,
    )
