"""Book-keeping: one backward pass, through activations only.

Bu et al., "Differentially Private Optimization on Large Model at Small Cost", 2023. The cotangent
of every use of a parameter is read off taps; from it and from what the parameter met there follow
the norm of each example's gradient and the weighted sum of all. Where an example's gradient is
small beside these (a bias that a sequence meets), it is formed within the backward pass, and they
are not held: under a scan they would be, even where the cotangent is that of another use as well.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ...isolation import run_apart
from ...precision import stage
from ..computed_once import computed_once
from ..leaves import columns_last
from ..loss_scale import loss_cotangent
from ..tapped import evaluate
from ..taps import Address
from .contract import ClippedSum, TracedLoss, clip_and_sum
from .held import Held, held_gradient, through_values
from .measured import Known, at_use, formed_gradient, known_uses, tap_of


def clipped_sum(
    traced: TracedLoss, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Sums clipped gradients from the inputs and the cotangents of every use.

    Guarantee: as that of the method `per_example`.
    """
    with stage("probe"):
        scales = traced.loss_scale(traced.params, traced.frozen, examples)
    known = known_uses(traced, is_held=True)
    loss, aux, residuals, cotangents, grads = run_apart(
        functools.partial(_backward, traced, known),
        traced.split.program.jaxpr.jaxpr,
        examples,
        scales,
    )

    def finish(met: Any) -> ClippedSum:
        loss, aux, residuals, cotangents, grads, scales = met
        residuals, cotangents = _moved(traced, residuals, cotangents, is_back=True)
        held, targets = Held(residuals, cotangents, grads), traced.targets
        with stage("norm"):
            through = through_values(traced, held, loss)
            found = [
                formed_gradient(traced, known, target, cotangents)
                or through.get(index)
                or held_gradient(traced, index, held, len(loss), is_scattered=True)
                for index, target in enumerate(targets)
            ]
        groups = [target.group for target in targets]
        result = clip_and_sum(traced, groups, found, loss, aux, scales, is_padding_example)
        return result._replace(grads=traced.of_leaves(result.grads))

    met = (loss, aux, *_moved(traced, residuals, cotangents), grads, scales)
    result = computed_once(finish, met, loss)
    return result._replace(grads=traced.scattered(result.grads))


def _moved(
    traced: TracedLoss,
    residuals: dict[Address, Any],
    cotangents: dict[Address, Any],
    *,
    is_back: bool = False,
) -> tuple[dict[Address, Any], dict[Address, Any]]:
    """What uses met in the order in which it is needed, or back in its own.

    Cotangents have their axes in the order of `columns_last`. What comes of a scan over slices of a
    parameter has the slices in front of the examples, as the scan leaves it and as products of a
    slice each take it.
    """
    residuals, cotangents = dict(residuals), dict(cotangents)
    for uses in traced.uses.of:
        for at, use in uses.items():
            if not isinstance(x := cotangents[at], jax.Array):
                continue
            scans = len(use.stacked) if {*use.stacked} == {"slices"} else 0
            order = (0, *(1 + axis for axis in columns_last(use)))
            order = (*order[1 : 1 + scans], 0, *order[1 + scans :])
            cotangents[at] = jnp.transpose(x, np.argsort(order).tolist() if is_back else order)
            ends = (scans, 0) if is_back else (0, scans)
            residuals[at] = jax.tree.map(lambda x, ends=ends: jnp.moveaxis(x, *ends), residuals[at])
    return residuals, cotangents


def _backward(
    traced: TracedLoss,
    known: dict[Address, Known],
    example: list[Array],
    scale: Float[Array, ""] | None,
) -> tuple[Array, list[Array], dict[Address, Any], dict[Address, Any], dict[int, Array]]:
    """One example's loss, aux, residuals, cotangents of its uses, and gradients of the rest."""
    roots, fixed = traced.shared

    def run(
        taps: dict[Address, Any], whole: dict[int, Array]
    ) -> tuple[Array, tuple[list[Array], dict[Address, Any]]]:
        values = [whole.get(root, value) for root, value in enumerate(roots)]
        inputs = [*values, *fixed, *example]
        with stage("loss"):
            loss, aux, residuals = evaluate(traced.split.program, known, inputs, taps, at_use)
        return loss, (aux, residuals)

    taps = {at: tap_of(its, traced.accumulate_dtype) for at, its in known.items()}
    whole = {root: roots[root] for root in traced.uses.whole}
    loss, pullback, (aux, residuals) = jax.vjp(run, taps, whole, has_aux=True)
    cotangents, grads = pullback(loss_cotangent(loss, scale))
    return loss, aux, residuals, cotangents, grads
