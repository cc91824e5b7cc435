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
from ..loss_scale import loss_cotangent
from ..tapped import evaluate
from ..taps import Address
from ..uses import contraction
from .contract import ClippedSum, TracedLoss, clip_and_sum
from .held import Held, held_gradient
from .measured import at_use, formed_gradient, known_uses, tap_of


def clipped_sum(
    traced: TracedLoss, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Sums clipped gradients from the inputs and the cotangents of every use.

    Guarantee: as that of the method `per_example`.
    """
    with stage("probe"):
        scales = traced.loss_scale(traced.params, traced.frozen, examples)
    loss, aux, residuals, cotangents, grads = run_apart(
        jax.vmap(functools.partial(_backward, traced)),
        traced.split.program.jaxpr.jaxpr,
        examples,
        scales,
    )

    orders = _orders(traced)

    def finish(met: Any) -> ClippedSum:
        loss, aux, residuals, cotangents, grads, scales = met
        cotangents = _moved(cotangents, {at: np.argsort(order) for at, order in orders.items()})
        held, targets = Held(residuals, cotangents, grads), traced.targets
        with stage("norm"):
            found = [
                formed_gradient(traced, target, cotangents)
                or held_gradient(traced, index, held, len(loss), is_scattered=True)
                for index, target in enumerate(targets)
            ]
        groups = [target.group for target in targets]
        result = clip_and_sum(traced, groups, found, loss, aux, scales, is_padding_example)
        return result._replace(grads=traced.of_leaves(result.grads))

    met = (loss, aux, residuals, _moved(cotangents, orders), grads, scales)
    result = computed_once(finish, met, loss)
    return result._replace(grads=traced.scattered(result.grads))


def _orders(traced: TracedLoss) -> dict[Address, np.ndarray]:
    """The axes of the cotangents of contractions, examples in front, in the order of what is made
    of them.

    So the compiler has nothing to rearrange on the way into the conditional: it would compute the
    cotangent, and all that leads to it in the same loop, a second time.
    """
    found: dict[Address, np.ndarray] = {}
    for uses in traced.uses.of:
        for at, use in uses.items():
            if use.kind is contraction:
                order = np.array(contraction.columns_last(use.operation, use.operand), int)
                front = len(use.result.shape) - len(order) + 1
                found[at] = np.concatenate([np.arange(front), front + order])
    return found


def _moved(cotangents: dict[Address, Any], orders: dict[Address, np.ndarray]) -> dict[Address, Any]:
    return {
        at: jnp.transpose(x, orders[at]) if at in orders and isinstance(x, jax.Array) else x
        for at, x in cotangents.items()
    }


def _backward(
    traced: TracedLoss, example: list[Array], scale: Float[Array, ""] | None
) -> tuple[Array, list[Array], dict[Address, Any], dict[Address, Any], dict[int, Array]]:
    """One example's loss, aux, residuals, cotangents of its uses, and gradients of the rest."""
    known, (roots, fixed) = known_uses(traced, is_held=True), traced.shared

    def run(
        taps: dict[Address, Any], whole: dict[int, Array]
    ) -> tuple[Array, tuple[list[Array], dict[Address, Any]]]:
        values = [whole.get(root, value) for root, value in enumerate(roots)]
        inputs = [*values, *fixed, *example]
        with stage("loss"):
            loss, aux, residuals = evaluate(
                traced.split.program, known, inputs, taps, at_use, asked
            )
        return loss, (aux, residuals)

    asked: list[None] = [None] * len(traced.clipping.clip_norms)
    taps = {at: tap_of(its, traced.accumulate_dtype) for at, its in known.items()}
    whole = {root: roots[root] for root in traced.uses.whole}
    loss, pullback, (aux, residuals) = jax.vjp(run, taps, whole, has_aux=True)
    cotangents, grads = pullback(loss_cotangent(loss, scale))
    return loss, aux, residuals, cotangents, grads
