"""A clip norm that follows a quantile of norms, as part of the optimizer's state."""

from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from ..gradients import Quantile


class AdaptiveState(NamedTuple):
    """The optimizer's state, with the clip norm of the next step.

    Attributes:
        clip_norm: it follows from releases, so it is public.
        optimizer: the state of the optimizer.
    """

    clip_norm: Float[Array, ""]
    optimizer: optax.OptState


def with_clip_norm(
    optimizer: optax.GradientTransformation, quantile: Quantile
) -> optax.GradientTransformation:
    """The optimizer, for a sum `(gradients, count)`, whose count moves the clip norm.

    The sum is divided by the expected batch size, as in a step.
    """

    def init(params: optax.Params) -> AdaptiveState:
        return AdaptiveState(jnp.float32(quantile.clip_norm), optimizer.init(params))

    def update(
        updates: Any, state: AdaptiveState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdaptiveState]:
        grads, count = updates
        after = quantile.next(state.clip_norm, count)
        grads, inner = optimizer.update(grads, state.optimizer, params)
        return grads, AdaptiveState(after, inner)

    return optax.GradientTransformation(
        cast(optax.TransformInitFn, init), cast(optax.TransformUpdateFn, update)
    )
