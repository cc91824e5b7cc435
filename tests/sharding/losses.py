"""Losses with sharding constraints inside, written for a whole batch as anyone would."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests import models

AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(kind, **axes):
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AXIS_TYPES[kind],) * len(axes)
    )


class Says(NamedTuple):
    """How a loss speaks of sharding on one kind of axes; not at all with `constrained` off."""

    kind: str
    constrained: bool = True

    def constrain(self, x, spec):
        if not self.constrained:
            return x
        if self.kind == "auto":
            return jax.lax.with_sharding_constraint(x, spec)
        return jax.sharding.reshard(x, spec)

    def einsum(self, subscripts, x, y, spec):
        # On Explicit axes a contraction over a spread dimension has to say where its result goes.
        where = {} if self.kind == "auto" else {"out_sharding": spec}
        return jnp.einsum(subscripts, x, y, **where)

    def rows(self, table, indices, spec):
        where = {} if self.kind == "auto" else {"out_sharding": spec}
        return table.at[indices].get(**where)


def mean_estimation(says: Says, where: str) -> Callable[[Any, Any], Any]:
    """Half the mean squared distance from scalars, constrained on the input or after it."""

    def of_input(param, data):
        return 0.5 * jnp.mean((says.constrain(data, P("data")) - param) ** 2)

    def of_difference(param, data):
        return 0.5 * jnp.mean(says.constrain(data - param, P("data")) ** 2)

    return {"input": of_input, "intermediate": of_difference}[where]


LENGTH, WIDTH, HEADS, VOCABULARY = 16, 32, 4, 32


class Block(eqx.Module):
    """Attention and an MLP, heads and hidden units spread over `model`."""

    norms: list[eqx.nn.LayerNorm]
    qkv: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array
    says: Says = eqx.field(static=True)

    def __init__(self, says, key):
        keys = jax.random.split(key, 4)
        depth = WIDTH // HEADS
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.qkv = models.normal(keys[0], (WIDTH, 3, HEADS, depth)) * WIDTH**-0.5
        self.out = models.normal(keys[1], (HEADS, depth, WIDTH)) * WIDTH**-0.5
        self.up = models.normal(keys[2], (WIDTH, 4 * WIDTH)) * WIDTH**-0.5
        self.down = models.normal(keys[3], (4 * WIDTH, WIDTH)) * (4 * WIDTH) ** -0.5
        self.says = says

    def __call__(self, x):
        says, (first, second) = self.says, self.norms
        qkv = says.einsum(
            "btd,dchk->btchk", over_tokens(first, x), self.qkv, P("data", None, None, "model")
        )
        q, k, v = (says.constrain(qkv[:, :, i], P("data", None, "model")) for i in range(3))
        scores = says.einsum("bthk,bshk->bhts", q, k, P("data", "model"))
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores * (WIDTH // HEADS) ** -0.5, -1e9))
        mixed = says.einsum("bhts,bshk->bthk", weights, v, P("data", None, "model"))
        x = x + says.constrain(
            says.einsum("bthk,hkd->btd", mixed, self.out, P("data")), P("data", None, None)
        )
        # Examples and time folded into one dimension, as an MLP is often fed.
        tokens = over_tokens(second, x).reshape(-1, WIDTH)
        hidden = says.einsum("nd,df->nf", tokens, self.up, P("data", "model"))
        hidden = says.constrain(jax.nn.relu(hidden), P("data", "model"))
        out = says.einsum("nf,fd->nd", hidden, self.down, P("data"))
        return x + says.constrain(out, P("data", None)).reshape(x.shape)


def over_tokens(layer, x):
    return jax.vmap(jax.vmap(layer))(x)


class GPT(eqx.Module):
    """Blocks in a list, or stacked under scan and remat."""

    embedding: jax.Array
    blocks: Any
    head: jax.Array
    is_stacked: bool = eqx.field(static=True)
    says: Says = eqx.field(static=True)

    def __init__(self, says, is_stacked=False, depth=2):
        keys = jax.random.split(jax.random.key(0), depth + 2)
        self.embedding = models.normal(keys[0], (VOCABULARY, WIDTH))
        self.head = models.normal(keys[1], (WIDTH, VOCABULARY)) * WIDTH**-0.5
        self.is_stacked, self.says = is_stacked, says
        if is_stacked:
            self.blocks = eqx.filter_vmap(lambda key: Block(says, key))(keys[2:])
        else:
            self.blocks = [Block(says, key) for key in keys[2:]]

    def __call__(self, tokens):
        says = self.says
        x = says.constrain(says.rows(self.embedding, tokens, P("data")), P("data"))
        if self.is_stacked:
            arrays, static = eqx.partition(self.blocks, eqx.is_array)
            body = jax.checkpoint(lambda x, block: (eqx.combine(block, static)(x), None))
            x, _ = jax.lax.scan(body, x, arrays)
        else:
            for block in self.blocks:
                x = block(x)
        return says.einsum("btd,dv->btv", x, self.head, P("data"))


def language_loss(model, tokens, targets):
    """Mean cross entropy of a batch."""
    log_probs = jax.nn.log_softmax(model(tokens))
    return -jnp.mean(jnp.sum(log_probs * jax.nn.one_hot(targets, VOCABULARY), -1))


def tokens(num_examples):
    found = np.random.default_rng(0).integers(0, VOCABULARY, (num_examples, LENGTH))
    return found, np.roll(found, 1, axis=1)


def gpt_rules(mesh, is_stacked=False):
    ahead = (None,) if is_stacked else ()
    block = "blocks." if is_stacked else "blocks.*."

    def rule(name, *entries) -> tuple[str, PartitionSpec]:
        return block + name, P(*ahead, *entries)

    return dp.ShardingRules(
        mesh,
        params=(
            rule("qkv", None, None, "model"),
            rule("out", "model"),
            rule("up", None, "model"),
            rule("down", "model"),
        ),
    )


def assert_like_one_device(fun, model, batch, rules, padding=None, key=None, rtol=1e-4, **options):
    """Values and gradients are those without a mesh, and gradients live where they ought to.

    Without a mesh they are by one method, whose program many tests share.
    """
    options = {"l2_clip_norm": 0.7, **options}
    given = {"is_padding_example": padding, "key": key}
    plainly = options | {"method": "per_example", "microbatch_size": None}
    alone = dp.filter_value_and_clipped_grad(fun, **plainly)
    expected = eqx.filter_jit(alone)(model, *batch, **given)
    on_mesh = dp.filter_value_and_clipped_grad(fun, sharding=rules, **options)
    with jax.set_mesh(rules.mesh):
        found = eqx.filter_jit(on_mesh)(rules.shard(model), *rules.shard_batch(batch), **given)
        specs = jax.tree.leaves(rules.accumulator_specs(found[1]))
        for leaf, spec in zip(jax.tree.leaves(found[1]), specs, strict=True):
            sharding = jax.sharding.NamedSharding(rules.mesh, spec)
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


# Of a loss on eight examples with one matrix, which says something of sharding or not.
WEIGHT = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(8, 5, 4)).astype(np.float32)


def gradient(loss, mesh=None, rules=None, **options):
    """The clipped gradient, on a mesh or on one device."""
    options = {"l2_clip_norm": 1.0, "keep_batch_dim": True} | options
    if mesh is None:
        return jax.jit(dp.filter_clipped_grad(loss, **options))(WEIGHT, X)
    rules = rules or dp.ShardingRules(mesh)
    options = {"sharding": rules} | options
    with jax.set_mesh(mesh):
        model, batch = rules.shard(WEIGHT), rules.shard_batch(X)
        return jax.jit(dp.filter_clipped_grad(loss, **options))(model, batch)


def assert_like_free(make_loss, kind, **options):
    """On 4 x 2 devices the gradient is that without constraints on one device."""
    found = gradient(make_loss(Says(kind)), mesh_of(kind, data=4, model=2), **options)
    expected = gradient(make_loss(Says("auto", constrained=False)), **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
