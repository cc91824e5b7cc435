"""Per-example gradients side by side: right for any loss, memory of microbatch x parameters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..clip import clip_factors, global_norms, weighted_sum
from .contract import ClippedSum, Task


def clipped_sum(
    task: Task, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Maps the gradient of one example over a microbatch, clips, and sums.

    Guarantee: an example adds a gradient of norm at most its group's clip norm (up to rounding in
    the accumulate dtype), and exactly zero if it is padding or if its loss or the norm of its
    gradient in any group is not finite. What one example adds depends on no other example.
    """

    def value_and_grad(example: list[Array]) -> tuple[Array, list[Array], list[Array]]:
        def loss_of(params: list[Array]) -> tuple[Array, list[Array]]:
            return task.program(params, task.frozen, example)

        loss, pullback, aux = jax.vjp(loss_of, task.params, has_aux=True)
        (grads,) = pullback(jnp.full_like(loss, task.loss_scale))
        return loss, grads, aux

    loss, grads, aux = jax.vmap(value_and_grad)(examples)
    grads = [grad.astype(task.accumulate_dtype) / task.loss_scale for grad in grads]

    clip_norms = task.clipping.clip_norms
    norms = [
        global_norms([grads[i] for i in _members(task, group)], loss.shape, task.accumulate_dtype)
        for group in range(len(clip_norms))
    ]
    contributes = jnp.isfinite(loss) & ~is_padding_example
    for norm in norms:
        contributes &= jnp.isfinite(norm)
    factors = [
        clip_factors(norm, clip_norm, task.clipping.rescale_to_unit_norm)
        for norm, clip_norm in zip(norms, clip_norms, strict=True)
    ]
    sums = [
        weighted_sum(grad, factors[group], contributes)
        for grad, group in zip(grads, task.groups, strict=True)
    ]
    return ClippedSum(sums, loss, norms, aux)


def _members(task: Task, group: int) -> list[int]:
    return [leaf for leaf, its_group in enumerate(task.groups) if its_group == group]
