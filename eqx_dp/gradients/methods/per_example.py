"""Per-example gradients side by side: right for any loss, memory of microbatch x parameters."""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float

from ...isolation import run_apart
from ...precision import stage
from ...sharding import whole
from ..computed_once import computed_once
from ..leaves import LeafGradient, no_gradient
from ..loss_scale import loss_cotangent
from .contract import ClippedSum, TracedLoss, clip_and_sum


def clipped_sum(
    traced: TracedLoss, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Maps the gradient of one example over a microbatch, clips, and sums.

    Guarantee: what one example adds is bounded as `clip_and_sum` says, and depends on no other
    example.
    """
    params, frozen = ([whole(x) for x in arrays] for arrays in (traced.params, traced.frozen))
    dtype = traced.accumulate_dtype
    # Zeros for a leaf that the loss does not use would be there for each example.
    used = {leaf: params[leaf] for leaf, cost in enumerate(traced.costs) if cost.way != "unused"}

    def value_and_grad(
        example: list[Array], scale: Float[Array, ""] | None
    ) -> tuple[Array, dict[int, Array], list[Array]]:
        def loss_of(used: dict[int, Array]) -> tuple[Array, list[Array]]:
            own = [used.get(leaf, value) for leaf, value in enumerate(params)]
            with stage("loss"):
                return traced.program(own, frozen, example)

        loss, pullback, aux = jax.vjp(loss_of, used, has_aux=True)
        (grads,) = pullback(loss_cotangent(loss, scale))
        return loss, grads, aux

    with stage("probe"):
        scales = traced.loss_scale(traced.params, traced.frozen, examples)
    loss, grads, aux = run_apart(value_and_grad, traced.program.jaxpr.jaxpr, examples, scales)

    def finish(met: Any) -> ClippedSum:
        loss, grads, aux, scales = met
        with stage("norm"):
            leaves = [
                LeafGradient(grads[leaf].astype(dtype))
                if leaf in grads
                else no_gradient(param.shape, dtype)
                for leaf, param in enumerate(params)
            ]
        return clip_and_sum(traced, traced.groups, leaves, loss, aux, scales, is_padding_example)

    result = computed_once(finish, (loss, grads, aux, scales), loss)
    return result._replace(grads=traced.scattered(result.grads))
