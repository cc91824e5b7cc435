"""The sum of clipped per-example gradients: one function for three methods.

All three differentiate the loss of one example with respect to formed leaves and to taps of
factored leaves, map that over a microbatch, find norms and clip factors, and sum.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..isolation import of_one
from ..precision import stage
from ..sharding import whole
from . import contraction
from .clip import PerExample, TracedLoss, clip_and_sum
from .convolution import Kernel
from .factored import LeafForm, Seen, leaf_gradient, of_slices
from .leaves import LeafGradient, computed_once, no_gradient
from .taps import evaluate
from .uses import Address, AtUse, ParamUse, Uses, scattering_of


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
    (`factored.Seen`).
    """
    uses, batch = traced.uses, len(is_padding_example)
    seen = _seen(traced, uses) if method == "ghost" else dict[Address, Seen]()
    kernels = {at: Kernel(use, method == "ghost") for at, use in uses.kernels.items()}
    known: dict[Address, AtUse] = {**uses.at, **seen, **kernels}
    leaf_of = {at: leaf for leaf, its in enumerate(uses.of) for at in its}

    @jax.jit
    def finished(
        clip_norms: list[Array], found: _Backward, *others: Any
    ) -> tuple[Array, list[Array]]:
        """Norms and clip factors of a batch, one of each for every clip norm, and the sums."""

        def finish(values: tuple[_Backward, Any, Array]) -> tuple[Array, list[Array]]:
            found, scales, is_padding = values
            found = _moved(uses, found, is_back=True)
            with stage("norm"):
                leaves = range(len(traced.params))
                leaves = [_leaf_gradient(traced, leaf, seen, found) for leaf in leaves]
            here = traced._replace(clipping=traced.clipping.with_arrays(clip_norms))
            sums, clipped = clip_and_sum(here, leaves, found.loss, scales, is_padding)
            return jnp.stack([*clipped.norms, *clipped.factors], axis=-1), sums

        found = _moved(uses, found)
        return computed_once(finish, (found, *others), found.loss)

    def one(example: list[Array], scale: Any, is_padding: Array) -> tuple[Any, Any]:
        aux, found, pullback = _backward(traced, known, example, scale)
        finish = functools.partial(finished, traced.clipping.arrays)
        own, sums = of_one(finish, batch)(found, scale, is_padding)
        norms, factors = jnp.split(own, 2)
        totals = dict[Address, Array]()
        if seen:
            limits = {at: found.cotangents[at][..., 1] for at in seen}
            of_use = {at: factors[traced.groups[leaf_of[at]]] for at in seen}
            totals = _second_pass(pullback, _start(found.loss, scale), of_use, limits)
        return (found.loss, aux, list(norms)), (sums, totals)

    found = traced.mapped(
        one, examples, traced.scales(batch), is_padding_example, out_axes=(0, None)
    )
    (loss, aux, norms), (sums, totals) = found
    for at, total in totals.items():
        sums[leaf_of[at]] = seen[at].of_leaf(total)
    grad_norm = traced.clipping.structure.unflatten(norms)
    per_example = PerExample(loss, grad_norm, traced.program.aux.unflatten(aux))
    return traced.scattered(sums), per_example


def _seen(traced: TracedLoss, uses: Uses) -> dict[Address, Seen]:
    """The uses whose leaves are measured where they are used."""
    return {
        at: Seen(use, traced.accumulate_dtype, scattering_of(use, traced.cuts[leaf]))
        for leaf, its in enumerate(uses.of)
        for at, use in its.items()
        if len(its) == 1 and use.is_seen
    }


class _Backward(NamedTuple):
    """What the backward pass of one example finds.

    Attributes:
        loss: the loss.
        residuals: of every use that is not seen.
        cotangents: of every use; norm and bound of one that is seen.
        grads: of every formed leaf.
    """

    loss: Array
    residuals: dict[Address, Any]
    cotangents: dict[Address, Any]
    grads: dict[int, Array]


