"""Rows of recurrent networks and of encoders, as Equinox's documentation has them, written anew."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import nn
from jaxtyping import Array

from ..rows import Row, classification_loss


class Spirals(eqx.Module):
    """A gated recurrent unit over points of the plane; which way do they turn?"""

    cell: nn.GRUCell
    head: nn.Linear

    def __init__(self, width: int, key: Array) -> None:
        keys = jax.random.split(key)
        self.cell = nn.GRUCell(2, width, key=keys[0])
        self.head = nn.Linear(width, 1, key=keys[1])

    def __call__(self, points: Array) -> Array:
        def step(state: Array, point: Array) -> tuple[Array, None]:
            return self.cell(point, state), None

        state, _ = jax.lax.scan(step, jnp.zeros(self.cell.hidden_size), points)
        return self.head(state)[0]


def binary_loss(model: Spirals, points: Array, turns: Array) -> Array:
    return optax.sigmoid_binary_cross_entropy(model(points), turns)


def gru(batch: int = 64, length: int = 48, width: int = 64) -> Row:
    keys = jax.random.split(jax.random.key(1), 3)
    turns = jax.random.bernoulli(keys[0], 0.5, (batch,)).astype(jnp.float32)
    angles = jnp.linspace(0, 12, length) + 6 * jax.random.uniform(keys[1], (batch, 1))
    angles = angles * (2 * turns[:, None] - 1)
    points = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    points = points / (1 + jnp.arange(length)[:, None])
    model = Spirals(width, jax.random.key(0))
    title = f"GRU over {length} points, h={width}, batch {batch}"
    return Row(title, model, binary_loss, (points, turns))


class EncoderLayer(eqx.Module):
    """Attention and a two-layer network, each added to its input and followed by a layer norm."""

    attention: nn.MultiheadAttention
    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    up: nn.Linear
    down: nn.Linear

    def __init__(self, width: int, hidden: int, heads: int, key: Array) -> None:
        keys = jax.random.split(key, 3)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = nn.MultiheadAttention(heads, width, key=keys[0], **biases)
        self.norms = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, key=keys[1])
        self.down = nn.Linear(hidden, width, key=keys[2])

    def __call__(self, tokens: Array, is_seen: Array) -> Array:
        found = self.attention(tokens, tokens, tokens, mask=is_seen)
        tokens = jax.vmap(self.norms[0])(tokens + found)
        mixed = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(tokens)))
        return jax.vmap(self.norms[1])(tokens + mixed)


class Bert(eqx.Module):
    """An encoder of text: words, segments and positions in, the first token's class out."""

    words: nn.Embedding
    segments: nn.Embedding
    positions: nn.Embedding
    norm: nn.LayerNorm
    layers: list[EncoderLayer]
    pooler: nn.Linear
    head: nn.Linear

    def __init__(self, length: int, width: int, depth: int, vocabulary: int, key: Array) -> None:
        keys = jax.random.split(key, depth + 5)
        self.words = nn.Embedding(vocabulary, width, key=keys[0])
        self.segments = nn.Embedding(2, width, key=keys[1])
        self.positions = nn.Embedding(length, width, key=keys[2])
        self.norm = nn.LayerNorm(width)
        self.layers = [EncoderLayer(width, 4 * width, 2, key) for key in keys[5:]]
        self.pooler = nn.Linear(width, width, key=keys[3])
        self.head = nn.Linear(width, 2, key=keys[4])

    def __call__(self, inputs: tuple[Array, Array]) -> Array:
        tokens, segments = inputs
        length = len(tokens)
        embedded = jax.vmap(self.words)(tokens) + jax.vmap(self.segments)(segments)
        hidden = embedded + jax.vmap(self.positions)(jnp.arange(length))
        hidden = jax.vmap(self.norm)(hidden)
        is_seen = jnp.broadcast_to(tokens > 0, (length, length))
        for layer in self.layers:
            hidden = layer(hidden, is_seen)
        return self.head(jnp.tanh(self.pooler(hidden[0])))


def _text_loss(model: Any, tokens: Array, segments: Array, label: Array) -> Array:
    return classification_loss(lambda inputs: model(inputs), (tokens, segments), label)


def bert(
    batch: int = 16, length: int = 128, width: int = 128, depth: int = 2, vocabulary: int = 30_522
) -> Row:
    """The smallest of the published sizes, as the documentation fine-tunes it."""
    model = Bert(length, width, depth, vocabulary, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    tokens = jax.random.randint(keys[0], (batch, length), 1, vocabulary)
    ends = jax.random.randint(keys[1], (batch, 1), length // 4, length)
    tokens = jnp.where(jnp.arange(length) < ends, tokens, 0)
    labels = jax.random.randint(keys[2], (batch,), 0, 2)
    title = f"BERT T={length}, d={width}, {depth} layers, V={vocabulary}, batch {batch}"
    return Row(title, model, _text_loss, (tokens, jnp.zeros_like(tokens), labels))
