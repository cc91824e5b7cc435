"""Small Equinox models with a loss on one example and a batch to match, for every test to share.

Losses follow the dtype of what they are given, so that one and the same loss runs in bfloat16 under
a policy and in float64 under the oracle.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Parameters, by NumPy: a program for each shape compiles for a second. In `vmap`, by JAX."""
    if isinstance(key, jax.core.Tracer):
        return jax.random.normal(key, shape)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(rng.normal(size=shape), "f4")


class Case(NamedTuple):
    """A model, its loss on one example, and where its batches come from."""

    name: str
    model: Any
    loss: Callable[..., Any]
    draw: Callable[[np.random.Generator, int], tuple[Any, ...]]
    filter_spec: Any = eqx.is_inexact_array

    def batch(self, size: int, seed: int = 0) -> tuple[Any, ...]:
        """The arguments after the model, each leaf with a leading axis of `size`."""
        # Each case has numbers of its own: two that share a seed must not share their inputs.
        return self.draw(np.random.default_rng((seed, zlib.crc32(self.name.encode()))), size)


def cross_entropy(logits: Array, label: Array) -> Array:
    return -jax.nn.log_softmax(logits)[label]


# Linear regression: a model that is a plain dictionary of arrays, as pure JAX code has it.


def squared_error(model: dict[str, Array], x: Array, y: Array) -> Array:
    return 0.5 * (jnp.vdot(model["weight"], x) + model["bias"] - y) ** 2


def _draw_regression(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
    return (
        jnp.asarray(rng.normal(size=(size, 5)), jnp.float32),
        jnp.asarray(rng.normal(size=size), jnp.float32),
    )


@functools.cache
def linear_regression() -> Case:
    rng = np.random.default_rng(1)
    model = {
        "weight": jnp.asarray(rng.normal(size=5), jnp.float32),
        "bias": jnp.asarray(0.3, jnp.float32),
    }
    return Case("linear_regression", model, squared_error, _draw_regression)


# A multilayer perceptron on vectors.


def mlp_loss(model: eqx.nn.MLP, x: Array, label: Array) -> Array:
    return cross_entropy(model(x), label)


def _draw(shape: tuple[int, ...], rng: np.random.Generator, size: int) -> tuple[Any, ...]:
    """Arrays of a shape, each with one of three labels."""
    return (
        jnp.asarray(rng.normal(size=(size, *shape)), jnp.float32),
        jnp.asarray(rng.integers(0, 3, size), jnp.int32),
    )


@functools.cache
def mlp(depth: int = 2) -> Case:
    model = eqx.nn.MLP(6, 3, 8, depth, activation=jnp.tanh, key=jax.random.key(2))
    return Case("mlp", model, mlp_loss, functools.partial(_draw, (6,)))


@functools.cache
def frozen_mlp() -> Case:
    """Only the last layer, and the first one's bias, are trained."""
    case = mlp()
    spec = jax.tree.map(lambda _: False, case.model)
    trained = lambda m: (m.layers[0].bias, m.layers[-1].weight, m.layers[-1].bias)  # noqa: E731
    spec = eqx.tree_at(trained, spec, (True,) * 3)
    return case._replace(name="frozen_mlp", filter_spec=spec)


# A convolutional network with group norm.


class CNN(eqx.Module):
    first: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    second: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, 4, 3, padding=1, key=keys[0])
        self.norm = eqx.nn.GroupNorm(2, 4)
        self.second = eqx.nn.Conv2d(4, 4, 3, stride=2, key=keys[1])
        self.head = eqx.nn.Linear(4 * 3 * 3, 3, key=keys[2])

    def __call__(self, image: Array) -> Array:
        hidden = jax.nn.silu(self.norm(self.first(image)))
        return self.head(jax.nn.silu(self.second(hidden)).ravel())


def cnn_loss(model: CNN, image: Array, label: Array) -> Array:
    return cross_entropy(model(image), label)


@functools.cache
def cnn() -> Case:
    return Case("cnn", CNN(jax.random.key(3)), cnn_loss, functools.partial(_draw, (1, 8, 8)))


# A transformer: its layers are stacked, under scan and checkpoint, and the embedding is the head.


class Block(eqx.Module):
    """Attention and a two-layer network, each behind a norm."""

    before: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    after: eqx.nn.RMSNorm
    mix: eqx.nn.MLP

    def __init__(self, key: Array) -> None:
        self.before, self.after = eqx.nn.LayerNorm(4), eqx.nn.RMSNorm(4)
        self.attention = eqx.nn.MultiheadAttention(2, 4, use_value_bias=True, key=key)
        self.mix = eqx.nn.MLP(4, 4, 6, 1, activation=jax.nn.gelu, key=key)

    def __call__(self, hidden: Array) -> Array:
        seen = jnp.tril(jnp.ones((len(hidden), len(hidden)), bool))
        normed = jax.vmap(self.before)(hidden)
        hidden = hidden + self.attention(normed, normed, normed, mask=seen)
        return hidden + jax.vmap(self.mix)(jax.vmap(self.after)(hidden))


class GPT(eqx.Module):
    embedding: eqx.nn.Embedding
    position: Array
    blocks: Block
    norm: eqx.nn.LayerNorm

    def __init__(self, key: Array) -> None:
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(7, 4, key=keys[0])
        self.position = 0.1 * normal(keys[1], (5, 4))
        self.blocks = eqx.filter_vmap(Block)(keys[2:])
        self.norm = eqx.nn.LayerNorm(4)

    def __call__(self, tokens: Array) -> Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def layer(hidden: Array, arrays: Any) -> tuple[Array, None]:
            return eqx.combine(arrays, static)(hidden), None

        start = jax.vmap(self.embedding)(tokens) + self.position
        hidden, _ = jax.lax.scan(layer, start, arrays)
        return jax.vmap(self.norm)(hidden) @ self.embedding.weight.T


def gpt_loss(model: GPT, tokens: dict[str, Array]) -> Array:
    return jax.vmap(cross_entropy)(model(tokens["input"]), tokens["target"]).mean()


def _draw_tokens(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
    tokens = jnp.asarray(rng.integers(0, 7, (size, 6)), jnp.int32)
    return ({"input": tokens[:, :-1], "target": tokens[:, 1:]},)


@functools.cache
def gpt() -> Case:
    return Case("gpt", GPT(jax.random.key(4)), gpt_loss, _draw_tokens)


# A model that draws: the mask comes from bits, which are the same whatever the float dtype
# (`jax.random.bernoulli` draws other numbers when x64 is on).


def dropout_loss(model: eqx.nn.MLP, x: Array, label: Array, *, key: Array) -> Array:
    first, second = model.layers
    hidden = jnp.tanh(first(x))
    kept = jax.random.bits(key, hidden.shape, jnp.uint32) % 2 == 0
    return cross_entropy(second(2 * jnp.where(kept, hidden, 0)), label)


@functools.cache
def dropout() -> Case:
    return mlp(depth=1)._replace(name="dropout", loss=dropout_loss)


def all_cases() -> tuple[Case, ...]:
    return linear_regression(), mlp(), frozen_mlp(), cnn(), gpt(), dropout()


# A loss whose gradient is its own input: what the engine does to a gradient is seen with nothing
# else in the way.


def dot(model: Any, x: Any) -> Array:
    """sum of model * x over all leaves; its gradient with respect to the model is x."""
    return sum(jnp.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (model, x)), strict=True))
