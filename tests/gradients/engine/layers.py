"""Every layer of `eqx.nn` that has parameters, alone, with a loss and a batch."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import nn
from jaxtyping import Array

from tests.models import Case

# A layer from its name, made when a test asks for it: making layers takes longer than testing them.
_MAKERS: dict[str, Callable[[], Case]] = {}


@functools.cache
def case(name: str) -> Case:
    return _MAKERS[name]()


def layer(name: str, make: Callable[..., Any], *shapes: tuple[int, ...], loss: Any = None) -> None:
    """Enters a layer that takes arrays of the given shapes."""

    def draw(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
        return tuple(jnp.asarray(rng.normal(size=(size, *s)), jnp.float32) for s in shapes)

    def whole_case() -> Case:
        return Case(name, random_like(make(key=jax.random.key(7))), loss or bent, draw)

    _MAKERS[name] = whole_case


def random_like(model: Any) -> Any:
    """The model with every parameter random: ones and zeros of a fresh norm layer hide mistakes."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> Any:
        if not eqx.is_inexact_array(leaf):
            return leaf
        return leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(draw, model)


def bent(model: Callable[..., Array], *inputs: Array) -> Array:
    """A loss that tells every output of a layer from its neighbors, and bends each."""
    output = model(*inputs)
    weights = 1 + jnp.arange(output.size, dtype=output.dtype).reshape(output.shape) % 3
    return jnp.sum(weights * (jnp.sin(output) + output / 2))


def over_tokens(model: Any, tokens: Array) -> Array:
    return bent(jax.vmap(model), tokens)


def keyless(make: Callable[[], Any]) -> Callable[..., Any]:
    return lambda key: make()


# Linear layers and what is made of them.

layer("linear", partial(nn.Linear, 4, 3), (4,))
layer("linear_scalars", partial(nn.Linear, "scalar", "scalar"), ())
layer("linear_tokens", partial(nn.Linear, 4, 3), (5, 4), loss=over_tokens)
layer("mlp", partial(nn.MLP, 4, 2, 5, 2), (4,))
layer(
    "sequential",
    lambda key: nn.Sequential(
        [nn.Linear(4, 3, key=key), nn.Lambda(jax.nn.silu), nn.Identity(), nn.LayerNorm(3)]
    ),
    (4,),
)

# Convolutions: strides, padding, dilation, groups.

_ALL = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
layer("conv1d_all", partial(nn.Conv1d, 4, 6, 3, **_ALL), (4, 9))
layer("conv1d_circular", partial(nn.Conv1d, 2, 3, 3, padding=1, padding_mode="CIRCULAR"), (2, 5))
layer("conv2d", partial(nn.Conv2d, 2, 3, (2, 3), (2, 1), ((1, 0), (0, 2))), (2, 5, 4))
layer("conv2d_all", partial(nn.Conv2d, 4, 2, 3, **_ALL), (4, 6, 7))
layer("conv2d_depthwise", partial(nn.Conv2d, 3, 6, 2, groups=3), (3, 4, 4))
layer("conv3d", partial(nn.Conv3d, 2, 4, 2, (1, 2, 1), 1, groups=2), (2, 2, 3, 2))
layer("conv_transpose1d", partial(nn.ConvTranspose1d, 2, 3, 3), (2, 4))
layer("conv_transpose1d_all", partial(nn.ConvTranspose1d, 4, 2, 3, 2, 1, 1, 2, 2), (4, 4))
layer("conv_transpose2d", partial(nn.ConvTranspose2d, 2, 3, (3, 2), (2, 1), (1, 0)), (2, 3, 3))
layer("conv_transpose2d_all", partial(nn.ConvTranspose2d, 4, 2, 2, 2, 1, 1, 2, 2), (4, 2, 3))
layer("conv_transpose3d", partial(nn.ConvTranspose3d, 2, 2, 2, 2, groups=2), (2, 2, 1, 2))

# Normalisation.

