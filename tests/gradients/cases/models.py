"""A small transformer, with its layers in a scan."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import nn
from jaxtyping import Array

from tests.gradients.cases.tables import Table, random_like
from tests.models import Case, cross_entropy

WIDTH, VOCABULARY, LENGTH = 4, 7, 5


class Block(eqx.Module):
    """Attention and a two-layer network, each behind a norm."""

    before: nn.LayerNorm
    attention: nn.MultiheadAttention
    after: nn.RMSNorm
    mix: nn.MLP

    def __init__(self, key: Array) -> None:
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(2, WIDTH, use_value_bias=True, key=key)
        self.after = nn.RMSNorm(WIDTH)
        self.mix = nn.MLP(WIDTH, WIDTH, 6, 1, activation=jax.nn.gelu, key=key)

    def __call__(self, hidden: Array) -> Array:
        mask = jnp.tril(jnp.ones((len(hidden), len(hidden)), bool))
        normed = jax.vmap(self.before)(hidden)
        hidden = hidden + self.attention(normed, normed, normed, mask)
        return hidden + jax.vmap(self.mix)(jax.vmap(self.after)(hidden))


class StackedGPT(eqx.Module):
    """Layers stacked, under scan and checkpoint; the embedding is the head as well."""

    embedding: nn.Embedding
    blocks: Block
    norm: nn.LayerNorm

    def __init__(self, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.blocks = eqx.filter_vmap(Block)(keys[1:])
        self.norm = nn.LayerNorm(WIDTH)

    def __call__(self, tokens: Array) -> Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def layer(hidden: Array, arrays: Any) -> tuple[Array, None]:
            return eqx.combine(arrays, static)(hidden), None

        hidden, _ = jax.lax.scan(layer, jax.vmap(self.embedding)(tokens), arrays)
        return jax.vmap(self.norm)(hidden) @ self.embedding.weight.T


def language_loss(model: Callable[[Array], Array], tokens: Array) -> Array:
    return jax.vmap(cross_entropy)(model(tokens[:-1]), tokens[1:]).mean()


def _draw_tokens(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
    return (jnp.asarray(rng.integers(0, VOCABULARY, (size, LENGTH + 1)), jnp.int32),)


@functools.cache
def stacked_gpt() -> Case:
    model = random_like(StackedGPT(jax.random.key(2)))
    return Case("stacked_gpt", model, language_loss, _draw_tokens)


TABLE: Table = {"stacked_gpt": lambda name: stacked_gpt()}
