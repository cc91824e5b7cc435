"""Ghost clipping: two backward passes, the memory of ordinary training.

Li et al., "Large Language Models Can Be Strong Differentially Private Learners", 2022. The first
pass turns the cotangent at every use into the norm of each example's gradient, and forgets it; the
second goes the same way again and sums what each use makes of its cotangent and the clip factors.
Scans stay scans, and what is rematerialised stays so.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...isolation import run_apart
from ...precision import stage
from ..loss_scale import loss_cotangent
from ..taps import Address, evaluate
from .contract import ClippedSum, TracedLoss, clip, held_gradient
from .measured import (
    Ask,
    Formed,
    Found,
    Known,
    ask,
    ask_formed,
    at_once,
    at_use,
    known_of,
    of_slices,
)


class _Pass(NamedTuple):
    """What a pass leaves to the next.

    Attributes:
        is_measuring: whether the next one looks for norms; else it adds up.
        factors: the clip factors of each group, once they are known.
        result: the sums, which are zero as long as factors are missing, and all else.
    """

    is_measuring: Bool[Array, ""]
    factors: list[Float[Array, " batch"]]
    result: ClippedSum


class _Backward(NamedTuple):
    """What one pass through the loss and back finds.

    Attributes:
        loss: one loss an example.
        aux: the leaves of aux.
        residuals: of the uses whose cotangents are held.
        cotangents: of all taps.
    """

    loss: Float[Array, " batch"]
    aux: list[Array]
    residuals: dict[Address, Any]
    cotangents: dict[str, Any]


def clipped_sum(
    traced: TracedLoss, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Sums clipped gradients in a second pass that repeats the first.

    Guarantee: as that of the method `per_example`. Cotangents that nearly cancel would round
    differently if the factors came in at the loss, or if the two passes were compiled apart. So
    both are one loop's body, and the factors come in at the uses: what is added is what was
    measured. The forward pass is in it too, for what it leaves to a backward pass costs the
    compiler less memory where it sees both.

    Of a leaf whose norm is not the sum of what its uses know each by itself (several uses, a use
    at every step of a scan) all that it meets is held from the uses to the end of the pass, as by
    `book_keeping`; of one that no use describes, each example's gradient.
    """
    with stage("probe"):
        scales = traced.loss_scale(traced.params, traced.frozen, examples)

    def once(past: _Pass) -> _Pass:
        # Were the barrier not there, the compiler would see that both passes find the same
        # cotangents, and hold them all from the first to the second.
        here, asked = jax.lax.optimization_barrier((examples, past[:2]))
        backward = functools.partial(_backward, traced, asked[0])
        found = run_apart(backward, traced.program.jaxpr.jaxpr, here, asked[1], scales)
        leaves = [
            _of_leaf(traced, leaf, found, Ask(asked[0], asked[1][group]))
            for leaf, group in enumerate(traced.groups)
        ]
        norms, bounds = ([leaf.measured[:, i] for leaf in leaves] for i in range(2))
        with stage("norm"):
            clipped = clip(traced, norms, bounds, found.loss, scales, is_padding_example)
        chosen = [jnp.where(clipped.contributes, factor, 0) for factor in clipped.factors]
        factors, grad_norms = jax.tree.map(
            lambda new, old: jnp.where(asked[0], new, old),
            (chosen, clipped.norms),
            (asked[1], past.result.grad_norms),
        )
        totals = [leaf.total for leaf in leaves]
        return _Pass(
            jnp.zeros((), bool), factors, ClippedSum(totals, found.loss, grad_norms, found.aux)
        )

    batch, dtype = len(is_padding_example), traced.accumulate_dtype
    nothing = [
        jnp.zeros(x.shape, x.dtype) for x in map(traced.accumulated, range(len(traced.params)))
    ]
    loss, *aux = (jnp.zeros((batch, *x.shape), x.dtype) for x in traced.program.jaxpr.out_avals)
    of_groups = [jnp.zeros(batch, dtype)] * len(traced.clipping.clip_norms)
    start = _Pass(jnp.ones((), bool), of_groups, ClippedSum(nothing, loss, of_groups, aux))
    return jax.lax.fori_loop(0, 2, lambda _, past: once(past), start).result


