"""Ghost clipping: two backward passes, the memory of ordinary training.

Li et al., "Large Language Models Can Be Strong Differentially Private Learners", 2022. The first
pass back turns the cotangent at every use into the norm of each example's gradient, and forgets it;
the second goes the same way again and sums what each use makes of its cotangent and the clip
factors. Both start from what one forward pass leaves. Scans stay scans, and what is rematerialised
stays so.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...isolation import Values, mapped_apart
from ...precision import stage
from ..joined import apart, is_small, side_by_side
from ..leaves import combined
from ..loss_scale import loss_cotangent
from ..repeatable import adds_in_one_order, is_ordered
from ..tapped import evaluate
from ..taps import Address
from ..targets import Target
from ..uses import convolution, lookup
from . import book_keeping
from .contract import ClippedSum, TracedLoss, clip
from .held import Held, held_gradient
from .measured import (
    Ask,
    Found,
    Known,
    ask,
    ask_formed,
    at_once,
    at_use,
    formed_gradient,
    known_uses,
    of_slices,
    tap_of,
)


class _Pass(NamedTuple):
    """What a pass leaves to the next.

    Attributes:
        is_measuring: 1 where the next one looks for norms, 0 where it adds up.
        factors: the clip factors of each group, once they are known.
        result: the sums, which are zero as long as factors are missing, and all else.
    """

    is_measuring: Float[Array, ""]
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
    measured. The forward pass is ahead of it: both go back from what it leaves. Where a device
    holds parts of parameters, each pass goes forward itself: the compiler then holds less at once.

    Of a leaf whose norm is not the sum of what its uses know each by itself (several uses, a use
    at every step of a scan) all that it meets is held from the uses to the end of the pass, as by
    `book_keeping`; of one that no use describes, each example's gradient. Where that is most of
    what uses meet, `book_keeping` holds little more, in one pass, and does it. It also does it on
    GPUs where the two passes could add up in two orders, and the second pass so add something else
    than the first one measured: see `repeatable`.
    """
    known_of_uses = known_uses(traced)
    if _holds_most(known_of_uses):
        return book_keeping.clipped_sum(traced, examples, is_padding_example)
    with stage("probe"):
        scales = traced.loss_scale(traced.params, traced.frozen, examples)
    batch, dtype = len(is_padding_example), traced.accumulate_dtype
    nothing = traced.no_sums()
    loss, *aux = (jnp.zeros((batch, *x.shape), x.dtype) for x in traced.program.jaxpr.out_avals)
    of_groups = [jnp.zeros(batch, dtype)] * len(traced.clipping.clip_norms)
    start = _Pass(jnp.ones((), dtype), of_groups, ClippedSum(nothing, loss, of_groups, aux))
    taps, axes = _taps(traced, known_of_uses)
    mapped = functools.partial(
        mapped_apart,
        functools.partial(_backward, traced, known_of_uses, taps),
        traced.split.program.jaxpr.jaxpr,
        # A total is the same for all examples, and no parameter has them in front.
        out_axes=_Backward(0, 0, 0, axes),  # pyright: ignore[reportArgumentType]
    )
    forward = Values((examples, scales), traced.parts)
    start_back = Values(start.factors, start.is_measuring)
    is_repeated = adds_in_one_order()
    shown = None if traced.parts and is_repeated else mapped(forward, start_back)
    if shown and not is_repeated and not (is_ordered(shown.one.jaxpr) and _forms_in_order(traced)):
        return book_keeping.clipped_sum(traced, examples, is_padding_example)
    ahead = None if shown is None or traced.parts else shown.in_halves()

    def once(past: _Pass) -> _Pass:
        # Were the barrier not there, the compiler would see that both passes find the same
        # cotangents, and hold them all from the first to the second.
        needed = forward if ahead is None else ahead[0]
        here, measuring, factors = jax.lax.optimization_barrier((needed, *past[:2]))
        back = Values(factors, measuring)
        met, backward = mapped(here, back).in_halves() if ahead is None else (here, ahead[1])
        found = backward(met, back)
        asks = [Ask(measuring, of_group) for of_group in factors]
        totals, known = dict[int, Array](), list[tuple[Array, Array]]()
        for group, its in enumerate(asks):
            members = [
                index for index, target in enumerate(traced.targets) if target.group == group
            ]
            sums, measured = _of_group(traced, known_of_uses, members, found, its)
            totals.update(sums)
            with stage("norm"):
                known.append(combined([(x[:, 0], x[:, 1]) for x in measured], batch, dtype))
        with stage("norm"):
            clipped = clip(traced, known, found.loss, scales, is_padding_example)
        factors, grad_norms = jax.tree.map(
            lambda new, old: jnp.where(measuring > 0, new, old),
            (clipped.factors, clipped.norms),
            (factors, past.result.grad_norms),
        )
        sums = traced.of_leaves([totals[index] for index in range(len(traced.targets))])
        if any(traced.cuts):
            # Nothing is sent in the first pass.
            is_first = measuring > 0
            sums = jax.lax.cond(is_first, lambda _: traced.no_sums(), traced.scattered, sums)
        return _Pass(
            jnp.zeros((), dtype), factors, ClippedSum(sums, found.loss, grad_norms, found.aux)
        )

    return jax.lax.fori_loop(0, 2, lambda _, past: once(past), start).result


