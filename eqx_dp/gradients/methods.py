"""The sum of clipped per-example gradients: one function for three methods.

All three differentiate the loss of one example with respect to formed leaves and to taps of
factored leaves, map that over a microbatch, find norms and clip factors, and sum. `ghost` alone
needs the clip factors within the map, for its second backward pass.

| method | formed | factored |
|---|---|---|
| `per_example` | every leaf | none |
| `book_keeping` | where that is cheaper, or the only way | inputs and cotangents are kept |
| `ghost` | likewise | measured in the backward pass; a second backward pass adds |

Book-keeping is Bu et al., "Differentially Private Optimization on Large Model at Small Cost", 2023;
ghost clipping Li et al., "Large Language Models Can Be Strong Differentially Private Learners",
2022. With `ghost`, inputs and cotangents of a leaf with several uses, or of one at every step of a
scan, are kept.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..isolation import of_one
from ..precision import stage
from ..rewrites import computed_once
from ..sharding import whole
from .clip import PerExample, TracedLoss, clip_and_sum
from .factored import FormedUse, LeafForm, MeasuredUse, leaf_gradient
from .leaves import LeafGradient, no_gradient, of_slices
from .taps import AtUse, evaluate
from .uses import Address, Uses, scattering_of


def clipped_sum(
    traced: TracedLoss,
    method: str,
    examples: list[Array],
    is_padding_example: Bool[Array, " batch"],
) -> tuple[list[Array], PerExample]:
    """Clips and sums the gradients of a microbatch.

    Guarantee: what one example adds is bounded as `clip_and_sum` says, and depends on no other
    example. The measured arrays are those that are added: formed gradients and kept cotangents are
    computed once; the second pass of ghost measures again what it computes again
    (`factored.MeasuredUse`).
    """
    scales, uses, is_ghost = traced.scales(len(is_padding_example)), traced.uses, method == "ghost"
    by_rule = {at: FormedUse(use, is_ghost) for at, use in uses.by_rule.items()}
    at_uses: dict[Address, AtUse] = {**uses.at, **by_rule}
    if is_ghost:
        measured = _measured_uses(traced)
        at_uses |= measured
        one = functools.partial(_in_two_passes, traced, at_uses, len(is_padding_example))
        (loss, aux, clipped), (sums, totals) = traced.mapped(
            one, examples, scales, is_padding_example, out_axes=(0, None)
        )
        for at, total in totals.items():
            sums[uses.leaf_of[at]] = measured[at].of_leaf(total)
    else:
        # All that the backward passes find is kept; norms and sums come after the map.
        aux, backward = traced.mapped(
            lambda *of_one: _backward(traced, at_uses, *of_one)[:2], examples, scales
        )
        clipped, sums = _finished(traced, backward, scales, is_padding_example)
        loss = backward.loss
    norms, _ = jnp.split(clipped, 2, axis=-1)
    grad_norm = traced.clipping.structure.unflatten(list(norms.T))
    per_example = PerExample(loss, grad_norm, traced.program.aux.unflatten(aux))
    return traced.scattered(sums), per_example


def _measured_uses(traced: TracedLoss) -> dict[Address, MeasuredUse]:
    """The uses whose leaves are measured where they are used."""
    return {
        at: MeasuredUse(use, traced.accumulate_dtype, scattering_of(use, traced.cuts[leaf]))
        for leaf, uses in enumerate(traced.uses.of)
        for at, use in uses.items()
        if len(uses) == 1 and not use.is_repeated
    }


class _Backward(NamedTuple):
    """What the backward pass of one example finds; of a batch, with examples in front.

    Attributes:
        loss: the loss.
        pairs: the residual and the cotangent of every use that keeps them.
        measures: norm and bound of every use that is measured.
        grads: of every formed leaf.
    """

    loss: Array
    pairs: dict[Address, tuple[Any, Array]]
    measures: dict[Address, Array]
    grads: dict[int, Array]


def _backward(
    traced: TracedLoss,
    at_uses: Mapping[Address, AtUse],
    example: list[Array],
    scale: Float[Array, ""] | None,
) -> tuple[list[Array], _Backward, Any]:
    """One example's aux, what its backward pass finds, and the pullback, for a second pass."""
    params = {leaf: whole(traced.params[leaf]) for leaf in traced.uses.formed}
    measured = {at for at, use in at_uses.items() if isinstance(use, MeasuredUse)}

    def run(taps: dict[Address, Any], formed: dict[int, Array]) -> tuple[Any, Any]:
        leaves = [formed.get(leaf, x) for leaf, x in enumerate(traced.params)]
        with stage("loss"):
            inputs = [*leaves, *traced.frozen, *example]
            loss, aux, beside = evaluate(traced.program, at_uses, inputs, taps)
        requests = {at: beside.pop(at) for at in measured}
        return (loss, requests), (aux, beside)

    taps = {at: use.tap() for at, use in at_uses.items()}
    (loss, requests), pullback, (aux, residuals) = jax.vjp(run, taps, params, has_aux=True)
    answers, grads = pullback((_start(loss, scale), jax.tree.map(jnp.zeros_like, requests)))
    pairs = {at: (residuals[at], answers[at]) for at in traced.uses.at if at not in measured}
    measures = {at: answers[at].measure for at in measured}
    return aux, _Backward(loss, pairs, measures, grads), pullback


