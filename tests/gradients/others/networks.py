"""Networks as the documentation of other libraries has them, written anew and small."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from tests.gradients.engine.layers import bent
from tests.gradients.others.cases import Rows, array, linear, made, mlp, of_module, on_all, stacked
from tests.models import cross_entropy

# Sequences.


def remembering(m: Any, x: Array) -> Array:
    """A recurrent cell with a start that is learned."""

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = m["cell"](x, h)
        return h, m["head"](h)

    return lax.scan(step, m["start"], x)[1]


def long_short(m: Any, x: Array) -> Array:
    def step(state: Any, x: Array) -> tuple[Any, Array]:
        state = m["cell"](x, state)
        return state, state[0]

    return lax.scan(step, (m["h"], m["c"]), x)[1]


def diagonal_state_space(m: Any, x: Array) -> Array:
    """A linear recurrence with complex numbers on the diagonal, by a parallel scan."""
    rates = jnp.exp(-jnp.exp(m["decay"]) + 1j * m["phase"])
    inputs = (x @ lax.complex(m["b"][0], m["b"][1])) * jnp.sqrt(1 - jnp.abs(rates) ** 2)
    rates = jnp.broadcast_to(rates, inputs.shape)
    states = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (rates, inputs))
    return jnp.real(states[1] @ lax.complex(m["c"][0], m["c"][1])) + x * m["d"]


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


def rotary(m: Any, x: Array) -> Array:
    embedding = nn.RotaryPositionalEmbedding(4)
    q, k, v = (on_all(m[name], x) for name in "qkv")
    scores = embedding(q) @ embedding(k).T
    return jax.nn.softmax(scores * jnp.exp(m["temperature"])) @ v


def sloped(m: Any, x: Array) -> Array:
    """Attention with a bias that grows with distance, at a slope that is learned."""
    distance = jnp.abs(jnp.arange(3)[:, None] - jnp.arange(3)).astype(x.dtype)
    scores = on_all(m["q"], x) @ on_all(m["k"], x).T - jax.nn.softplus(m["slope"]) * distance
    return jax.nn.softmax(scores) @ x


def perceiver(m: Any, x: Array) -> Array:
    return m["attention"](m["latents"], x, x)


def prefixed(m: Any, x: Array) -> Array:
    x = jnp.concatenate([m["prefix"], x])
    return m["attention"](x, x, x)


# What meets in a loss.


def siamese(m: Any, x: Array, y: Array) -> Array:
    a, b = m.parts["net"](x), m.parts["net"](y)
    scores = optax.losses.cosine_similarity(a, b, epsilon=1e-2)
    return jnp.exp(m.parts["temperature"]) * scores + jnp.sum((a - b) ** 2)


def momentum_target(m: Any, x: Array, y: Array) -> Array:
    target = jax.tree.map(lambda x: lax.stop_gradient(x) if eqx.is_array(x) else x, m.parts["net"])
    a, b = m.parts["head"](m.parts["net"](x)), target(y)
    return jnp.sum((a / jnp.linalg.norm(a) - b / jnp.linalg.norm(b)) ** 2)


def variational(m: Any, x: Array, noise: Array) -> Array:
    mean, scale = jnp.split(m.parts["in"](x), 2)
    scale = jnp.tanh(scale)
    y = m.parts["out"](mean + jnp.exp(scale) * noise)
    divergence = jnp.sum(mean**2 + jnp.exp(2 * scale) - 2 * scale - 1) / 2
    return jnp.sum((y - x) ** 2 * jnp.exp(-m.parts["s"])) + jnp.sum(m.parts["s"]) + divergence


def mixture_density(m: Any, x: Array, y: Array) -> Array:
    weights, means, scales = jnp.split(m(x), 3)
    logs = jax.nn.log_softmax(weights) - (y - means) ** 2 * jnp.exp(-scales) - scales / 2
    return -jax.nn.logsumexp(logs)


def labelled(m: Any, x: Array, label: Array) -> Array:
    return cross_entropy(m(x), label)


LOSSES = {
    "huber": lambda y: jnp.sum(optax.losses.huber_loss(y, jnp.ones_like(y))),
    "log cosh": lambda y: jnp.sum(optax.losses.log_cosh(y)),
    "focal": lambda y: jnp.sum(optax.losses.sigmoid_focal_loss(y, jnp.ones_like(y))),
    "hinge": lambda y: jnp.sum(optax.losses.hinge_loss(y, jnp.ones_like(y))),
    "smoothed": lambda y: optax.losses.softmax_cross_entropy(
        y, optax.losses.smooth_labels(jnp.eye(4, dtype=y.dtype)[1], 0.1)
    ),
    "triplet": lambda y: jnp.sum(
        optax.losses.triplet_margin_loss(y[None], y[None] ** 2, jnp.sin(y)[None])
    ),
    "ctc": lambda y: optax.losses.ctc_loss(
        jnp.outer(jnp.arange(1, 5, dtype=y.dtype), y)[None],
        jnp.zeros((1, 4), y.dtype),
        jnp.array([[1, 2]]),
        jnp.zeros((1, 2), y.dtype),
    )[0],
    "ranking": lambda y: optax.losses.ranking_softmax_loss(y, jnp.arange(4.0).astype(y.dtype)),
    "convex kl": lambda y: optax.losses.convex_kl_divergence(
        jax.nn.log_softmax(y), jnp.full_like(y, 0.25)
    ),
    "sparsemax": lambda y: optax.losses.sparsemax_loss(y[0], jnp.ones((), jnp.int32)),
}


# Others.


def modulated(m: Any, x: Array, condition: Array) -> Array:
    scale, shift = jnp.split(m["of_condition"](condition), 2)
    return (1 + scale) * jnp.tanh(m["in"](x)) + shift


def fourier_layer(m: Any, x: Array) -> Array:
    spectrum = jnp.fft.rfft(x, axis=1)[:, :2]
    spectrum = jnp.einsum("im,iom->om", spectrum, lax.complex(m["real"], m["imaginary"]))
    return jnp.fft.irfft(spectrum, 6, axis=1) + m["local"](x)


def graph(m: Any, x: Array, edges: Array) -> Array:
    messages = on_all(m["message"], jnp.concatenate([x[edges[:, 0]], x[edges[:, 1]]], 1))
    summed = jax.ops.segment_sum(messages, edges[:, 1], 3)
    return on_all(m["update"], jnp.concatenate([x, jnp.tanh(summed)], 1))


def mixture_of_experts(m: Any, x: Array) -> Array:
    gates, chosen = lax.top_k(jax.nn.softmax(m["gate"](x)), 2)
    outputs = eqx.filter_vmap(lambda expert: expert(x))(m["experts"])
    return gates @ outputs[chosen]


def chosen_expert(m: Any, x: Array) -> Array:
    gates = jax.nn.softmax(m["gate"](x))
    best = jnp.argmax(gates)
    expert = jax.tree.map(lambda leaf: leaf[best], eqx.filter(m["experts"], eqx.is_array))
    return gates[best] * jnp.tanh(expert.weight @ x + expert.bias)


def hyper(m: Any, x: Array) -> Array:
    """A network whose weights another one makes, of an embedding that is learned."""
    weights = m["of_weights"](m["task"])
    return jnp.tanh(weights[:12].reshape(3, 4) @ x + weights[12:])


def hyper_by_data(m: Any, x: Array, condition: Array) -> Array:
    weights = m["of_weights"](condition)
    return jnp.tanh((m["base"].weight + weights.reshape(3, 4)) @ x)


def monotone(m: Any, x: Array) -> Array:
    hidden = jnp.tanh(jax.nn.softplus(m["a"]) @ x + m["b"])
    return jnp.abs(m["c"]) @ hidden


def sinusoidal(m: Any, x: Array) -> Array:
    hidden = jnp.sin(3.0 * m["in"](x))
    return m["out"](jnp.concatenate([hidden, jnp.cos(m["frequencies"] * x)]))


def operator(m: Any, x: Array, at: Array) -> Array:
    return jnp.vdot(m["branch"](x), m["trunk"](at)) + m["bias"]


def splines(m: Any, x: Array) -> Array:
    """Every edge has a curve of its own."""
    centres = jnp.linspace(-2, 2, 5, dtype=x.dtype)
    basis = jnp.exp(-((x[:, None] - centres) ** 2))
    return jnp.einsum("oig,ig->o", m["curves"], basis) + m["base"] @ jax.nn.silu(x)


def u_shaped(m: Any, x: Array) -> Array:
    first = jax.nn.silu(m["a"](x))
    low = jax.nn.silu(m["down"](first))
    return m["b"](jnp.concatenate([first, m["up"](low)]))


def shared_module(key: Array) -> Any:
    """An embedding that is the head as well, by Equinox' own means."""
    pair = (nn.Embedding(5, 4, key=key), nn.Linear(4, 5, use_bias=False, key=key))
    return nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def use_shared(m: Any, tokens: Array) -> Array:
    embedding, head = m()
    return bent(on_all, head, jnp.tanh(on_all(embedding, tokens)))


