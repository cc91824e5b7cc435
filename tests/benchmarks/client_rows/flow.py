"""A row of flowjax: a masked autoregressive flow."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import paramax
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from jaxtyping import Array

from ..rows import Row


def _loss(flow: Any, x: Array) -> Array:
    return -paramax.unwrap(flow).log_prob(x)


def maf(batch: int = 64, size: int = 16, width: int = 128, layers: int = 8) -> Row:
    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(size)), flow_layers=layers, nn_width=width
    )
    trained = jax.tree.map(
        eqx.is_inexact_array, flow, is_leaf=lambda x: isinstance(x, paramax.NonTrainable)
    )
    x = 2 * jax.random.normal(jax.random.key(1), (batch, size))
    title = f"masked autoregressive flow (flowjax), {size} variables, {layers} layers of {width}"
    return Row(f"{title}, batch {batch}", flow, _loss, (x,), filter_spec=trained)
