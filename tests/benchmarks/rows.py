"""The models and batches that are measured: plain Equinox, plain losses, float32."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import nn
from jaxtyping import Array


class Row(NamedTuple):
    """A model, its loss on one example, a batch, and what of the model is trained."""

    title: str
    model: Any
    loss: Callable[..., Array]
    batch: tuple[Array, ...]
    filter_spec: Any = eqx.is_inexact_array

    @property
    def batch_size(self) -> int:
        return self.batch[0].shape[0]

    def split(self) -> tuple[Any, Any, Any]:
        """The model as what is trained, the other arrays, and the rest."""
        params, rest = eqx.partition(self.model, self.filter_spec)
        return params, *eqx.partition(rest, eqx.is_array)

    def loss_of_parts(self) -> Callable[..., Array]:
        """The loss for libraries that know no models: (params, frozen, *example) -> scalar."""
        _, _, static = self.split()
        return lambda params, frozen, *example: self.loss(
            eqx.combine(params, frozen, static), *example
        )

    def total_of_parts(self) -> Callable[..., Array]:
        """The loss summed over a batch: (params, frozen, *batch) -> scalar."""
        losses = jax.vmap(self.loss_of_parts(), self.axes)
        return lambda *args: losses(*args).sum()

    @property
    def axes(self) -> tuple[int | None, ...]:
        """What `vmap` goes over of (params, frozen, *batch)."""
        return None, None, *(0 for _ in self.batch)

    @property
    def batch_argnums(self) -> tuple[int, ...]:
        """Where the arrays of an example stand among that function's arguments."""
        return tuple(range(2, 2 + len(self.batch)))


def classification_loss(model: Callable[[Array], Array], x: Array, label: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), label)


def language_loss(model: Callable[[Array], Array], tokens: Array, targets: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()


def image_batch(batch: int, *shape: int) -> tuple[Array, Array]:
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], (batch, *shape)), jax.random.randint(keys[1], (batch,), 0, 10)


def mlp(batch: int = 64, inputs: int = 784, width: int = 512, depth: int = 3) -> Row:
    model = nn.MLP(inputs, 10, width, depth, key=jax.random.key(0))
    title = f"MLP {'-'.join(map(str, (inputs, *depth * (width,), 10)))}, batch {batch}"
    return Row(title, model, classification_loss, image_batch(batch, inputs))


