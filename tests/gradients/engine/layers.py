"""Every layer of `eqx.nn` that has parameters, alone, with a loss and a batch."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tests.models import Case

KEY = jax.random.key(7)


def random_like(model: Any, seed: int = 0) -> Any:
    """The model with every parameter random: ones and zeros of a fresh norm layer hide mistakes."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        if not eqx.is_inexact_array(leaf):
            return leaf
        return leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(draw, model)


def layer_case(name: str, model: Any, *shapes: tuple[int, ...], loss: Any = None) -> Case:
    def draw(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
        return tuple(jnp.asarray(rng.normal(size=(size, *s)), jnp.float32) for s in shapes)

    return Case(name, random_like(model), loss or bent, draw)


def bent(model: Callable[..., Array], *inputs: Array) -> Array:
    """A loss that tells every output of a layer from its neighbors, and bends each."""
    output = model(*inputs)
    weights = 1 + jnp.arange(output.size, dtype=output.dtype).reshape(output.shape) % 3
    return jnp.sum(weights * (jnp.sin(output) + output / 2))


# Layers that see one thing.


def linear_cases() -> list[Case]:
    nn = eqx.nn
    return [
        layer_case("linear", nn.Linear(4, 3, key=KEY), (4,)),
        layer_case("linear_no_bias", nn.Linear(4, 3, use_bias=False, key=KEY), (4,)),
        layer_case("linear_scalars", nn.Linear("scalar", "scalar", key=KEY), ()),
        layer_case("linear_tokens", nn.Linear(4, 3, key=KEY), (5, 4), loss=over_tokens),
        layer_case("mlp", nn.MLP(4, 2, 5, 2, key=KEY), (4,)),
        layer_case("mlp_scalar", nn.MLP(4, "scalar", 5, 1, key=KEY), (4,)),
        layer_case(
            "sequential",
            nn.Sequential(
                [nn.Linear(4, 3, key=KEY), nn.Lambda(jax.nn.silu), nn.Identity(), nn.LayerNorm(3)]
            ),
            (4,),
        ),
    ]


def over_tokens(model: Any, tokens: Array) -> Array:
    return bent(jax.vmap(model), tokens)


def conv_cases() -> list[Case]:
    nn = eqx.nn
    full = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    return [
        layer_case("conv1d", nn.Conv1d(2, 3, 3, key=KEY), (2, 6)),
        layer_case("conv1d_all", nn.Conv1d(4, 6, 3, **full, key=KEY), (4, 9)),
        layer_case("conv1d_same", nn.Conv1d(2, 3, 4, 2, "SAME", key=KEY), (2, 7)),
        layer_case(
            "conv1d_circular",
            nn.Conv1d(2, 3, 3, padding=1, padding_mode="CIRCULAR", key=KEY),
            (2, 5),
        ),
        layer_case(
            "conv2d", nn.Conv2d(2, 3, (2, 3), (2, 1), ((1, 0), (0, 2)), key=KEY), (2, 5, 4)
        ),
        layer_case("conv2d_all", nn.Conv2d(4, 2, 3, **full, key=KEY), (4, 6, 7)),
        layer_case("conv2d_depthwise", nn.Conv2d(3, 6, 2, groups=3, key=KEY), (3, 4, 4)),
        layer_case("conv3d", nn.Conv3d(2, 4, 2, (1, 2, 1), 1, groups=2, key=KEY), (2, 2, 3, 2)),
        layer_case("conv_transpose1d", nn.ConvTranspose1d(2, 3, 3, key=KEY), (2, 4)),
        layer_case(
            "conv_transpose1d_all",
            nn.ConvTranspose1d(4, 2, 3, 2, 1, 1, 2, 2, key=KEY),
            (4, 4),
        ),
        layer_case(
            "conv_transpose2d", nn.ConvTranspose2d(2, 3, (3, 2), (2, 1), 1, key=KEY), (2, 3, 3)
        ),
        layer_case(
            "conv_transpose2d_all",
            nn.ConvTranspose2d(4, 2, 2, 2, 0, 1, 2, 2, key=KEY),
            (4, 2, 3),
        ),
        layer_case(
            "conv_transpose3d", nn.ConvTranspose3d(2, 2, 2, 2, groups=2, key=KEY), (2, 2, 1, 2)
        ),
    ]


def norm_cases() -> list[Case]:
    nn = eqx.nn
    return [
        layer_case("layer_norm", nn.LayerNorm(5), (5,)),
        layer_case("layer_norm_2d", nn.LayerNorm((2, 3), use_bias=False), (2, 3)),
        layer_case("layer_norm_tokens", nn.LayerNorm(4), (3, 4), loss=over_tokens),
        layer_case("rms_norm", nn.RMSNorm(5), (5,)),
        layer_case("rms_norm_tokens", nn.RMSNorm(4, use_bias=False), (3, 4), loss=over_tokens),
        layer_case("group_norm", nn.GroupNorm(2, 4), (4, 3, 2)),
        layer_case("group_norm_vector", nn.GroupNorm(2, 6), (6,)),
    ]


def embedding_case() -> Case:
    def draw(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
        return (jnp.asarray(rng.integers(0, 4, (size, 6)), jnp.int32),)

    model = eqx.nn.Embedding(7, 3, key=KEY)
    return Case("embedding", model, lambda model, x: bent(jax.vmap(model), x), draw)


def attention_cases() -> list[Case]:
    def causal(model: eqx.nn.MultiheadAttention, x: Array) -> Array:
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        return bent(model, x, x, x, mask)

    attention = functools.partial(eqx.nn.MultiheadAttention, key=KEY)
    return [
        layer_case("attention", attention(2, 4), (3, 4), loss=causal),
        layer_case(
            "attention_cross",
            attention(
                2, 4, 3, 5, 6, 3, 2,
                use_query_bias=True, use_value_bias=True, use_output_bias=True,
            ),
            (2, 4), (3, 3), (3, 5),
        ),
    ]  # fmt: skip


# Recurrent cells, one step and many.


def over_time(cell: Any, sequence: Array, state: Any) -> Array:
    def step(state: Any, x: Array) -> tuple[Any, Array]:
        state = cell(x, state)
        return state, jax.tree.leaves(state)[0]

    return bent(lambda: jax.lax.scan(step, state, sequence)[1])


def recurrent_cases() -> list[Case]:
    gru, lstm = eqx.nn.GRUCell(3, 2, key=KEY), eqx.nn.LSTMCell(3, 2, key=KEY)
    return [
        layer_case("gru", gru, (3,), (2,)),
        layer_case("gru_scan", gru, (4, 3), (2,), loss=over_time),
        layer_case(
            "lstm", lstm, (3,), (2,), (2,),
            loss=lambda cell, x, h, c: bent(lambda: jnp.concatenate(cell(x, (h, c)))),
        ),
        layer_case(
            "lstm_scan", lstm, (4, 3), (2,), (2,),
            loss=lambda cell, x, h, c: over_time(cell, x, (h, c)),
        ),
        layer_case("gru_no_bias", eqx.nn.GRUCell(3, 2, use_bias=False, key=KEY), (3,), (2,)),
    ]  # fmt: skip


# Layers that use a parameter otherwise than by one product with data.


class LowRank(eqx.Module):
    """A linear layer and a trainable product of two thin matrices beside it."""

    base: eqx.nn.Linear
    down: Array
    up: Array

    def __call__(self, x: Array) -> Array:
        return self.base(x) + self.up @ (self.down @ x)


def reparametrised_cases() -> list[Case]:
    nn = eqx.nn
    linear = nn.Linear(4, 3, key=KEY)
    rng = np.random.default_rng(3)
    down, up = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 4), (3, 2)))
    spectral, state = nn.make_with_state(nn.SpectralNorm)(linear, "weight", key=KEY)
    return [
        layer_case("prelu", nn.PReLU(), (5,)),
        layer_case("low_rank", LowRank(linear, down, up), (4,)),
        layer_case("weight_norm", nn.WeightNorm(linear), (4,)),
        layer_case("weight_norm_conv", nn.WeightNorm(nn.Conv1d(2, 3, 2, key=KEY)), (2, 4)),
        layer_case(
            "spectral_norm", spectral, (4,), loss=lambda m, x: bent(lambda: m(x, state)[0])
        ),
        layer_case(
            "spectral_norm_inference",
            nn.inference_mode(spectral),
            (4,),
            loss=lambda m, x: bent(lambda: m(x, state)[0]),
        ),
    ]


def site_cases() -> list[Case]:
    """Those of which no parameter may be `whole`."""
    return [
        *linear_cases(),
        *conv_cases(),
        *norm_cases(),
        embedding_case(),
        *attention_cases(),
        *recurrent_cases(),
    ]


def all_cases() -> list[Case]:
    return [*site_cases(), *reparametrised_cases()]
