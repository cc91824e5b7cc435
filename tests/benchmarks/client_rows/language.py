"""Rows of language models: long sequences, tied heads, and a mixture of experts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jaxtyping import Array

from .. import rows
from ..rows import GPT, Row


class Tied(eqx.Module):
    """A language model whose embedding is its head as well."""

    model: GPT

    def __init__(self, model: GPT) -> None:
        self.model = eqx.tree_at(lambda m: m.head.weight, model, None)

    def __call__(self, tokens: Array) -> Array:
        def is_none(x: Any) -> bool:
            return x is None

        words = self.model.embedding.weight
        tied = eqx.tree_at(lambda m: m.head.weight, self.model, words, is_leaf=is_none)
        return tied(tokens)


def gpt_untied(
    batch: int = 8, length: int = 256, width: int = 128, depth: int = 2, vocabulary: int = 1024
) -> Row:
    row = rows.gpt(batch, length, width, depth, vocabulary)
    return row._replace(
        name="gpt_untied", goal=None, title=row.title.replace("GPT", "GPT, head untied,")
    )


def gpt_tied(
    batch: int = 8, length: int = 256, width: int = 128, depth: int = 2, vocabulary: int = 1024
) -> Row:
    row = gpt_untied(batch, length, width, depth, vocabulary)
    return row._replace(
        name="gpt_tied",
        model=Tied(row.model),
        title=row.title.replace("untied", "tied"),
        has_torch_twin=False,
    )


class Experts(eqx.Module):
    """Two-layer networks; each token goes through the one that a router chooses for it."""

    router: nn.Linear
    up: Array
    down: Array

    def __init__(self, width: int, hidden: int, count: int, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.router = nn.Linear(width, count, use_bias=False, key=keys[0])
        self.up = jax.random.normal(keys[1], (count, width, hidden)) * width**-0.5
        self.down = jax.random.normal(keys[2], (count, hidden, width)) * hidden**-0.5

    def __call__(self, tokens: Array) -> Array:
        gates = jax.nn.softmax(jax.vmap(self.router)(tokens))
        chosen = jnp.argmax(gates, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=len(self.up)).astype(jnp.int32)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(tokens[order], self.up, sizes))
        found = jax.lax.ragged_dot(hidden, self.down, sizes)
        of_token = jnp.zeros_like(tokens).at[order].set(found)
        return of_token * jnp.max(gates, axis=-1, keepdims=True)


class ExpertsModel(eqx.Module):
    """Words, positions, layers of experts behind layer norms, and a head."""

    words: nn.Embedding
    positions: Array
    norms: list[nn.LayerNorm]
    layers: list[Experts]
    head: nn.Linear

    def __init__(
        self,
        length: int,
        width: int,
        depth: int,
        experts: int,
        vocabulary: int,
        key: Array,
    ) -> None:
        keys = jax.random.split(key, depth + 3)
        self.words = nn.Embedding(vocabulary, width, key=keys[0])
        self.positions = jax.random.normal(keys[1], (length, width))
        self.norms = [nn.LayerNorm(width) for _ in range(depth)]
        self.layers = [Experts(width, 4 * width, experts, key) for key in keys[3:]]
        self.head = nn.Linear(width, vocabulary, use_bias=False, key=keys[2])

    def __call__(self, tokens: Array) -> Array:
        """Of one sequence, or of several, whose tokens meet in the experts' products alone."""
        hidden = (self.words.weight[tokens] + self.positions).reshape(tokens.size, -1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + layer(jax.vmap(norm)(hidden))
        return jax.vmap(self.head)(hidden)


def _whole_batch_loss(model: ExpertsModel, tokens: Array, targets: Array) -> Array:
    return tokens.shape[0] * rows.language_loss(model, tokens, targets.ravel())


def experts(
    batch: int = 16,
    length: int = 64,
    width: int = 64,
    depth: int = 2,
    experts: int = 4,
    vocabulary: int = 256,
) -> Row:
    model = ExpertsModel(length, width, depth, experts, vocabulary, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    title = (
        f"mixture of {experts} experts by ragged_dot, T={length}, d={width}, {depth} layers, "
        f"V={vocabulary}, batch {batch}"
    )
    batches = tokens, jnp.roll(tokens, -1, axis=1)
    # JAX cannot map `ragged_dot` over examples that share the experts; without privacy all tokens
    # of a batch go through one product.
    return Row("experts", title, model, rows.language_loss, batches, batch_loss=_whole_batch_loss)
