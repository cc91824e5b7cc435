"""Per-example gradients side by side: right for any loss, memory of microbatch x parameters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..leaves import from_per_example
from .contract import ClippedSum, Task, clip_and_sum


def clipped_sum(
    task: Task, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Maps the gradient of one example over a microbatch, clips, and sums.

    Guarantee: what one example adds is bounded as ``clip_and_sum`` says, and depends on no other
    example.
    """

    def value_and_grad(example: list[Array]) -> tuple[Array, list[Array], list[Array]]:
        def loss_of(params: list[Array]) -> tuple[Array, list[Array]]:
            return task.program(params, task.frozen, example)

        loss, pullback, aux = jax.vjp(loss_of, task.params, has_aux=True)
        (grads,) = pullback(jnp.full_like(loss, task.loss_scale))
        return loss, grads, aux

    loss, grads, aux = jax.vmap(value_and_grad)(examples)
    leaves = [
        from_per_example(grad.astype(task.accumulate_dtype) / task.loss_scale) for grad in grads
    ]
    return clip_and_sum(task, leaves, loss, aux, is_padding_example)