def _forms_in_order(traced: TracedLoss) -> bool:
    """Whether gradients that are formed outside of the backward pass are sums in one order."""
    return not any(
        use.kind is lookup or use.kind is convolution
        for target in traced.targets
        if target.way != "inner_products"
        for root in target.roots
        for use in traced.uses.of[root].values()
    )


def _holds_most(known: dict[Address, Known]) -> bool:
    """Whether a second pass would save less than half of what is held at uses in any case."""
    held = saved = 0
    for its in known.values():
        met = jax.tree.leaves((its.use.result, its.use.residuals))
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in met)
        if its.form is None:
            held += size
        elif not its.is_small:
            saved += size
    return 2 * saved < held or not saved


def _backward(
    traced: TracedLoss,
    known: dict[Address, Known],
    taps: dict[str, Any],
    forward: Values,
    back: Values,
) -> _Backward:
    """The cotangents of all taps of one example, some of which become norms or sums on the spot.

    Args:
        traced: the loss.
        known: what is known of every use.
        taps: zeros of one example.
        forward: what the forward pass takes: the example and its loss scale, and the parameters of
            which a device holds a part.
        back: what only the backward pass does: the clip factors of each group, and whether it is
            to measure.
    """
    (roots, fixed), (example, scale) = traced.with_parts(forward.shared).shared, forward.of_examples
    taps = {**taps, "whole": {root: roots[root] for root in taps["whole"]}}

    def run(taps: dict[str, Any]) -> tuple[Any, tuple[list[Array], dict[Address, Any]]]:
        values = [taps["whole"].get(root, value) for root, value in enumerate(roots)]
        inputs = [*values, *fixed, *example]
        with stage("loss"):
            loss, aux, residuals = evaluate(
                traced.split.program, known, inputs, taps["uses"], at_use
            )
        asking = {at: its for at, its in residuals.items() if isinstance(its, Ask)}
        held = {at: its for at, its in residuals.items() if at not in asking}
        return (loss, asking), (aux, held)

    (loss, asking), pullback, (aux, residuals) = jax.vjp(run, taps, has_aux=True)
    # The backward pass comes behind what is asked for, all of it.
    start, measuring, factors = jax.lax.optimization_barrier(
        (loss_cotangent(loss, scale), back.shared, back.of_examples)
    )
    asked = {
        at: jax.tree.map(
            lambda x, its: jnp.broadcast_to(x, its.shape),
            Ask(measuring, factors[known[at].group]),
            its,
        )
        for at, its in asking.items()
    }
    (cotangents,) = pullback((start, asked))
    return _Backward(loss, aux, residuals, cotangents)


