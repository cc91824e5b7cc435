"""What each example's loss is multiplied by before the backward pass: powers of two."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class LossScaling(NamedTuple):
    """The scale of each example's loss.

    Attributes:
        value: a power of two, the same for all.
        dtype: the accumulate dtype, in which it is undone.
    """

    value: float
    dtype: np.dtype[Any]

    def __call__(
        self, params: list[Array], frozen: list[Array], examples: list[Array]
    ) -> Float[Array, " batch"] | None:
        """One scale an example; None where nothing is scaled."""
        del params, frozen
        if self.value == 1:
            return None
        return jnp.full(len(examples[0]), self.value, self.dtype)


def seed(loss: Float[Array, "*batch"], scale: Float[Array, "*batch"] | None) -> Array:
    """The cotangent that a backward pass starts from."""
    return jnp.ones_like(loss) if scale is None else scale.astype(loss.dtype)
