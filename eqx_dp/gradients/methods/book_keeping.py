"""Book-keeping: one backward pass, through activations only.

Bu et al., "Differentially Private Optimization on Large Model at Small Cost", 2023. The cotangent
of every use of a parameter is read off taps; from it and from what the parameter met there follow
the norm of each example's gradient and the weighted sum of all.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...isolation import run_apart
from ...precision import stage
from ..loss_scale import loss_cotangent
from ..taps import Address, evaluate
from .contract import ClippedSum, TracedLoss, clip_and_sum, held_gradient


def clipped_sum(
    traced: TracedLoss, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Sums clipped gradients from the inputs and the cotangents of every use.

    Guarantee: as that of the method `per_example`.
    """
    with stage("probe"):
        scales = traced.loss_scale(traced.params, traced.frozen, examples)
    loss, aux, residuals, cotangents, grads = run_apart(
        jax.vmap(functools.partial(_backward, traced)), traced.program.jaxpr.jaxpr, examples, scales
    )
    with stage("norm"):
        leaves = [
            held_gradient(traced, leaf, residuals, cotangents, grads, len(loss))
            for leaf in range(len(traced.params))
        ]
    return clip_and_sum(traced, leaves, loss, aux, scales, is_padding_example)


def _backward(
    traced: TracedLoss, example: list[Array], scale: Float[Array, ""] | None
) -> tuple[Array, list[Array], dict[Address, Any], dict[Address, Array], dict[int, Array]]:
    """One example's loss, aux, residuals, cotangents of its uses, and gradients of the rest."""

    def run(
        taps: dict[Address, Array], whole: dict[int, Array]
    ) -> tuple[Array, tuple[list[Array], dict[Address, Any]]]:
        params = [whole.get(leaf, value) for leaf, value in enumerate(traced.params)]
        inputs = [*params, *traced.frozen, *example]
        with stage("loss"):
            loss, aux, residuals = evaluate(traced.program, traced.uses.at, inputs, taps)
        return loss, (aux, residuals)

    taps = {at: jnp.zeros(use.result.shape, use.result.dtype) for at, use in traced.uses.at.items()}
    whole = {leaf: traced.params[leaf] for leaf in traced.uses.whole}
    loss, pullback, (aux, residuals) = jax.vjp(run, taps, whole, has_aux=True)
    cotangents, grads = pullback(loss_cotangent(loss, scale))
    return loss, aux, residuals, cotangents, grads
