"""Flows and differential equations as documentation has them, written anew and small."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from tests.gradients.others.cases import array, linear, made, mlp, of_module, stacked

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


def autoregressive_stack(m: Any, x: Array) -> Array:
    """Layers that share a form, one after the other, each followed by a reversal."""
    arrays, static = eqx.partition(m["layers"], eqx.is_array)

    def layer(carry: Any, arrays: Any) -> Any:
        x, total = carry
        its = eqx.combine(arrays, static)
        shift, scale = its.parts["out"](jnp.tanh(its.parts["in"](x))).reshape(2, -1)
        return (((x - shift) * jnp.exp(jnp.tanh(scale)))[::-1], total + jnp.sum(scale)), None

    (x, total), _ = lax.scan(layer, (x, jnp.zeros((), x.dtype)), arrays)
    return jnp.sum(x**2) - total


def block_neural(m: Any, x: Array) -> Array:
    """Blocks on the diagonal are positive, those below it free, those above it zero."""
    diagonal = np.kron(np.eye(3), np.ones((2, 2))).astype(np.float32)
    below = np.kron(np.tril(np.ones((3, 3)), -1), np.ones((2, 2))).astype(np.float32)
    weight = jnp.exp(m["w"]) * diagonal + m["w"] * below
    return jnp.tanh(weight @ jnp.repeat(x, 2)) + jnp.log(jnp.sum(jnp.exp(m["w"]) * diagonal, 1))


def coupling(m: Any, x: Array) -> Array:
    for name in ("a", "b"):
        first, second = jnp.split(x, 2)
        shift, scale = jnp.split(m[name](first), 2)
        x = jnp.concatenate([second * jnp.exp(jnp.tanh(scale)) + shift, first])
    return x


def planar(m: Any, x: Array) -> Array:
    w, u, b = m["w"], m["u"], m["s"]
    u = u + (jax.nn.softplus(w @ u) - 1 - w @ u) * w / (w @ w)
    y = jnp.tanh(w @ x + b)
    return jnp.append(x + u * y, jnp.log(jnp.abs(1 + (1 - y**2) * (w @ u))))


MADE = made(
    autoregressive,
    **{"in": masked(range(3), [0, 0, 1, 1]), "out": masked([0, 0, 1, 1], [0, 1, 2] * 2, True)},
)


# Differential equations.


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


def controlled(m: Any, x: Array) -> Array:
    times = jnp.arange(4, dtype=x.dtype)
    path = diffrax.LinearInterpolation(times, x)
    term = diffrax.ControlTerm(lambda t, y, _: m["field"](y).reshape(3, 2), path)
    solution = diffrax.diffeqsolve(
        term, diffrax.Euler(), 0.0, 3.0, 1.0, m["start"](x[0]), max_steps=4
    )
    return m["end"](solution.ys[-1])


NETWORKS = {
    "flow, masked autoregressive": (MADE, (3,)),
    "flow, stack of masked autoregressive": (
        made(autoregressive_stack, layers=stacked(MADE, 2)), (3,)),
    "flow, block neural": (made(block_neural, w=array(6, 6)), (3,)),
    "flow, coupling": (made(coupling, a=mlp(2, 4, 4, 1), b=mlp(2, 4, 4, 1)), (4,)),
    "flow, planar": (made(planar, w=array(3), u=array(3), s=array()), (3,)),
    "ode, checkpointed": (
        made(differential(diffrax.RecursiveCheckpointAdjoint(checkpoints=2)), **ODE), (2,)),
    "ode, direct": (made(differential(diffrax.DirectAdjoint()), **ODE), (2,)),
    "ode, backwards": (made(differential(diffrax.BacksolveAdjoint()), **ODE), (2,)),
    "ode, adaptive": (made(differential(diffrax.RecursiveCheckpointAdjoint(), diffrax.Bosh3(),
        diffrax.PIDController(rtol=1e-2, atol=1e-2)), **ODE), (2,)),
    "controlled equation": (
        made(controlled, start=linear(2, 3), field=mlp(3, 6, 4, 1), end=linear(3, 2)), (4, 2)),
}  # fmt: skip

CASES = tuple(of_module(name, make, *data) for name, (make, *data) in NETWORKS.items())