def _in_two_passes(
    traced: TracedLoss,
    at_uses: Mapping[Address, AtUse],
    num_examples: int,
    example: list[Array],
    scale: Float[Array, ""] | None,
    is_padding: Bool[Array, ""],
) -> tuple[Any, Any]:
    """Of one example: loss, aux, norms and factors; of all examples: two kinds of sums.

    The second pass needs the clip factors, so they are found within the map.
    """
    aux, backward, pullback = _backward(traced, at_uses, example, scale)
    # Jitted, so that it is traced once: for shapes and for the batch.
    finish = of_one(jax.jit(functools.partial(_finished, traced)), num_examples)
    clipped, sums = finish(backward, scale, is_padding)
    _, factors = jnp.split(clipped, 2)
    totals = dict[Address, Array]()
    if backward.measures:
        leaf_of, groups = traced.uses.leaf_of, traced.groups
        of_use = {at: factors[groups[leaf_of[at]]] for at in backward.measures}
        limits = {at: measure[..., 1] for at, measure in backward.measures.items()}
        totals = _second_pass(pullback, _start(backward.loss, scale), of_use, limits)
    return (backward.loss, aux, clipped), (sums, totals)


def _second_pass(
    pullback: Any,
    start: Array,
    factors: dict[Address, Float[Array, ""]],
    limits: dict[Address, Float[Array, "*slices"]],
) -> dict[Address, Array]:
    """The weighted sums, over all examples, of all uses that are measured."""
    # Without the barrier the compiler would see that both passes compute the same cotangents, and
    # keep them all from the first to the second.
    pullback, factors, limits = jax.lax.optimization_barrier((pullback, factors, limits))
    requests = {
        at: jnp.stack([jnp.broadcast_to(factors[at], limit.shape), limit], axis=-1)
        for at, limit in limits.items()
    }
    answers, _ = pullback((start, requests))
    return {at: answers[at].total for at in requests}


def _start(loss: Float[Array, ""], scale: Float[Array, ""] | None) -> Array:
    """The cotangent that a backward pass starts from."""
    return jnp.ones_like(loss) if scale is None else scale.astype(loss.dtype)


def _finished(
    traced: TracedLoss,
    backward: _Backward,
    scales: Float[Array, " batch"] | None,
    is_padding: Bool[Array, " batch"],
) -> tuple[Float[Array, "batch clips"], list[Array]]:
    """Norms and clip factors of a batch, and the sums of what is not measured where it is used."""

    def finish(operands: tuple[_Backward, Any, Array]) -> tuple[Array, list[Array]]:
        backward, scales, is_padding = operands
        backward = _moved(traced.uses, backward, is_back=True)
        with stage("norm"):
            leaves = range(len(traced.params))
            leaves = [_leaf_gradient(traced, leaf, backward) for leaf in leaves]
        sums, clipped = clip_and_sum(traced, leaves, backward.loss, scales, is_padding)
        return jnp.stack([*clipped.norms, *clipped.factors], axis=-1), sums

    operands = _moved(traced.uses, backward), scales, is_padding
    return computed_once(finish, operands, backward.loss)


def _leaf_gradient(traced: TracedLoss, leaf: int, backward: _Backward) -> LeafGradient:
    """The gradient of a leaf, formed or factored."""
    shape, dtype, uses = traced.params[leaf].shape, traced.accumulate_dtype, traced.uses.of[leaf]
    if leaf in backward.grads:
        return LeafGradient(backward.grads[leaf].astype(dtype))
    if not uses:
        return no_gradient(shape, dtype)
    first, *others = uses
    if first in backward.measures:
        # The second pass has the sum.
        return no_gradient((), dtype, of_slices(backward.measures[first]))
    scattering = None
    if not others and uses[first].slices and not uses[first].is_repeated:
        scattering = scattering_of(uses[first], traced.cuts[leaf])
    form = LeafForm(shape, tuple(uses.values()), dtype)
    return leaf_gradient(form, [backward.pairs[at] for at in uses], scattering)


def _moved(uses: Uses, backward: _Backward, is_back: bool = False) -> _Backward:
    """Residuals and cotangents with their axes in the needed order, or back in their own.

    Cotangents have their axes in the order in which `factors` takes them: they are transposed
    before they enter a conditional, not inside. Otherwise the compiler would compute them, and
    everything before them in the same loop, twice. Results of a scan over slices of a parameter
    have the slices before the examples, as the scan returns them and as products of single slices
    take them.
    """
    pairs = dict[Address, tuple[Any, Array]]()
    for at, (residual, cotangent) in backward.pairs.items():
        use = uses.at[at]
        front = len(use.scans)
        scans = 0 if use.is_repeated else front
        order = (0, *range(1, 1 + front), *(1 + front + axis for axis in use.kind.order))
        order = (*order[1 : 1 + scans], 0, *order[1 + scans :])
        to = np.argsort(order).tolist() if is_back else order
        ends = (scans, 0) if is_back else (0, scans)
        moved = jax.tree.map(lambda x, ends=ends: jnp.moveaxis(x, *ends), residual)
        pairs[at] = moved, jnp.transpose(cotangent, to)
    return backward._replace(pairs=pairs)
