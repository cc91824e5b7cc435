"""A small model under scan whose parameters are spread over the example axes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.losses import mesh_of

LAYERS, WIDTH, TIME, VOCABULARY, OUT = 3, 16, 6, 24, 3


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
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "up": (LAYERS, WIDTH, 2 * WIDTH),
        "down": (LAYERS, WIDTH, 2, WIDTH),
        "scale": (LAYERS, WIDTH),
        "bias": (LAYERS, 2 * WIDTH),
        "head": (WIDTH, OUT),
        "shift": (OUT,),
    }
    arrays = {
        name: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for name, shape in shapes.items()
    }
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