def _backward(
    traced: TracedLoss,
    is_measuring: Bool[Array, ""],
    examples: list[Array],
    factors: list[Array],
    scales: Array | None,
) -> _Backward:
    """The cotangents of all taps, some of which become norms or sums on the spot."""
    known = {
        at: known_of(traced, leaf, use)
        for leaf, uses in enumerate(traced.uses.of)
        for at, use in uses.items()
    }
    taps, axes = _taps(traced, known, len(factors[0]))

    def one(example: list[Array], factors: list[Array], taps: dict[str, Any]) -> tuple[Any, Any]:
        params = [taps["whole"].get(leaf, value) for leaf, value in enumerate(traced.params)]
        inputs, asked = [*params, *traced.frozen, *example], [Ask(is_measuring, x) for x in factors]
        with stage("loss"):
            loss, aux, residuals = evaluate(
                traced.program, known, inputs, taps["uses"], at_use, asked
            )
        return loss, (aux, residuals)

    mapped = jax.vmap(one, in_axes=(0, 0, axes))
    loss, pullback, (aux, residuals) = jax.vjp(
        lambda taps: mapped(examples, factors, taps), taps, has_aux=True
    )
    (cotangents,) = pullback(loss_cotangent(loss, scales))
    return _Backward(loss, aux, residuals, cotangents)


def _taps(
    traced: TracedLoss, known: dict[Address, Known], batch: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Zeros for every use, and where each has examples in front: no total has."""
    uses: dict[Address, Any] = {}
    axes: dict[Address, Any] = {}
    for at, (use, _, form, is_small) in known.items():
        slices = use.slices
        axes[at] = 0
        if form is None:
            uses[at] = jnp.zeros((batch, *use.result.shape), use.result.dtype)
            continue
        total = jnp.zeros((*slices, *form.shape), form.dtype)
        if is_small:
            uses[at] = Formed(jnp.zeros((batch, *total.shape), total.dtype))
        else:
            uses[at] = Found(jnp.zeros((batch, *slices, 2), total.dtype), total)
            axes[at] = Found(0, None)  # pyright: ignore[reportArgumentType]
    whole = {
        leaf: jnp.broadcast_to(traced.params[leaf], (batch, *traced.params[leaf].shape))
        for leaf in traced.uses.whole
    }
    return {"uses": uses, "whole": whole}, {"uses": axes, "whole": dict.fromkeys(whole, 0)}


def _of_leaf(traced: TracedLoss, leaf: int, found: _Backward, asked: Ask) -> Found:
    """What a leaf's cotangents become, with respect to the leaf itself."""
    shape, dtype, batch = traced.params[leaf].shape, traced.accumulate_dtype, len(asked.factors)
    cotangents, uses = found.cotangents["uses"], traced.uses.of[leaf]
    own = None
    if leaf in traced.uses.whole:
        own = found.cotangents["whole"][leaf].astype(dtype)
    elif not uses:  # the loss does not depend on it
        return Found(jnp.zeros((batch, 2), dtype), jnp.zeros(shape, dtype))
    if len(uses) == 1:
        ((at, use),) = uses.items()
        if isinstance(tap := cotangents[at], Found):
            return Found(of_slices(tap.measured), use.view.pulled_back(tap.total, shape))
        if isinstance(tap, Formed):
            own = jax.vmap(lambda one: use.view.pulled_back(one, shape))(tap.gradient)
    if own is not None:
        return ask_formed(own, asked)
    held = {at: (found.residuals[at], cotangents[at]) for at in uses}

    def gradient(held: dict[Address, tuple[Any, Array]]) -> Any:
        residuals, its = ({at: pair[i] for at, pair in held.items()} for i in range(2))
        return held_gradient(traced, leaf, residuals, its, {}, len(its))

    several = at_once(traced.costs[leaf].way, shape, tuple(uses.values()), batch)
    return ask(gradient, shape, held, asked, several)
