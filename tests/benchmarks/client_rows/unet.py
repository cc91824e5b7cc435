"""A row of a U-Net that models scores, as Equinox's documentation has one, written anew."""

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jaxtyping import Array

from ..rows import Row
from .images import noised_images, score_loss


def waves(time: Array, width: int) -> Array:
    """A number as sines and cosines of it at geometric frequencies."""
    angles = time * jnp.exp(-jnp.linspace(0.0, jnp.log(10_000.0), width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])


class Attention(eqx.Module):
    """Linear attention between the pixels of an image, beside a way around it."""

    norm: nn.GroupNorm
    qkv: nn.Conv2d
    out: nn.Conv2d
    heads: int = eqx.field(static=True)

    def __init__(self, channels: int, heads: int, key: Array) -> None:
        keys = jax.random.split(key)
        self.norm = nn.GroupNorm(min(channels // 4, 32), channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1, key=keys[0])
        self.out = nn.Conv2d(channels, channels, 1, key=keys[1])
        self.heads = heads

    def __call__(self, x: Array) -> Array:
        channels, rows, columns = x.shape
        qkv = self.qkv(self.norm(x)).reshape(3, self.heads, -1, rows * columns)
        query, key, value = jax.nn.softmax(qkv[0], axis=-2), jax.nn.softmax(qkv[1]), qkv[2]
        context = jnp.einsum("hdn,hen->hde", key, value)
        found = jnp.einsum("hde,hdn->hen", context, query)
        return x + self.out(found.reshape(channels, rows, columns))


class Residual(eqx.Module):
    """Two convolutions behind group norms, the time added in between; it may change the size."""

    norms: tuple[nn.GroupNorm, nn.GroupNorm]
    first: nn.Conv2d
    second: nn.Conv2d
    time: nn.Linear
    around: nn.Conv2d
    attention: Attention | None
    scale: str = eqx.field(static=True)

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        time_width: int,
        key: Array,
        *,
        scale: str = "",
        attends: bool = False,
    ) -> None:
        keys = jax.random.split(key, 5)
        self.scale = scale
        self.norms = tuple(nn.GroupNorm(min(c // 4, 32), c) for c in (channels_in, channels_out))
        self.first = nn.Conv2d(channels_in, channels_out, 3, padding=1, key=keys[0])
        self.second = nn.Conv2d(channels_out, channels_out, 3, padding=1, key=keys[1])
        self.time = nn.Linear(time_width, channels_out, key=keys[2])
        self.around = nn.Conv2d(channels_in, channels_out, 1, key=keys[3])
        self.attention = Attention(channels_out, 4, keys[4]) if attends else None

    def __call__(self, x: Array, time: Array) -> Array:
        hidden = self._scaled(jax.nn.silu(self.norms[0](x)))
        hidden = self.first(hidden) + self.time(jax.nn.silu(time))[:, None, None]
        hidden = self.second(jax.nn.silu(self.norms[1](hidden)))
        hidden = (hidden + self.around(self._scaled(x))) / jnp.sqrt(2.0)
        return hidden if self.attention is None else self.attention(hidden)

    def _scaled(self, x: Array) -> Array:
        channels, rows, columns = x.shape
        if self.scale == "down":
            return x.reshape(channels, rows // 2, 2, columns // 2, 2).mean(axis=(2, 4))
        if self.scale == "up":
            return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        return x


class UNet(eqx.Module):
    """Down to smaller images of more channels and up again, past what was there on the way down."""

    time: nn.MLP
    start: nn.Conv2d
    down: list[list[Residual]]
    middle: list[Residual]
    up: list[list[Residual]]
    norm: nn.GroupNorm
    end: nn.Conv2d
    width: int = eqx.field(static=True)

    def __init__(self, width: int, blocks: int, levels: int, key: Array) -> None:
        keys = iter(jax.random.split(key, 2 * levels * (blocks + 1) + levels + 5))
        self.width = width
        self.time = nn.MLP(width, width, 4 * width, 1, activation=jax.nn.silu, key=next(keys))
        self.start = nn.Conv2d(1, width, 3, padding=1, key=next(keys))
        kept, channels = [width], width
        self.down, self.up = [], []
        widths = [width * 2**level for level in range(levels)]
        for level, wider in enumerate(widths):
            layers: list[Residual] = []
            for _ in range(blocks):
                layers.append(Residual(channels, wider, width, next(keys), attends=level == 1))
                channels = wider
                kept.append(channels)
            if level < levels - 1:
                layers.append(Residual(channels, channels, width, next(keys), scale="down"))
                kept.append(channels)
            self.down.append(layers)
        self.middle = [
            Residual(channels, channels, width, next(keys), attends=attends)
            for attends in (True, False)
        ]
        for level, wider in reversed(tuple(enumerate(widths))):
            layers = []
            for _ in range(blocks + 1):
                joined = channels + kept.pop()
                layers.append(Residual(joined, wider, width, next(keys), attends=level == 1))
                channels = wider
            if level > 0:
                layers.append(Residual(channels, channels, width, next(keys), scale="up"))
            self.up.append(layers)
        self.norm = nn.GroupNorm(min(channels // 4, 32), channels)
        self.end = nn.Conv2d(channels, 1, 1, key=next(keys))

    def __call__(self, time: Array, image: Array) -> Array:
        when = self.time(waves(time, self.width))
        x = self.start(image)
        kept = [x]
        for layer in (layer for level in self.down for layer in level):
            x = layer(x, when)
            kept.append(x)
        for layer in self.middle:
            x = layer(x, when)
        for layer in (layer for level in self.up for layer in level):
            x = layer(x if layer.scale else jnp.concatenate([x, kept.pop()]), when)
        return self.end(jax.nn.silu(self.norm(x)))


def unet(batch: int = 8, side: int = 28, width: int = 16, blocks: int = 1, levels: int = 2) -> Row:
    model = UNet(width, blocks, levels, jax.random.key(0))
    most = width * 2 ** (levels - 1)
    title = f"U-Net of scores, {side} x {side}, {width} to {most} channels, batch {batch}"
    return Row(title, model, score_loss, noised_images(batch, side))
