"""Every layer of `eqx.nn` that has parameters, alone."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jaxtyping import Array

from tests.gradients.cases.tables import Rows, Table, bent, of_module, on_all
from tests.models import Case


def over_tokens(model: Any, tokens: Array) -> Array:
    return bent(on_all, model, tokens)


def causal(model: nn.MultiheadAttention, x: Array) -> Array:
    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
    return bent(model, x, x, x, mask)


def over_time(cell: Any, sequence: Array, *state: Array) -> Array:
    def step(state: Any, x: Array) -> tuple[Any, Array]:
        state = cell(x, state)
        return state, jax.tree.leaves(state)[0]

    start = state if len(state) > 1 else state[0]
    return bent(lambda: jax.lax.scan(step, start, sequence)[1])


def spectral_norm(key: Array, inference: bool) -> Any:
    make = eqx.nn.make_with_state(nn.SpectralNorm)
    return make(nn.Linear(4, 3, key=key), "weight", inference=inference, key=key)


def with_state(model: Any, x: Array) -> Array:
    module, state = model
    return bent(lambda: module(x, jax.lax.stop_gradient(state))[0])


ALL = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
CROSS = partial(
    nn.MultiheadAttention,
    *(2, 4, 3, 5, 6, 3, 2),
    **{f"use_{part}_bias": True for part in ("query", "key", "value", "output")},
)
NOT_THE_STATE = (eqx.is_inexact_array, False)

LINEAR: Table = {
    "linear": of_module(lambda key: nn.Linear(4, 3, key=key), (4,)),
    "linear_scalars": of_module(lambda key: nn.Linear("scalar", "scalar", key=key), ()),
    "linear_tokens": of_module(lambda key: nn.Linear(4, 3, key=key), (5, 4), loss=over_tokens),
    "mlp": of_module(lambda key: nn.MLP(4, 2, 5, 2, key=key), (4,)),
    "embedding": of_module(
        lambda key: nn.Embedding(7, 3, key=key), Rows(4, (6,)), loss=over_tokens
    ),
    "attention": of_module(lambda key: nn.MultiheadAttention(2, 4, key=key), (3, 4), loss=causal),
    "attention_cross": of_module(lambda key: CROSS(key=key), (2, 4), (3, 3), (3, 5)),
    "gru_scan": of_module(lambda key: nn.GRUCell(3, 2, key=key), (4, 3), (2,), loss=over_time),
    "lstm_scan": of_module(
        lambda key: nn.LSTMCell(3, 2, key=key), (4, 3), (2,), (2,), loss=over_time
    ),
}  # fmt: skip

CONVOLUTIONS: Table = {
    "conv1d_all": of_module(lambda key: nn.Conv1d(4, 6, 3, **ALL, key=key), (4, 9)),
    "conv1d_circular": of_module(
        lambda key: nn.Conv1d(2, 3, 3, padding=1, padding_mode="CIRCULAR", key=key), (2, 5)
    ),
    "conv2d": of_module(
        lambda key: nn.Conv2d(2, 3, (2, 3), (2, 1), ((1, 0), (0, 2)), key=key), (2, 5, 4)
    ),
    "conv2d_depthwise": of_module(lambda key: nn.Conv2d(3, 6, 2, groups=3, key=key), (3, 4, 4)),
    "conv_transpose1d": of_module(
        lambda key: nn.ConvTranspose1d(4, 2, 3, 2, 1, 1, 2, 2, key=key), (4, 4)
    ),
}

OTHERS: Table = {
    "layer_norm": of_module(lambda key: nn.LayerNorm(4), (3, 4), loss=over_tokens),
    "rms_norm": of_module(lambda key: nn.RMSNorm(4), (3, 4), loss=over_tokens),
    "group_norm": of_module(lambda key: nn.GroupNorm(2, 4), (4, 3, 2)),
    "prelu": of_module(lambda key: nn.PReLU(), (5,)),
    "weight_norm": of_module(lambda key: nn.WeightNorm(nn.Linear(4, 3, key=key)), (4,)),
    "spectral_norm": of_module(
        partial(spectral_norm, inference=False), (4,), loss=with_state, spec=NOT_THE_STATE
    ),
}  # fmt: skip


def case(name: str) -> Case:
    """One layer alone."""
    return {**LINEAR, **CONVOLUTIONS, **OTHERS}[name](name)
