"""What padding slots hold while a loss runs: a copy of a real example."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


def filled(leaves: list[Array], is_padding_example: Bool[Array, " batch"]) -> list[Array]:
    """Puts a real example in the place of all padding.

    What a padding slot adds is selected away afterwards. But a loss may stop the run
    (`equinox.error_if`), loop for long, or meet numbers that are not finite, on whatever data the
    slot holds. On a copy of a real example it does nothing that it does not do anyway.

    | slots | hold |
    |---|---|
    | of real examples | what they held |
    | of padding | a copy of the first real example of the device |
    | all of a device's, which are padding | what they held; the device computes nothing of them |

    (Where a mesh has other axes than those of examples, devices go in step, and a device may have
    to compute padding alone. JAX has no callbacks on such meshes, so nothing there stops a run.)

    Args:
        leaves: the batch, examples in front.
        is_padding_example: True where a slot holds no real example.
    """
    if not len(is_padding_example):
        return leaves
    first = jnp.argmin(is_padding_example)
    donor = [jax.lax.dynamic_index_in_dim(x, first, keepdims=False) for x in leaves]
    return [
        jnp.where(is_padding_example.reshape(-1, *[1] * one.ndim), one, x)
        for x, one in zip(leaves, donor, strict=True)
    ]
