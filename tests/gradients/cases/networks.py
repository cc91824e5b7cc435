"""Networks and differential equations as documentation has them, written anew and small."""

import functools
from collections.abc import Callable
from typing import Any

import diffrax
import jax.numpy as jnp
from equinox import nn
from jaxtyping import Array

from tests.gradients.cases.tables import Rows, Table, bent, of_module, on_all


def shared_module(key: Array) -> Any:
    """An embedding that is the head as well, by Equinox' own means."""
    pair = (nn.Embedding(5, 4, key=key), nn.Linear(4, 5, use_bias=False, key=key))
    return nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def use_shared(m: Any, tokens: Array) -> Array:
    embedding, head = m()
    return bent(on_all, head, jnp.tanh(on_all(embedding, tokens)))


def differential(adjoint: Any) -> Callable[..., Array]:
    def solve(m: Any, x: Array) -> Array:
        term, solver = diffrax.ODETerm(lambda t, y, args: args(y)), diffrax.Heun()
        options = {"args": m["field"], "adjoint": adjoint, "max_steps": 16, "throw": False}
        solution = diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.25, m["start"](x), **options)
        return m["end"](solution.ys[-1])

    return solve


def parts(key: Array) -> dict[str, Any]:
    field = nn.MLP(3, 3, 4, 1, activation=jnp.tanh, key=key)
    return {"start": nn.Linear(2, 3, key=key), "field": field, "end": nn.Linear(3, 2, key=key)}


NETWORKS: Table = {"shared": of_module(shared_module, Rows(5, (3,)), loss=use_shared)}
EQUATIONS: Table = {
    name: of_module(parts, (2,), loss=functools.partial(bent, differential(adjoint)))
    for name, adjoint in {
        "checkpointed": diffrax.RecursiveCheckpointAdjoint(checkpoints=2),
        "backwards": diffrax.BacksolveAdjoint(),
    }.items()
}
