"""Networks, flows and differential equations as documentation has them, written anew and small."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from tests.gradients.cases.tables import (
    Rows,
    Table,
    array,
    bent,
    linear,
    made,
    mlp,
    of_module,
    on_all,
    stacked,
)

# Sequences.


def selective_state_space(m: Any, x: Array) -> Array:
    step = jax.nn.softplus(on_all(m["step"], x))
    b, c = on_all(m["b"], x), on_all(m["c"], x)
    rates = jnp.exp(-step[..., None] * jnp.exp(m["decay"]))

    def one(h: Array, now: Any) -> tuple[Array, Array]:
        rate, step, b, c, x = now
        h = rate * h + (step * x)[:, None] * b
        return h, h @ c

    return lax.scan(one, jnp.zeros_like(rates[0]), (rates, step, b, c, x))[1] + m["skip"] * x


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


# What meets in a loss.


def siamese(m: Any, x: Array, y: Array) -> Array:
    a, b = m.parts["net"](x), m.parts["net"](y)
    scores = optax.losses.cosine_similarity(a, b, epsilon=1e-2)
    return jnp.exp(m.parts["temperature"]) * scores + jnp.sum((a - b) ** 2)


def variational(m: Any, x: Array, noise: Array) -> Array:
    mean, scale = jnp.split(m.parts["in"](x), 2)
    scale = jnp.tanh(scale)
    y = m.parts["out"](mean + jnp.exp(scale) * noise)
    divergence = jnp.sum(mean**2 + jnp.exp(2 * scale) - 2 * scale - 1) / 2
    return jnp.sum((y - x) ** 2 * jnp.exp(-m.parts["s"])) + jnp.sum(m.parts["s"]) + divergence


LOSSES = {
    "ctc": lambda y: optax.losses.ctc_loss(
        jnp.outer(jnp.arange(1, 5, dtype=y.dtype), y)[None],
        jnp.zeros((1, 4), y.dtype),
        jnp.array([[1, 2]]),
        jnp.zeros((1, 2), y.dtype),
    )[0],
    "triplet": lambda y: jnp.sum(
        optax.losses.triplet_margin_loss(y[None], y[None] ** 2, jnp.sin(y)[None])
    ),
    "sparsemax": lambda y: optax.losses.sparsemax_loss(y[0], jnp.ones((), jnp.int32)),
}


# Others.


def shared_module(key: Array) -> Any:
    """An embedding that is the head as well, by Equinox' own means."""
    pair = (nn.Embedding(5, 4, key=key), nn.Linear(4, 5, use_bias=False, key=key))
    return nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def use_shared(m: Any, tokens: Array) -> Array:
    embedding, head = m()
    return bent(on_all, head, jnp.tanh(on_all(embedding, tokens)))


# Flows.


class Masked(eqx.Module):
    """A layer whose weight is normalised, and masked so that outputs see only inputs before."""

    weight: Array
    scale: Array
    bias: Array
    ranks: tuple[tuple[int, ...], tuple[int, ...]] = eqx.field(static=True)
    is_last: bool = eqx.field(static=True)

    def __init__(self, inside: Any, outside: Any, is_last: bool, key: Array) -> None:
        self.ranks, self.is_last = (tuple(inside), tuple(outside)), is_last
        self.weight = jax.random.normal(key, (len(outside), len(inside)))
        self.scale, self.bias = jnp.zeros((len(outside), 1)), jnp.zeros(len(outside))

    def __call__(self, x: Array) -> Array:
        inside, outside = (np.array(ranks) for ranks in self.ranks)
        seen = outside[:, None] > inside if self.is_last else outside[:, None] >= inside
        weight = jnp.where(seen, self.weight, 0)
        length = jnp.sqrt(jnp.sum(weight**2, 1, keepdims=True) + 1e-2)
        return (jnp.exp(self.scale) * weight / length) @ x + self.bias


def masked(inside: Any, outside: Any, is_last: bool = False) -> Callable[[Array], Masked]:
    return lambda key: Masked(inside, outside, is_last, key)


def autoregressive(m: Any, x: Array) -> Array:
    shift, scale = m["out"](jnp.tanh(m["in"](x))).reshape(2, -1)
    return jnp.sum((x - shift) ** 2 * jnp.exp(-jnp.tanh(scale))) + jnp.sum(jnp.tanh(scale))


MADE = made(
    autoregressive,
    **{"in": masked(range(3), [0, 0, 1, 1]), "out": masked([0, 0, 1, 1], [0, 1, 2] * 2, True)},
)


def differential(adjoint: Any, solver: Any = None, steps: Any = None) -> Callable[..., Array]:
    def solve(m: Any, x: Array) -> Array:
        controller = diffrax.ConstantStepSize() if steps is None else steps
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: args(y)),
            solver or diffrax.Heun(),
            *(0.0, 1.0, 0.25, m["start"](x)),
            args=m["field"],
            adjoint=adjoint,
            stepsize_controller=controller,
            max_steps=16,
            throw=False,
        )
        return m["end"](solution.ys[-1])

    return solve


ODE = {"start": linear(2, 3), "field": mlp(3, 3, 4, 1), "end": linear(3, 2)}


NETWORKS: Table = {
    name: of_module(make, *data)
    for name, (make, *data) in {
        "state space, selective": (made(selective_state_space, step=linear(4, 4), b=linear(4, 3),
            c=linear(4, 3), decay=array(4, 3), skip=array(4)), (3, 4)),
        "blocks with names": (made(stack_of_blocks, embedding=lambda k: nn.Embedding(7, 4, key=k),
            positions=array(6, 4), blocks=stacked(Block, 2)), Rows(7, (4,))),
        "flow, masked autoregressive": (MADE, (3,)),
    }.items()
}  # fmt: skip

PAIRS: Table = {
    "siamese": of_module(
        made(None, net=mlp(3, 4, 4, 1), temperature=array()), (3,), (3,), loss=siamese),
    "variational": of_module(made(None, **{"in": linear(3, 4), "out": linear(2, 3), "s": array(3)}),
        (3,), (2,), loss=variational),
    "shared": of_module(shared_module, Rows(5, (3,)), loss=use_shared),
    **{f"loss, {name}": of_module(
        mlp(3, 4, 4, 1), (3,), loss=lambda m, x, loss=loss: loss(m(x))
       ) for name, loss in LOSSES.items()},
}  # fmt: skip

EQUATIONS: Table = {
    name: of_module(make, *data)
    for name, (make, *data) in {
        "checkpointed": (
            made(differential(diffrax.RecursiveCheckpointAdjoint(checkpoints=2)), **ODE), (2,)),
        "backwards": (made(differential(diffrax.BacksolveAdjoint()), **ODE), (2,)),
        "adaptive": (made(differential(diffrax.RecursiveCheckpointAdjoint(), diffrax.Bosh3(),
            diffrax.PIDController(rtol=1e-2, atol=1e-2)), **ODE), (2,)),
    }.items()
}  # fmt: skip
