"""Rows of the image models that Equinox's documentation shows, written anew."""

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jaxtyping import Array

from ..rows import Row, classification_loss, image_batch

PATCH = 4


class Encoder(eqx.Module):
    """Attention and a two-layer network, each behind a layer norm and beside a way around it."""

    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    attention: nn.MultiheadAttention
    up: nn.Linear
    down: nn.Linear

    def __init__(self, width: int, hidden: int, heads: int, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.norms = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = nn.Linear(width, hidden, key=keys[1])
        self.down = nn.Linear(hidden, width, key=keys[2])

    def __call__(self, tokens: Array) -> Array:
        normed = jax.vmap(self.norms[0])(tokens)
        tokens = tokens + self.attention(normed, normed, normed)
        mixed = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(tokens)))
        return tokens + jax.vmap(self.down)(mixed)


class VisionTransformer(eqx.Module):
    """Patches of an image as tokens, behind one more token that is read out in the end."""

    patches: nn.Linear
    positions: Array
    readout: Array
    blocks: list[Encoder]
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, side: int, width: int, hidden: int, depth: int, key: Array) -> None:
        keys = jax.random.split(key, depth + 4)
        self.patches = nn.Linear(3 * PATCH**2, width, key=keys[0])
        self.positions = jax.random.normal(keys[1], (1 + (side // PATCH) ** 2, width))
        self.readout = jax.random.normal(keys[2], (1, width))
        self.blocks = [Encoder(width, hidden, 8, key) for key in keys[4:]]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, key=keys[3])

    def __call__(self, image: Array) -> Array:
        count = image.shape[-1] // PATCH
        cut = image.reshape(3, count, PATCH, count, PATCH).transpose(1, 3, 0, 2, 4)
        tokens = jax.vmap(self.patches)(cut.reshape(count**2, -1))
        tokens = jnp.concatenate([self.readout, tokens]) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens[0]))


def vit(batch: int = 16, side: int = 32, width: int = 64, hidden: int = 128, depth: int = 6) -> Row:
    model = VisionTransformer(side, width, hidden, depth, jax.random.key(0))
    tokens = 1 + (side // PATCH) ** 2
    title = f"vision transformer, {tokens} tokens, d={width}, {depth} layers, batch {batch}"
    return Row(title, model, classification_loss, image_batch(batch, 3, side, side))


# Models of the score of a noised image: given the image and how long noise was added.


def score_loss(model: eqx.Module, image: Array, noise: Array, time: Array) -> Array:
    """Denoising score matching at one time; the variance of the noise is 1 - exp(-time)."""
    decay = jnp.exp(-time / 2)
    deviation = jnp.sqrt(-jnp.expm1(-time))
    found = model(time, decay * image + deviation * noise)
    return -jnp.expm1(-time) * jnp.mean((found + noise / deviation) ** 2)


def noised_images(batch: int, side: int) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(1), 3)
    images, noise = (jax.random.normal(key, (batch, 1, side, side)) for key in keys[:2])
    return images, noise, jax.random.uniform(keys[2], (batch,), minval=0.1, maxval=10.0)


class Mixing(eqx.Module):
    """A network over patches and one over channels, each behind a layer norm of everything."""

    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    over_patches: nn.MLP
    over_channels: nn.MLP

    def __init__(self, patches: int, channels: int, hidden: int, key: Array) -> None:
        keys = jax.random.split(key)
        self.norms = nn.LayerNorm((channels, patches)), nn.LayerNorm((patches, channels))
        self.over_patches = nn.MLP(patches, patches, hidden, 1, key=keys[0])
        self.over_channels = nn.MLP(channels, channels, hidden, 1, key=keys[1])

    def __call__(self, y: Array) -> Array:
        y = y + jax.vmap(self.over_patches)(self.norms[0](y))
        y = y.T
        return (y + jax.vmap(self.over_channels)(self.norms[1](y))).T


class Mixer(eqx.Module):
    """Patches by a convolution, blocks that mix them, and back by a transposed convolution."""

    cut: nn.Conv2d
    blocks: list[Mixing]
    norm: nn.LayerNorm
    paste: nn.ConvTranspose2d

    def __init__(self, side: int, channels: int, hidden: int, depth: int, key: Array) -> None:
        keys = jax.random.split(key, depth + 2)
        patches = (side // PATCH) ** 2
        # The time is one more channel.
        self.cut = nn.Conv2d(2, channels, PATCH, stride=PATCH, key=keys[0])
        self.blocks = [Mixing(patches, channels, hidden, key) for key in keys[2:]]
        self.norm = nn.LayerNorm((channels, patches))
        self.paste = nn.ConvTranspose2d(channels, 1, PATCH, stride=PATCH, key=keys[1])

    def __call__(self, time: Array, image: Array) -> Array:
        timed = jnp.concatenate([image, jnp.full_like(image, 1.0) * time / 10])
        y = self.cut(timed)
        channels, rows, columns = y.shape
        y = y.reshape(channels, rows * columns)
        for block in self.blocks:
            y = block(y)
        return self.paste(self.norm(y).reshape(channels, rows, columns))


def mixer(
    batch: int = 32, side: int = 28, channels: int = 64, hidden: int = 512, depth: int = 4
) -> Row:
    model = Mixer(side, channels, hidden, depth, jax.random.key(0))
    title = f"MLP mixer of scores, {side} x {side}, {channels} channels, {depth} layers"
    batches = noised_images(batch, side)
    return Row(f"{title}, batch {batch}", model, score_loss, batches)
