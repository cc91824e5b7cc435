"""Small models to measure policies on: plain Equinox, plain losses, float32."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .command import positive


class Workload(NamedTuple):
    """A model, its loss on one example, and a batch."""

    title: str
    model: Any
    loss: Callable[..., Array]
    batch: tuple[Array, Array]


_CLASSES, _TOKENS, _VOCABULARY, _SIDE = 10, 64, 256, 28


def _cross_entropy(logits: Float[Array, " classes"], label: Int[Array, ""]) -> Float[Array, ""]:
    return -jax.nn.log_softmax(logits)[label]


def _classification_loss(model: Any, x: Array, label: Array) -> Array:
    return _cross_entropy(model(x), label)


def _language_loss(model: Any, tokens: Array, targets: Array) -> Array:
    return jnp.mean(jax.vmap(_cross_entropy)(model(tokens), targets))


def _labelled(batch: int, *shape: int) -> tuple[Array, Array]:
    keys = jax.random.split(jax.random.key(1))
    labels = jax.random.randint(keys[1], (batch,), 0, _CLASSES)
    return jax.random.normal(keys[0], (batch, *shape)), labels


def mlp(batch: int, width: int) -> Workload:
    """Three layers on vectors of 784."""
    model = eqx.nn.MLP(_SIDE**2, _CLASSES, width, 2, key=jax.random.key(0))
    title = f"MLP 784-{width}-{width}-10, batch {batch}"
    return Workload(title, model, _classification_loss, _labelled(batch, _SIDE**2))


def cnn(batch: int, width: int) -> Workload:
    """Two strided convolutions with group norm, and a dense layer, on 28 x 28 images."""
    keys = jax.random.split(jax.random.key(0), 3)
    groups = 4 if width % 4 == 0 else 1
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, width, 3, stride=2, padding=1, key=keys[0]),
            eqx.nn.GroupNorm(groups, width),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(width, width, 3, stride=2, padding=1, key=keys[1]),
            eqx.nn.GroupNorm(groups, width),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(width * (_SIDE // 4) ** 2, _CLASSES, key=keys[2]),
        ]
    )
    title = f"CNN 28 x 28, two convolutions of {width}, batch {batch}"
    return Workload(title, model, _classification_loss, _labelled(batch, 1, _SIDE, _SIDE))


class _Block(eqx.Module):
    """Causal attention and a two-layer network, each behind a layer norm."""

    before: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    after: eqx.nn.LayerNorm
    mix: eqx.nn.MLP

    def __init__(self, width: int, key: Array) -> None:
        keys = jax.random.split(key)
        heads = 4 if width % 4 == 0 else 1
        self.before = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.after = eqx.nn.LayerNorm(width)
        self.mix = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, hidden: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        seen = jnp.tril(jnp.ones((len(hidden), len(hidden)), bool))
        normed = jax.vmap(self.before)(hidden)
        hidden = hidden + self.attention(normed, normed, normed, mask=seen)
        return hidden + jax.vmap(self.mix)(jax.vmap(self.after)(hidden))


class _GPT(eqx.Module):
    """Two blocks between an embedding and a head."""

    embedding: eqx.nn.Embedding
    positions: Float[Array, "tokens width"]
    blocks: list[_Block]
    head: eqx.nn.Linear

    def __init__(self, width: int, key: Array) -> None:
        keys = jax.random.split(key, 5)
        self.embedding = eqx.nn.Embedding(_VOCABULARY, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (_TOKENS, width))
        self.blocks = [_Block(width, key) for key in keys[3:]]
        self.head = eqx.nn.Linear(width, _VOCABULARY, use_bias=False, key=keys[2])

    def __call__(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens vocabulary"]:
        hidden = jax.vmap(self.embedding)(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return jax.vmap(self.head)(hidden)


def gpt(batch: int, width: int) -> Workload:
    """A transformer of two blocks on 64 tokens."""
    shape = (batch, _TOKENS)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, _VOCABULARY)
    title = f"GPT T={_TOKENS}, d={width}, 2 layers, V={_VOCABULARY}, batch {batch}"
    batched = tokens, jnp.roll(tokens, -1, axis=1)
    return Workload(title, _GPT(width, jax.random.key(0)), _language_loss, batched)


WORKLOADS: dict[str, tuple[Callable[[int, int], Workload], int, int]] = {
    "mlp": (mlp, 64, 256),
    "cnn": (cnn, 32, 32),
    "gpt": (gpt, 8, 128),
}
"""By name: how to make it, and the batch and the width that it has by default."""


def add_workload_arguments(parser: argparse.ArgumentParser, examples: str = "examples") -> None:
    """Declares `--model`, `--batch` and `--width`."""
    defaults = ", ".join(
        f"{name}: {batch}, {width}" for name, (_, batch, width) in WORKLOADS.items()
    )
    parser.add_argument("--model", choices=list(WORKLOADS), default="mlp", help="(default: mlp)")
    told = f"{examples} (batch and width: {defaults})"
    parser.add_argument("--batch", type=positive, help=told)
    parser.add_argument("--width", type=positive, help="features or channels of a layer")