class CNN(eqx.Module):
    """Two strided convolutions, each with group norm, and two dense layers."""

    conv1: nn.Conv2d
    norm1: nn.GroupNorm
    conv2: nn.Conv2d
    norm2: nn.GroupNorm
    dense: nn.Linear
    head: nn.Linear

    def __init__(self, side: int, channels: int, width: int, key: Array) -> None:
        keys = jax.random.split(key, 4)
        self.conv1 = nn.Conv2d(1, channels, 3, stride=2, padding=1, key=keys[0])
        self.norm1 = nn.GroupNorm(8, channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, key=keys[1])
        self.norm2 = nn.GroupNorm(8, 2 * channels)
        self.dense = nn.Linear(2 * channels * (side // 4) ** 2, width, key=keys[2])
        self.head = nn.Linear(width, 10, key=keys[3])

    def __call__(self, image: Array) -> Array:
        hidden = jax.nn.relu(self.norm1(self.conv1(image)))
        hidden = jax.nn.relu(self.norm2(self.conv2(hidden)))
        return self.head(jax.nn.relu(self.dense(hidden.ravel())))


def cnn(batch: int = 64, side: int = 28, channels: int = 32, width: int = 256) -> Row:
    model = CNN(side, channels, width, jax.random.key(0))
    title = (
        f"CNN {side} x {side}, conv {channels} and {2 * channels} stride 2, group norm, "
        f"dense {width}, batch {batch}"
    )
    images = image_batch(batch, 1, side, side)
    return Row(title, model, classification_loss, images)


class Block(eqx.Module):
    """Causal attention with four heads and a two-layer network, each behind a layer norm."""

    before: nn.LayerNorm
    qkv: nn.Linear
    out: nn.Linear
    after: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear

    def __init__(self, width: int, key: Array) -> None:
        keys = jax.random.split(key, 4)
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, key=keys[0])
        self.out = nn.Linear(width, width, key=keys[1])
        self.after = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, key=keys[2])
        self.down = nn.Linear(4 * width, width, key=keys[3])

    def __call__(self, hidden: Array) -> Array:
        hidden = hidden + jax.vmap(self.out)(self._attend(jax.vmap(self.before)(hidden)))
        mixed = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.after)(hidden)))
        return hidden + jax.vmap(self.down)(mixed)

    def _attend(self, hidden: Array) -> Array:
        length, width = hidden.shape
        qkv = jax.vmap(self.qkv)(hidden)
        query, key, value = (a.reshape(length, 4, -1) for a in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("thd,shd->hts", query, key) / jnp.sqrt(query.shape[-1])
        seen = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        return jnp.einsum("hts,shd->thd", weights, value).reshape(length, width)


class GPT(eqx.Module):
    """A language model with learned positions and a head of its own."""

    embedding: nn.Embedding
    positions: Array
    blocks: list[Block]
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, length: int, width: int, depth: int, vocabulary: int, key: Array) -> None:
        keys = jax.random.split(key, depth + 3)
        self.embedding = nn.Embedding(vocabulary, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (length, width))
        self.blocks = [Block(width, key) for key in keys[3:]]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, use_bias=False, key=keys[2])

    def __call__(self, tokens: Array) -> Array:
        hidden = jax.vmap(self.embedding)(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return jax.vmap(self.head)(jax.vmap(self.norm)(hidden))


def gpt(
    batch: int = 16, length: int = 128, width: int = 256, depth: int = 4, vocabulary: int = 1024
) -> Row:
    model = GPT(length, width, depth, vocabulary, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    title = f"GPT T={length}, d={width}, {depth} layers, V={vocabulary}, batch {batch}"
    return Row(title, model, language_loss, (tokens, jnp.roll(tokens, -1, axis=1)))


class StackedGPT(eqx.Module):
    """Layers stacked, under scan and rematerialised; the embedding is the head as well."""

    embedding: nn.Embedding
    positions: Array
    blocks: Block
    norm: nn.LayerNorm

    def __init__(self, length: int, width: int, depth: int, vocabulary: int, key: Array) -> None:
        keys = jax.random.split(key, depth + 2)
        self.embedding = nn.Embedding(vocabulary, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (length, width))
        self.blocks = eqx.filter_vmap(lambda key: Block(width, key))(keys[2:])
        self.norm = nn.LayerNorm(width)

    def __call__(self, tokens: Array) -> Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def layer(hidden: Array, arrays: Any) -> tuple[Array, None]:
            return eqx.combine(arrays, static)(hidden), None

        hidden = jax.vmap(self.embedding)(tokens) + self.positions
        hidden, _ = jax.lax.scan(layer, hidden, arrays)
        return jax.vmap(self.norm)(hidden) @ self.embedding.weight.T


def gpt_stacked(
    batch: int = 16, length: int = 128, width: int = 256, depth: int = 4, vocabulary: int = 1024
) -> Row:
    row = gpt(batch, length, width, depth, vocabulary)
    model = StackedGPT(length, width, depth, vocabulary, jax.random.key(0))
    title = row.title.replace("GPT", "GPT stacked, under scan and remat, tied,")
    return row._replace(title=title, model=model)


class LowRankLinear(eqx.Module):
    """A frozen linear layer plus two thin matrices that are trained."""

    base: nn.Linear
    down: Array
    up: Array

    def __init__(self, base: nn.Linear, rank: int, key: Array) -> None:
        self.base = base
        keys = jax.random.split(key)
        self.down = jax.random.normal(keys[0], (rank, base.in_features)) * base.in_features**-0.5
        # Training starts at zero, where the gradient of `down` is zero too; this is a later step.
        self.up = jax.random.normal(keys[1], (base.out_features, rank)) * rank**-0.5

    def __call__(self, x: Array) -> Array:
        return self.base(x) + self.up @ (self.down @ x)


def gpt_lora(
    batch: int = 16,
    length: int = 128,
    width: int = 256,
    depth: int = 4,
    vocabulary: int = 1024,
    rank: int = 8,
) -> Row:
    """The GPT with adapters on the projections of attention; everything else is frozen."""
    row = gpt(batch, length, width, depth, vocabulary)
    model, trained = row.model, jax.tree.map(lambda _: False, row.model)
    for depth_at, key in enumerate(jax.random.split(jax.random.key(2), depth)):
        for name in ("qkv", "out"):
            where = lambda m, i=depth_at, name=name: getattr(m.blocks[i], name)  # noqa: E731
            adapted = LowRankLinear(where(model), rank, key)
            only_thin = jax.tree.map(lambda _: False, adapted)
            only_thin = eqx.tree_at(lambda m: (m.down, m.up), only_thin, (True, True))
            model = eqx.tree_at(where, model, adapted)
            trained = eqx.tree_at(where, trained, only_thin)
    return row._replace(
        title=row.title.replace("GPT", f"GPT with LoRA rank {rank} on attention,"),
        model=model,
        filter_spec=trained,
    )


ROWS: dict[str, Callable[..., Row]] = {
    "mlp": mlp,
    "mlp_8M": functools.partial(mlp, width=1870),
    "cnn": cnn,
    "gpt_small": functools.partial(gpt, batch=32, length=64, width=128, depth=2),
    "gpt": gpt,
    "gpt_lora": gpt_lora,
    "gpt_stacked": gpt_stacked,
}

# Sizes at which every model runs in no time: to see that everything works, not to measure.
_TINY = {"batch": 4, "length": 5, "width": 8, "depth": 1, "hidden": 8, "vocabulary": 11}
_TINY |= {"inputs": 6, "side": 8, "channels": 8, "rank": 2, "size": 3, "layers": 2}


def tiny(make: Callable[..., Row]) -> dict[str, int]:
    """Tiny sizes for the arguments of a function that makes a row."""
    return {name: _TINY[name] for name in inspect.signature(make).parameters if name in _TINY}
