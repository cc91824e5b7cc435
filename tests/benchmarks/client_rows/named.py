"""A row of haliax: a language model of named axes, its blocks `haliax.nn.Stacked`."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn.attention import causal_mask, dot_product_attention
from jaxtyping import Array

from ..rows import Row, classification_loss


class Sizes(eqx.Module):
    """The axes of a model."""

    position: Axis
    embed: Axis
    heads: Axis
    head: Axis
    hidden: Axis
    vocabulary: Axis


class NamedBlock(eqx.Module):
    """Causal attention and a two-layer network, each behind a layer norm."""

    before: hnn.LayerNorm
    qkv: hnn.Linear
    out: hnn.Linear
    after: hnn.LayerNorm
    up: hnn.Linear
    down: hnn.Linear
    sizes: Sizes = eqx.field(static=True)

    @staticmethod
    def init(sizes: Sizes, *, key: Array) -> "NamedBlock":
        keys = jax.random.split(key, 4)
        heads, embed = (sizes.heads, sizes.head), sizes.embed
        return NamedBlock(
            hnn.LayerNorm.init(embed),
            hnn.Linear.init(embed, (Axis("qkv", 3), *heads), key=keys[0]),
            hnn.Linear.init(heads, embed, key=keys[1]),
            hnn.LayerNorm.init(embed),
            hnn.Linear.init(embed, sizes.hidden, key=keys[2]),
            hnn.Linear.init(sizes.hidden, embed, key=keys[3]),
            sizes,
        )

    def __call__(self, tokens: NamedArray) -> NamedArray:
        query, key, value = self.qkv(self.before(tokens)).unbind("qkv")
        seen = self.sizes.position.alias("seen")
        key, value = (a.rename({self.sizes.position.name: seen.name}) for a in (key, value))
        mask = causal_mask(self.sizes.position, seen)
        found = dot_product_attention(seen, self.sizes.head, query, key, value, mask=mask)
        tokens = tokens + self.out(found)
        return tokens + self.down(hnn.gelu(self.up(self.after(tokens))))


class NamedGPT(eqx.Module):
    """Words and learned positions, stacked blocks, a layer norm, and the words again as a head."""

    words: hnn.Embedding
    positions: hnn.Embedding
    blocks: hnn.Stacked[NamedBlock]
    norm: hnn.LayerNorm

    def __init__(self, sizes: Sizes, depth: int, key: Array) -> None:
        keys = jax.random.split(key, depth + 2)
        self.words = hnn.Embedding.init(sizes.vocabulary, sizes.embed, key=keys[0])
        self.positions = hnn.Embedding.init(sizes.position, sizes.embed, key=keys[1])
        stacked = hnn.Stacked.init(Axis("layers", depth), NamedBlock, gradient_checkpointing=True)
        self.blocks = stacked(sizes, key=keys[2:])
        self.norm = hnn.LayerNorm.init(sizes.embed)

    def __call__(self, tokens: Array) -> Array:
        position = self.positions.Vocab
        hidden = self.words(hax.named(tokens, position))
        hidden = hidden + self.positions(hax.arange(position))
        logits = self.words.unembed(self.norm(self.blocks.fold(hidden)))
        return logits.rearrange((position, self.words.Vocab)).array


def _loss(model: NamedGPT, tokens: Array, targets: Array) -> Array:
    return classification_loss(model, tokens, targets).mean()


def gpt_named(
    batch: int = 16, length: int = 64, width: int = 128, depth: int = 4, vocabulary: int = 1024
) -> Row:
    sizes = Sizes(
        Axis("position", length),
        Axis("embed", width),
        Axis("heads", 4),
        Axis("head", width // 4),
        Axis("hidden", 4 * width),
        Axis("vocabulary", vocabulary),
    )
    model = NamedGPT(sizes, depth, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    title = f"GPT of haliax blocks, stacked, T={length}, d={width}, {depth} layers, V={vocabulary}"
    batches = tokens, jnp.roll(tokens, -1, axis=1)
    return Row(f"{title}, batch {batch}", model, _loss, batches)