def adapted(m: Any, x: Array) -> Array:
    """A layer whose weight is frozen, with one of low rank added to it."""
    return (lax.stop_gradient(m["base"].weight) + m["up"] @ m["down"]) @ x


def half_frozen(module: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: eqx.is_inexact_array(leaf) and "base" not in str(path), module
    )


NETWORKS = {
    "gru, learned start": (made(remembering, cell=lambda k: nn.GRUCell(3, 4, key=k),
        start=array(4), head=linear(4, 2)), (3, 3)),
    "lstm, learned start": (
        made(long_short, cell=lambda k: nn.LSTMCell(3, 4, key=k), h=array(4), c=array(4)), (3, 3)),
    "state space, diagonal": (made(diagonal_state_space, decay=array(3), phase=array(3),
        b=array(2, 4, 3), c=array(2, 3, 4), d=array(4)), (3, 4)),
    "state space, selective": (made(selective_state_space, step=linear(4, 4), b=linear(4, 3),
        c=linear(4, 3), decay=array(4, 3), skip=array(4)), (3, 4)),
    "blocks with names": (made(stack_of_blocks, embedding=lambda k: nn.Embedding(7, 4, key=k),
        positions=array(6, 4), blocks=stacked(Block, 2)), Rows(7, (4,))),
    "attention, rotary": (made(rotary, q=linear(4, 4), k=linear(4, 4), v=linear(4, 4),
        temperature=array()), (3, 4)),
    "attention, sloped": (made(sloped, q=linear(4, 4), k=linear(4, 4), slope=array()), (3, 4)),
    "perceiver": (made(perceiver, latents=array(2, 4),
        attention=lambda k: nn.MultiheadAttention(2, 4, key=k)), (3, 4)),
    "prefix": (made(prefixed, prefix=array(2, 4),
        attention=lambda k: nn.MultiheadAttention(2, 4, key=k)), (3, 4)),
    "modulated": (made(modulated, **{"in": linear(3, 4), "of_condition": linear(2, 8)}), (3,),
        (2,)),
    "fourier operator": (made(fourier_layer, real=array(2, 3, 2), imaginary=array(2, 3, 2),
        local=lambda k: nn.Conv1d(2, 3, 1, key=k)), (2, 6)),
    "graph": (made(graph, message=linear(6, 4), update=linear(7, 2)), (3, 3), Rows(3, (4, 2))),
    "experts, soft": (made(mixture_of_experts, gate=linear(3, 3),
        experts=stacked(linear(3, 2), 3)), (3,)),
    "experts, one": (made(chosen_expert, gate=linear(3, 3), experts=stacked(linear(3, 2), 3)),
        (3,)),
    "hypernetwork, learned task": (made(hyper, of_weights=mlp(2, 15, 4, 1), task=array(2)), (4,)),
    "hypernetwork by data": (
        made(hyper_by_data, of_weights=mlp(2, 12, 4, 1), base=linear(4, 3)), (4,), (2,)),
    "monotone": (made(monotone, a=array(4, 3), b=array(4), c=array(2, 4)), (3,)),
    "sinusoidal": (made(sinusoidal, **{"in": linear(2, 4), "out": linear(6, 2),
        "frequencies": array(2)}), (2,)),
    "operator network": (
        made(operator, branch=mlp(3, 4, 4, 1), trunk=mlp(1, 4, 4, 1), bias=array()), (3,), (1,)),
    "splines": (made(splines, curves=array(2, 3, 5), base=array(2, 3)), (3,)),
    "u-net": (made(u_shaped, a=lambda k: nn.Conv1d(1, 2, 3, padding=1, key=k),
        down=lambda k: nn.Conv1d(2, 3, 2, 2, key=k),
        up=lambda k: nn.ConvTranspose1d(3, 2, 2, 2, key=k),
        b=lambda k: nn.Conv1d(4, 1, 1, key=k)), (1, 6)),
    "prelu and group norm": (made(lambda m, x: m["norm"](m["bend"](m["conv"](x))),
        conv=lambda k: nn.Conv1d(2, 4, 2, key=k), bend=lambda k: nn.PReLU(),
            norm=lambda k: nn.GroupNorm(2, 4)), (2, 5)),
    "weight norm, spectral norm kept": (made(lambda m, x: m["b"](jnp.tanh(m["a"](x))),
        a=lambda k: nn.WeightNorm(nn.Linear(3, 4, key=k)),
        b=lambda k: nn.WeightNorm(nn.Linear(4, 2, key=k), axis=None)), (3,)),
}  # fmt: skip

PAIRS = {
    "siamese": (siamese, made(None, net=mlp(3, 4, 4, 1), temperature=array()), (3,), (3,)),
    "target of the network itself": (
        momentum_target, made(None, net=mlp(3, 4, 4, 1), head=linear(4, 4)), (3,), (3,)),
    "variational": (variational, made(
        None, **{"in": linear(3, 4), "out": linear(2, 3), "s": array(3)}), (3,), (2,)),
    "mixture density": (mixture_density, mlp(2, 9, 4, 1), (2,), ()),
    "shared": (use_shared, shared_module, Rows(5, (3,))),
    **{f"loss, {name}": (lambda m, x, loss=loss: loss(m(x)), mlp(3, 4, 4, 1), (3,))
       for name, loss in LOSSES.items()},
}  # fmt: skip

CASES = (
    *(of_module(name, make, *data) for name, (make, *data) in NETWORKS.items()),
    *(of_module(name, make, *data, loss=loss) for name, (loss, make, *data) in PAIRS.items()),
    of_module("low rank on a frozen base", made(
        adapted, base=linear(4, 3), up=array(3, 2), down=array(2, 4)), (4,), spec=half_frozen),
)  # fmt: skip
