"""Per-example gradients side by side: right for any loss, memory of microbatch x parameters."""

import jax
from jaxtyping import Array, Bool, Float

from ...isolation import run_apart
from ...precision import stage
from ..leaves import from_per_example
from ..loss_scale import loss_cotangent
from .contract import ClippedSum, TracedLoss, clip_and_sum


def clipped_sum(
    traced: TracedLoss, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Maps the gradient of one example over a microbatch, clips, and sums.

    Guarantee: what one example adds is bounded as `clip_and_sum` says, and depends on no other
    example.
    """

    def value_and_grad(
        example: list[Array], scale: Float[Array, ""] | None
    ) -> tuple[Array, list[Array], list[Array]]:
        def loss_of(params: list[Array]) -> tuple[Array, list[Array]]:
            with stage("loss"):
                return traced.program(params, traced.frozen, example)

        loss, pullback, aux = jax.vjp(loss_of, traced.params, has_aux=True)
        (grads,) = pullback(loss_cotangent(loss, scale))
        return loss, grads, aux

    with stage("probe"):
        scales = traced.loss_scale(traced.params, traced.frozen, examples)
    loss, grads, aux = run_apart(
        jax.vmap(value_and_grad), traced.program.jaxpr.jaxpr, examples, scales
    )
    with stage("norm"):
        leaves = [from_per_example(grad.astype(traced.accumulate_dtype)) for grad in grads]
    return clip_and_sum(traced, leaves, loss, aux, scales, is_padding_example)