def _backward(
    traced: TracedLoss,
    known: dict[Address, AtUse],
    example: list[Array],
    scale: Float[Array, ""] | None,
) -> tuple[list[Array], _Backward, Any]:
    """One example's aux, what its backward pass finds, and the pullback, for a second pass."""
    params = {leaf: whole(traced.params[leaf]) for leaf in traced.uses.formed}

    def run(taps: dict[Address, Any], formed: dict[int, Array]) -> tuple[Any, Any]:
        own = [formed.get(leaf, x) for leaf, x in enumerate(traced.params)]
        inputs = [*own, *traced.frozen, *example]
        with stage("loss"):
            loss, aux, kept = evaluate(traced.program, known, inputs, taps)
        asked = {at: its for at, its in kept.items() if isinstance(known[at], Seen)}
        residuals = {at: its for at, its in kept.items() if at not in asked}
        return (loss, asked), (aux, residuals)

    taps = {at: its.tap() for at, its in known.items()}
    (loss, asked), pullback, (aux, residuals) = jax.vjp(run, taps, params, has_aux=True)
    cotangents, grads = pullback((_start(loss, scale), jax.tree.map(jnp.zeros_like, asked)))
    cotangents |= {at: cotangents[at].known for at in asked}
    return aux, _Backward(loss, residuals, cotangents, grads), pullback


def _second_pass(
    pullback: Any,
    start: Array,
    factors: dict[Address, Float[Array, ""]],
    limits: dict[Address, Float[Array, "*slices"]],
) -> dict[Address, Array]:
    """The weighted sums, over all examples, of all uses that are seen."""
    # Without the barrier the compiler would see that both passes compute the same cotangents, and
    # keep them all from the first to the second.
    pullback, factors, limits = jax.lax.optimization_barrier((pullback, factors, limits))
    asked = {
        at: jnp.stack([jnp.broadcast_to(factors[at], limit.shape), limit], axis=-1)
        for at, limit in limits.items()
    }
    taps, _ = pullback((start, asked))
    return {at: taps[at].total for at in asked}


def _start(loss: Float[Array, ""], scale: Float[Array, ""] | None) -> Array:
    """The cotangent that a backward pass starts from."""
    return jnp.ones_like(loss) if scale is None else scale.astype(loss.dtype)


def _leaf_gradient(
    traced: TracedLoss, leaf: int, seen: dict[Address, Seen], found: _Backward
) -> LeafGradient:
    """The gradient of a leaf, formed or factored."""
    shape, dtype, uses = traced.params[leaf].shape, traced.accumulate_dtype, traced.uses.of[leaf]
    if leaf in found.grads:
        return LeafGradient(found.grads[leaf].astype(dtype))
    if not uses:
        return no_gradient(shape, dtype)
    if len(uses) == 1 and (at := next(iter(uses))) in seen:
        later = no_gradient((), dtype)  # the second pass has the sum
        return later._replace(known=of_slices(found.cotangents[at]))
    scattering = None
    if len(uses) == 1:
        (use,) = uses.values()
        scattering = scattering_of(use, traced.cuts[leaf]) if use.slices and use.is_seen else None
    form = LeafForm(shape, tuple(uses.values()), dtype)
    pairs = [(found.residuals[at], found.cotangents[at]) for at in uses]
    return leaf_gradient(form, pairs, scattering)


def _moved(uses: Uses, found: _Backward, is_back: bool = False) -> _Backward:
    """Residuals and cotangents with their axes in the needed order, or back in their own.

    Cotangents have their axes in the order of `_columns_last`. Results of a scan over slices of a
    parameter have the slices before the examples, as the scan returns them and as products of
    single slices take them.
    """
    residuals, cotangents = dict(found.residuals), dict(found.cotangents)
    for at, use in uses.at.items():
        if at not in residuals:  # seen
            continue
        scans = len(use.scans) if {*use.scans} == {"slices"} else 0
        order = (0, *(1 + axis for axis in _columns_last(use)))
        order = (*order[1 : 1 + scans], 0, *order[1 + scans :])
        to = np.argsort(order).tolist() if is_back else order
        cotangents[at] = jnp.transpose(cotangents[at], to)
        ends = (scans, 0) if is_back else (0, scans)
        residuals[at] = jax.tree.map(lambda x, ends=ends: jnp.moveaxis(x, *ends), residuals[at])
    return found._replace(residuals=residuals, cotangents=cotangents)


def _columns_last(use: ParamUse) -> tuple[int, ...]:
    """The axes of the cotangent of a contraction in the order in which it is needed.

    A cotangent is transposed before it enters a conditional, not inside: otherwise the compiler
    would compute it, and everything before it in the same loop, twice.
    """
    rank = len(use.result.shape)
    if use.kind is not contraction:
        return tuple(range(rank))
    order = contraction.columns_last(use.operation, use.operand)
    front = rank - len(order)
    return (*range(front), *(front + axis for axis in order))