layer("layer_norm_tokens", keyless(lambda: nn.LayerNorm(4)), (3, 4), loss=over_tokens)
layer("rms_norm_tokens", keyless(lambda: nn.RMSNorm(4)), (3, 4), loss=over_tokens)
layer("group_norm", keyless(lambda: nn.GroupNorm(2, 4)), (4, 3, 2))

# Embedding.


def _embedding() -> Case:
    def draw(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
        return (jnp.asarray(rng.integers(0, 4, (size, 6)), jnp.int32),)

    return Case("embedding", nn.Embedding(7, 3, key=jax.random.key(7)), over_tokens, draw)


_MAKERS["embedding"] = _embedding

# Attention.


def causal(model: nn.MultiheadAttention, x: Array) -> Array:
    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
    return bent(model, x, x, x, mask)


layer("attention", partial(nn.MultiheadAttention, 2, 4), (3, 4), loss=causal)
layer(
    "attention_cross",
    partial(
        nn.MultiheadAttention,
        *(2, 4, 3, 5, 6, 3, 2),
        use_query_bias=True,
        use_key_bias=True,
        use_value_bias=True,
        use_output_bias=True,
    ),
    (2, 4),
    (3, 3),
    (3, 5),
)

# Recurrent cells, one step and many.


def over_time(cell: Any, sequence: Array, state: Any) -> Array:
    def step(state: Any, x: Array) -> tuple[Any, Array]:
        state = cell(x, state)
        return state, jax.tree.leaves(state)[0]

    return bent(lambda: jax.lax.scan(step, state, sequence)[1])


def lstm_step(cell: nn.LSTMCell, x: Array, h: Array, c: Array) -> Array:
    return bent(lambda: jnp.concatenate(cell(x, (h, c))))


def lstm_over_time(cell: nn.LSTMCell, sequence: Array, h: Array, c: Array) -> Array:
    return over_time(cell, sequence, (h, c))


layer("gru", partial(nn.GRUCell, 3, 2), (3,), (2,))
layer("gru_scan", partial(nn.GRUCell, 3, 2), (4, 3), (2,), loss=over_time)
layer("lstm", partial(nn.LSTMCell, 3, 2), (3,), (2,), (2,), loss=lstm_step)
layer("lstm_scan", partial(nn.LSTMCell, 3, 2), (4, 3), (2,), (2,), loss=lstm_over_time)

SITES = tuple(_MAKERS)
"""The layers of which no parameter may be `whole`."""

# Layers that use a parameter otherwise than by one product with data.


class LowRank(eqx.Module):
    """A linear layer and a product of two thin matrices beside it."""

    base: nn.Linear
    down: nn.Linear
    up: nn.Linear

    def __init__(self, key: Array) -> None:
        self.base = nn.Linear(4, 3, key=key)
        self.down = nn.Linear(4, 2, use_bias=False, key=key)
        self.up = nn.Linear(2, 3, use_bias=False, key=key)

    def __call__(self, x: Array) -> Array:
        return self.base(x) + self.up(self.down(x))


def spectral_norm(key: Array, inference: bool) -> Any:
    make = eqx.nn.make_with_state(nn.SpectralNorm)
    return make(nn.Linear(4, 3, key=key), "weight", inference=inference, key=key)


def with_state(model: Any, x: Array) -> Array:
    module, state = model
    return bent(lambda: module(x, jax.lax.stop_gradient(state))[0])


layer("prelu", keyless(nn.PReLU), (5,))
layer("low_rank", LowRank, (4,))
layer("weight_norm", lambda key: nn.WeightNorm(nn.Linear(4, 3, key=key)), (4,))
layer("weight_norm_conv", lambda key: nn.WeightNorm(nn.Conv1d(2, 3, 2, key=key)), (2, 4))
layer("spectral_norm", partial(spectral_norm, inference=False), (4,), loss=with_state)
layer("spectral_norm_inference", partial(spectral_norm, inference=True), (4,), loss=with_state)

ALL = tuple(_MAKERS)
