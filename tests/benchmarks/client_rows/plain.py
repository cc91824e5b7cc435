"""Rows of plain layers, with what losses and layers of others do to parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jaxtyping import Array

from ..rows import Row, classification_loss, image_batch, mlp

PENALTY = 1e-4


def _penalised_loss(model: nn.MLP, x: Array, label: Array) -> Array:
    squares = (jnp.sum(layer.weight**2) for layer in model.layers)
    return classification_loss(model, x, label) + PENALTY * sum(squares)


def mlp_l2(batch: int = 64, inputs: int = 784, width: int = 256, depth: int = 3) -> Row:
    """Weight decay that is written into the loss."""
    row = mlp(batch, inputs, width, depth)
    return row._replace(title=f"{row.title}, with an L2 term", loss=_penalised_loss)


def _distilled_loss(model: nn.MLP, x: Array, other: Array, label: Array) -> Array:
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    teacher = eqx.combine(jax.lax.stop_gradient(arrays), static)
    target = jax.nn.softmax(teacher(other))
    agreement = -jnp.sum(target * jax.nn.log_softmax(model(x)))
    return classification_loss(model, x, label) + agreement


def mlp_target(batch: int = 64, inputs: int = 784, width: int = 256, depth: int = 3) -> Row:
    """Self-distillation: the model as it is now says what a second view of the input is."""
    row = mlp(batch, inputs, width, depth)
    x, label = row.batch
    other = x + 0.1 * jax.random.normal(jax.random.key(2), x.shape)
    title = f"{row.title}, with a stop_gradient target"
    return Row(title, row.model, _distilled_loss, (x, other, label))


class MaskedLinear(eqx.Module):
    """A linear layer, some of whose weights are held at zero."""

    weight: Array
    bias: Array
    mask: Array

    def __init__(self, features_in: int, features_out: int, key: Array) -> None:
        keys = jax.random.split(key)
        shape = features_out, features_in
        self.weight = jax.random.normal(keys[0], shape) * features_in**-0.5
        self.bias = jnp.zeros(features_out)
        self.mask = jax.random.bernoulli(keys[1], 0.5, shape)

    def __call__(self, x: Array) -> Array:
        return (self.weight * self.mask) @ x + self.bias


class MaskedMLP(eqx.Module):
    """Masked layers with rectifiers in between."""

    layers: list[MaskedLinear]

    def __call__(self, x: Array) -> Array:
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


def mlp_masked(batch: int = 64, inputs: int = 784, width: int = 256, depth: int = 3) -> Row:
    widths = (inputs, *depth * (width,), 10)
    keys = jax.random.split(jax.random.key(0), depth + 1)
    model = MaskedMLP([MaskedLinear(*of) for of in zip(widths, widths[1:], keys, strict=False)])
    title = f"MLP of masked weights, {'-'.join(map(str, widths))}, batch {batch}"
    return Row(title, model, classification_loss, image_batch(batch, inputs))


class WeightNormCNN(eqx.Module):
    """Two strided convolutions and a head, each with a direction and a length."""

    convolutions: list[nn.WeightNorm]
    head: nn.WeightNorm

    def __init__(self, side: int, channels: int, key: Array) -> None:
        keys = jax.random.split(key, 3)
        of = {"kernel_size": 3, "stride": 2, "padding": 1}
        first = nn.Conv2d(1, channels, key=keys[0], **of)
        second = nn.Conv2d(channels, 2 * channels, key=keys[1], **of)
        self.convolutions = [nn.WeightNorm(first), nn.WeightNorm(second)]
        features = 2 * channels * (side // 4) ** 2
        self.head = nn.WeightNorm(nn.Linear(features, 10, key=keys[2]))

    def __call__(self, image: Array) -> Array:
        for convolution in self.convolutions:
            image = jax.nn.relu(convolution(image))
        return self.head(image.ravel())


def cnn_weight_norm(batch: int = 64, side: int = 28, channels: int = 32) -> Row:
    model = WeightNormCNN(side, channels, jax.random.key(0))
    title = f"CNN with weight norm, {side} x {side}, {channels} channels, batch {batch}"
    images = image_batch(batch, 1, side, side)
    return Row(title, model, classification_loss, images)


class BagOfWords(eqx.Module):
    """The mean of the words' vectors, and a linear head."""

    words: nn.Embedding
    head: nn.Linear

    def __init__(self, vocabulary: int, width: int, key: Array) -> None:
        keys = jax.random.split(key)
        self.words = nn.Embedding(vocabulary, width, key=keys[0])
        self.head = nn.Linear(width, 4, key=keys[1])

    def __call__(self, tokens: Array) -> Array:
        return self.head(jax.vmap(self.words)(tokens).mean(axis=0))


def bag(batch: int = 64, length: int = 64, vocabulary: int = 10_000, width: int = 64) -> Row:
    keys = jax.random.split(jax.random.key(1))
    tokens = jax.random.randint(keys[0], (batch, length), 0, vocabulary)
    labels = jax.random.randint(keys[1], (batch,), 0, 4)
    title = f"bag of {length} words, V={vocabulary}, d={width}, batch {batch}"
    model = BagOfWords(vocabulary, width, jax.random.key(0))
    return Row(title, model, classification_loss, (tokens, labels))
