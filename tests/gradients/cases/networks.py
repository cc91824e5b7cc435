"""Networks and differential equations as documentation has them, written anew and small."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from tests.gradients.cases import tables
from tests.gradients.cases.tables import Rows, Table, linear, made, of_module, on_all

# Sequences.


class Block(eqx.Module):
    """A transformer's block, whose activations have names for a policy."""

    norm: nn.LayerNorm
    attention: nn.MultiheadAttention
    up: nn.Linear
    down: nn.Linear

    def __init__(self, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(2, 4, key=keys[0])
        self.up, self.down = nn.Linear(4, 6, key=keys[1]), nn.Linear(6, 4, key=keys[2])

    def __call__(self, x: Array) -> Array:
        normed = on_all(self.norm, x)
        x = x + checkpoint_name(self.attention(normed, normed, normed), "attention")
        hidden = checkpoint_name(jax.nn.gelu(on_all(self.up, x)), "hidden")
        return x + on_all(self.down, hidden)


def stack_of_blocks(m: Any, tokens: Array) -> Array:
    arrays, static = eqx.partition(m["blocks"], eqx.is_array)
    policy = jax.checkpoint_policies.save_only_these_names("hidden", "carry")

    @partial(jax.checkpoint, policy=policy)
    def block(x: Array, arrays: Any) -> tuple[Array, None]:
        return eqx.combine(arrays, static)(checkpoint_name(x, "carry")), None

    start = m["embedding"].weight[tokens] + m["positions"][: len(tokens)]
    x, _ = lax.scan(block, start, arrays)
    return x @ m["embedding"].weight.T


# Others.


def shared_module(key: Array) -> Any:
    """An embedding that is the head as well, by Equinox' own means."""
    pair = (nn.Embedding(5, 4, key=key), nn.Linear(4, 5, use_bias=False, key=key))
    return nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def use_shared(m: Any, tokens: Array) -> Array:
    embedding, head = m()
    return tables.bent(on_all, head, jnp.tanh(on_all(embedding, tokens)))


def differential(adjoint: Any) -> Callable[..., Array]:
    def solve(m: Any, x: Array) -> Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: args(y)),
            diffrax.Heun(),
            *(0.0, 1.0, 0.25, m["start"](x)),
            args=m["field"],
            adjoint=adjoint,
            max_steps=16,
            throw=False,
        )
        return m["end"](solution.ys[-1])

    return solve


ODE = {"start": linear(2, 3), "field": tables.mlp(3, 3, 4, 1), "end": linear(3, 2)}


NETWORKS: Table = {
    name: of_module(make, *data)
    for name, (make, *data) in {
        "blocks with names": (made(stack_of_blocks, embedding=lambda k: nn.Embedding(7, 4, key=k),
            positions=tables.array(6, 4), blocks=tables.stacked(Block, 2)), Rows(7, (4,))),
    }.items()
} | {"shared": of_module(shared_module, Rows(5, (3,)), loss=use_shared)}  # fmt: skip

EQUATIONS: Table = {
    name: of_module(make, *data)
    for name, (make, *data) in {
        "checkpointed": (
            made(differential(diffrax.RecursiveCheckpointAdjoint(checkpoints=2)), **ODE), (2,)),
        "backwards": (made(differential(diffrax.BacksolveAdjoint()), **ODE), (2,)),
    }.items()
}  # fmt: skip