def _taps(traced: TracedLoss, known: dict[Address, Known]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Zeros for every use of one example, and where examples are in its cotangent: no total has."""
    uses: dict[Address, Any] = {}
    axes: dict[Address, Any] = {}
    for at, its in known.items():
        use, form, scattering = its.use, its.form, its.scattering
        if form is None or its.is_small:
            uses[at], axes[at] = tap_of(its, traced.accumulate_dtype), 0
            continue
        shape = form.shape if scattering is None else scattering.part
        total = jnp.zeros((*use.slices, *shape), form.dtype)
        uses[at] = Found(jnp.zeros((*use.slices, 2), total.dtype), total)
        axes[at] = Found(0, None)  # pyright: ignore[reportArgumentType]
    whole = {root: traced.shared.roots[root] for root in traced.uses.whole}
    return {"uses": uses, "whole": whole}, {"uses": axes, "whole": dict.fromkeys(whole, 0)}


def _of_group(
    traced: TracedLoss,
    known: dict[Address, Known],
    members: list[int],
    found: _Backward,
    asked: Ask,
) -> tuple[dict[int, Array], list[Array]]:
    """The sums of the targets of one clip norm, and what is measured of them."""
    formed = {index: _formed(traced, known, traced.targets[index], found) for index in members}
    small = {index: x for index, x in formed.items() if x is not None and is_small(x)}
    sums, measured = dict[int, Array](), list[Array]()
    if small:
        its = ask_formed(side_by_side(list(small.values())), asked)
        parts = apart(its.total, [x.shape[1:] for x in small.values()])
        sums, measured = dict(zip(small, parts, strict=True)), [its.measured]
    for index in members:
        if index in small:
            continue
        own = formed[index]
        its = (
            _of_target(traced, known, index, found, asked)
            if own is None
            else ask_formed(own, asked)
        )
        sums[index] = its.total
        measured.append(its.measured)
    return sums, measured


def _formed(
    traced: TracedLoss, known: dict[Address, Known], target: Target, found: _Backward
) -> Array | None:
    """Each example's gradient with respect to a root by itself, where it is there."""
    root, dtype = target.roots[0], traced.accumulate_dtype
    if target.relation != "itself":
        return None
    if root in traced.uses.whole:
        return found.cotangents["whole"][root].astype(dtype)
    its = formed_gradient(traced, known, target, found.cotangents["uses"])
    return None if its is None else its.formed


def _of_target(
    traced: TracedLoss,
    known: dict[Address, Known],
    index: int,
    found: _Backward,
    asked: Ask,
) -> Found:
    """What the cotangents of a target's roots become, with respect to the target itself."""
    target, batch = traced.targets[index], len(asked.factors)
    cotangents, grads = found.cotangents["uses"], found.cotangents["whole"]
    if target.relation == "itself":
        its = _of_root(traced, known, target.roots[0], found, asked)
        if its is not None:
            return its
    uses = {at: use for root in target.roots for at, use in traced.uses.of[root].items()}
    held = Held(found.residuals, cotangents, grads).of_roots(target.roots, traced.uses)
    shape = traced.sum_of(target).shape
    several = at_once(target.way, shape, tuple(uses.values()), batch)

    def gradient(held: Any) -> Any:
        return held_gradient(traced, index, Held(*held), len(jax.tree.leaves(held)[0]))

    return ask(gradient, shape, tuple(held), asked, several)


def _of_root(
    traced: TracedLoss,
    known: dict[Address, Known],
    root: int,
    found: _Backward,
    asked: Ask,
) -> Found | None:
    """The same of a root by itself, not formed; None where all that it meets is held."""
    shape, dtype, batch = traced.root(root).shape, traced.accumulate_dtype, len(asked.factors)
    cotangents, uses = found.cotangents["uses"], traced.uses.of[root]
    if not uses:  # the loss does not depend on it
        return Found(jnp.zeros((batch, 2), dtype), jnp.zeros(shape, dtype))
    if len(uses) == 1:
        ((at, use),) = uses.items()
        if isinstance(tap := cotangents[at], Found):
            measured, scattering = of_slices(tap.measured), known[at].scattering
            if scattering is not None:
                return Found(measured, scattering.stacked(tap.total))
            return Found(measured, use.view.pulled_back(tap.total, shape))
    return None
