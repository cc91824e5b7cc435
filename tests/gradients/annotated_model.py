"""A model as type-checked research code has it; imported under jaxtyping's import hook."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


class Head(eqx.Module):
    """Insists on float32."""

    weight: Float[Array, "k d"]

    def __call__(self, x: Float32[Array, " d"]) -> Float32[Array, " k"]:
        return self.weight @ x


class Model(eqx.Module):
    """Speaks of one example: tokens and features, no batch."""

    body: Float[Array, "d d"]
    head: Head

    def __call__(self, x: Float[Array, "t d"]) -> Float[Array, "t k"]:
        return jax.vmap(self.head)(jnp.tanh(x @ self.body))


def loss(model: Model, x: Float[Array, "t d"], y: Float[Array, " k"]) -> Float[Array, ""]:
    return jnp.sum((jnp.mean(model(x), 0) - y) ** 2)
