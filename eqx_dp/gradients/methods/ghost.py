"""Ghost clipping: two backward passes, the memory of ordinary training.

Li et al., "Large Language Models Can Be Strong Differentially Private Learners", 2022. The first
pass turns the cotangent at every site into the norm of each example's gradient, and forgets it; the
second goes the same way again and sums what each site makes of its cotangent and the clip factors.
Scans stay scans, and what is rematerialised stays so.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

from ...isolation import run_apart, sum_over_examples
from ...precision import stage
from ...programs import evaluated
from ..clip import norm_error, norms
from ..leaves import LeafGradient, from_per_example, leaf_gradient, per_example_gradients
from ..loss_scale import loss_cotangent
from ..microbatches import over_microbatches
from ..taps import Place, Site, evaluate, tapped
from ..views import parameter_view
from .contract import ClippedSum, TracedLoss, clip, held_gradient

_MEASURE = -1.0
"""In the place of a clip factor: not the sum is asked for, but the norm."""


class _Tap(NamedTuple):
    """What a site's cotangent is turned into. As an input it is zero.

    Attributes:
        measured: the norm of an example's gradient, and a bound on that of what is added of it.
        total: the weighted sum of all gradients, with respect to the view.
    """

    measured: Float[Array, "*slices 2"]
    total: Float[Array, "*view"]


class _Own(NamedTuple):
    """The same where an example's gradient is small beside what the site meets.

    Attributes:
        gradient: one example's own gradient, with respect to the view.
    """

    gradient: Float[Array, "*view"]


class _Pass(NamedTuple):
    """What a pass leaves to the next.

    Attributes:
        factors: the clip factors of each group, or what stands in their place.
        result: the sums, which are zero as long as factors are missing, and all else.
    """

    factors: list[Float[Array, " batch"]]
    result: ClippedSum


class _Backward(NamedTuple):
    """What one pass through the loss and back finds."""

    loss: Float[Array, " batch"]
    aux: list[Array]
    kept: dict[Place, Any]
    cotangents: dict[str, Any]


def clipped_sum(
    task: TracedLoss, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Sums clipped gradients in a second pass that repeats the first.

    Guarantee: as that of the method `per_example`. Cotangents that nearly cancel would round
    differently if the factors came in at the loss, or if the two passes were compiled apart. So
    both are one loop's body, and the factors come in at the sites: what is added is what was
    measured. The forward pass is in it too, for what it leaves to a backward pass costs the
    compiler less memory where it sees both.

    Of a leaf whose norm is not the sum of what its sites know each by itself (several uses, a use
    at every step of a scan) all that it meets is held from the sites to the end of the pass, as by
    `book_keeping`; of one that no site describes, each example's gradient.
    """

    backward = functools.partial(_backward, task)

    def once(past: _Pass) -> _Pass:
        # Were the barrier not there, the compiler would see that both passes find the same
        # cotangents, and hold them all from the first to the second.
        here, factors = jax.lax.optimization_barrier((examples, past.factors))
        found = run_apart(backward, task.program.jaxpr.jaxpr, here, factors, scales)
        taps = _of_leaves(task, found, factors)
        norms, bounds = ([tap.measured[:, i] for tap in taps] for i in range(2))
        with stage("norm"):
            clipped = clip(task, norms, bounds, found.loss, scales, is_padding_example)
        chosen = [jnp.where(clipped.contributes, factor, 0) for factor in clipped.factors]
        factors, grad_norms = jax.tree.map(
            lambda new, old: jnp.where(_is_measuring(factors[0]), new, old),
            (chosen, clipped.norms),
            (factors, past.result.grad_norms),
        )
        totals = [tap.total for tap in taps]
        return _Pass(factors, ClippedSum(totals, found.loss, grad_norms, found.aux))

    batch, dtype = len(is_padding_example), task.accumulate_dtype
    with stage("probe"):
        scales = task.loss_scale(task.params, task.frozen, examples)
    measuring = jnp.full(batch, _MEASURE, dtype)
    nothing = [jnp.zeros(x.shape, x.dtype) for x in map(task.accumulated, range(len(task.params)))]
    loss, *aux = (jnp.zeros((batch, *x.shape), x.dtype) for x in task.program.jaxpr.out_avals)
    groups = len(task.clipping.clip_norms)
    start = _Pass(
        [measuring] * groups, ClippedSum(nothing, loss, [jnp.zeros(batch, dtype)] * groups, aux)
    )
    return jax.lax.fori_loop(0, 2, lambda _, past: once(past), start).result


def _is_measuring(factors: Float[Array, " batch"]) -> Bool[Array, ""]:
    return factors[0] < 0


def _backward(
    task: TracedLoss, examples: list[Array], factors: list[Array], scales: Array | None
) -> _Backward:
    """The cotangents of all taps, which bring the factors to the sites."""
    taps, axes = _taps(task, len(factors[0]))

    def one(example: list[Array], taps: dict[str, Any]) -> tuple[Any, Any]:
        params = [taps["whole"].get(leaf, value) for leaf, value in enumerate(task.params)]
        at_site = functools.partial(_at_site, task)
        with stage("loss"):
            loss, aux, kept = evaluate(
                task.program, task.found, params, task.frozen, example, taps["sites"], at_site
            )
        carriers = {
            place: kept.pop(place) for place, tap in taps["sites"].items() if isinstance(tap, _Tap)
        }
        return (loss, carriers), (aux, kept)

    mapped = jax.vmap(one, in_axes=(0, axes))
    (loss, carriers), pullback, (aux, kept) = jax.vjp(
        lambda taps: mapped(examples, taps), taps, has_aux=True
    )
    at_sites = {
        place: jnp.broadcast_to(
            factors[task.groups[task.found.sites[place].view.leaf]].reshape(
                -1, *[1] * (carrier.ndim - 1)
            ),
            carrier.shape,
        )
        for place, carrier in carriers.items()
    }
    (cotangents,) = pullback((loss_cotangent(loss, scales), at_sites))
    return _Backward(loss, aux, kept, cotangents)


def _of_leaves(task: TracedLoss, found: _Backward, factors: list[Array]) -> list[_Tap]:
    """What all leaves' cotangents are turned into, with respect to the leaves themselves."""
    return [_of_leaf(task, leaf, found, factors[group]) for leaf, group in enumerate(task.groups)]


def _of_leaf(task: TracedLoss, leaf: int, found: _Backward, factors: Array) -> _Tap:
    parameter, dtype = task.accumulated(leaf), task.accumulate_dtype
    cotangents, sites = found.cotangents["sites"], task.found.of(leaf)
    own = None
    if leaf in task.found.whole:
        own = found.cotangents["whole"][leaf].astype(dtype)
    elif not sites:  # the loss does not depend on it
        return _Tap(jnp.zeros((len(factors), 2), dtype), jnp.zeros(parameter.shape, dtype))
    if len(sites) == 1:
        ((place, site),) = sites
        if isinstance(tap := cotangents[place], _Tap):
            total = site.view.pull_back(tap.total, parameter)
            return _Tap(_of_slices(tap.measured), total)
        if isinstance(tap, _Own):
            own = jax.vmap(lambda one: site.view.pull_back(one, parameter))(tap.gradient)
    if own is not None:
        return _tap(from_per_example, own, factors, len(factors))
    held = {place: (found.kept[place], cotangents[place]) for place, _ in sites}
    met = sum(_sizes(site)[1] for _, site in sites)

    def gradient(held: dict[Place, tuple[Any, Array]]) -> LeafGradient:
        kept, its = ({place: pair[i] for place, pair in held.items()} for i in range(2))
        return held_gradient(task, leaf, kept, its, {}, len(factors))

    return _tap(gradient, held, factors, _at_once(task, leaf, met, len(factors)))


def _is_alone(task: TracedLoss, site: Site) -> bool:
    """Whether what it knows, slice by slice, is all that there is to know of its leaf."""
    alone = len(task.found.of(site.view.leaf)) == 1
    return alone and site.view.isometric and "time" not in site.scans


def _is_small(task: TracedLoss, site: Site) -> bool:
    formed, met = _sizes(site)
    return task.costs[site.view.leaf].way == "kept" and 8 * formed <= met


def _sizes(site: Site) -> tuple[int, int]:
    """Entries of one example's gradient at a site, and of all that it meets there."""
    here = _inside(site)
    met = sum(math.prod(x.shape) for x in jax.tree.leaves((here.tap, here.kept)))
    return math.prod(here.view.value.shape), met


def _taps(task: TracedLoss, batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Zeros for every site, and where each has examples in front: no total has."""
    dtype = task.accumulate_dtype
    sites: dict[Place, Any] = {}
    axes: dict[Place, Any] = {}
    for place, site in task.found.sites.items():
        slices = site.tap.shape[: len(site.scans)]
        view = (*slices, *site.view.value.shape)
        axes[place] = 0
        if not _is_alone(task, site):
            sites[place] = jnp.zeros((batch, *site.tap.shape), site.tap.dtype)
        elif _is_small(task, site):
            sites[place] = _Own(jnp.zeros((batch, *view), dtype))
        else:
            sites[place] = _Tap(jnp.zeros((batch, *slices, 2), dtype), jnp.zeros(view, dtype))
            axes[place] = _Tap(0, None)  # pyright: ignore[reportArgumentType]
    whole = {
        leaf: jnp.broadcast_to(task.params[leaf], (batch, *task.params[leaf].shape))
        for leaf in task.found.whole
    }
    return {"sites": sites, "whole": whole}, {"sites": axes, "whole": dict.fromkeys(whole, 0)}


def _of_slices(measured: Float[Array, "batch *slices 2"]) -> Float[Array, "batch 2"]:
    """Norm and bound of a stacked parameter from those of its slices."""
    batch = measured.shape[0]
    with stage("norm"):
        norm, bound = (norms(measured[..., i].reshape(batch, -1)) for i in range(2))
    error = norm_error(math.prod(measured.shape[1:-1]), measured.dtype)
    return jnp.stack([norm, bound * (1 + error)], axis=-1)


def _at_site(task: TracedLoss, site: Site, inputs: list[Any], tap: Any) -> tuple[Array, Any]:
    """The result of a site, and a zero whose cotangent brings the clip factor.

    Both depend on the tap, which every example has its own of: the cotangent of what all examples
    share would be summed over them before it comes here.
    """
    if not isinstance(tap, _Tap | _Own):
        return tapped(site, inputs, tap)
    data = [i for i, x in enumerate(inputs) if i != site.operand and _is_data(site, i, x)]
    of_cotangent = _in_batch(task, site) if isinstance(tap, _Tap) else _alone(task, site)

    def outputs(result: Array, tap: _Tap | _Own) -> tuple[Array, Any]:
        zeros = tap.measured if isinstance(tap, _Tap) else tap.gradient
        its_own = result + zeros.reshape(-1)[0].astype(result.dtype)
        return its_own, tap.measured[0] if isinstance(tap, _Tap) else ()

    @jax.custom_vjp
    def use(tap: _Tap | _Own, *inputs: Any) -> tuple[Array, Any]:
        return outputs(evaluated(site.equation, inputs)[0], tap)

    def forward(tap: _Tap | _Own, *inputs: Any) -> tuple[Any, Any]:
        def of_data(*values: Array) -> Array:
            at = dict(zip(data, values, strict=True))
            return evaluated(site.equation, [at.get(i, x) for i, x in enumerate(inputs)])[0]

        result, pull_back = jax.vjp(of_data, *(inputs[i] for i in data))
        kept = site.kind.keep(site.equation, site.operand, list(inputs))
        return outputs(result, tap), (kept, pull_back)

    def backward(residuals: Any, cotangents: tuple[Array, Any]) -> tuple[Any, ...]:
        kept, pull_back = residuals
        of_data = dict(zip(data, pull_back(cotangents[0]), strict=True))
        return of_cotangent(kept, *cotangents), *(of_data.get(i) for i in range(len(inputs)))

    use.defvjp(forward, backward)
    return use(tap, *inputs)


def _is_data(site: Site, index: int, value: Any) -> bool:
    literal = isinstance(site.equation.invars[index], jex_core.Literal)
    return not literal and jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _alone(task: TracedLoss, site: Site) -> Callable[[Any, Array, Any], _Own]:
    """From what one example keeps and its cotangent to its gradient."""
    here, dtype = _inside(site), task.accumulate_dtype
    view = jax.ShapeDtypeStruct(here.view.value.shape, dtype)

    def of_one(kept: Any, cotangent: Array, carrier: Any) -> _Own:
        del carrier
        kept, cotangent = jax.tree.map(lambda x: x[None], (kept, cotangent))
        unscaled = cotangent.astype(dtype)
        with stage("norm"):
            return _Own(per_example_gradients(view, here, kept, unscaled, dtype)[0])

    return of_one


def _in_batch(task: TracedLoss, site: Site) -> Callable[[Any, Array, Array], _Tap]:
    """From what one example keeps, its cotangent and its factor to norms and weighted sum.

    It speaks of one example, as everything inside of `vmap`, but sums over all of them: the total
    has no examples in front.
    """
    leaf, here, dtype = site.view.leaf, _inside(site), task.accumulate_dtype
    view = jax.ShapeDtypeStruct(here.view.value.shape, dtype)

    def gradient(met: tuple[Any, Array]) -> LeafGradient:
        kept, cotangent = met
        uses = [(here, kept, cotangent.astype(dtype))]
        return leaf_gradient(view, uses, task.costs[leaf].way, dtype)

    @sum_over_examples
    def of_batch(kept: Any, cotangent: Array, factors: Array) -> _Tap:
        at_once = _at_once(task, leaf, _sizes(site)[1], len(factors))
        return _tap(gradient, (kept, cotangent), factors, at_once)

    @custom_vmap
    def of_one(kept: Any, cotangent: Array, factor: Array) -> _Tap:
        tap = of_batch(*jax.tree.map(lambda x: x[None], (kept, cotangent, factor)))
        return _Tap(tap.measured[0], tap.total)

    @of_one.def_vmap
    def _(size: int, is_mapped: list[Any], *values: Any) -> tuple[_Tap, _Tap]:
        mapped = jax.tree.map(
            lambda x, there: x if there else jnp.broadcast_to(x, (size, *x.shape)),
            values,
            tuple(is_mapped),
        )
        return of_batch(*mapped), _Tap(True, False)  # pyright: ignore[reportArgumentType]

    return of_one


def _tap(gradient: Callable[[Any], LeafGradient], met: Any, factors: Array, at_once: int) -> _Tap:
    """The norms, or the total, whichever the factors ask for; the other is zero.

    Args:
        gradient: from what some examples meet to their gradients.
        met: what all of them meet, examples in front of every array.
        factors: one an example.
        at_once: of how many examples gradients are found at once.
    """
    flat, structure = jax.tree.flatten((factors, met))

    def step(values: list[Array], is_padding: Array) -> tuple[Array, Array]:
        factors, met = structure.unflatten(values)

        def measure(met: Any) -> tuple[Array, Array]:
            with stage("norm"):
                leaf = gradient(met)
            return jnp.zeros_like(total_of(met)), jnp.stack([leaf.norm, leaf.bound], axis=-1)

        def total_of(met: Any) -> Array:
            with stage("norm"):
                leaf = gradient(met)
            with stage("sum"):
                return leaf.sum(factors, (factors > 0) & ~is_padding)

        def add(met: Any) -> tuple[Array, Array]:
            return total_of(met), jnp.zeros((len(factors), 2), factors.dtype)

        return jax.lax.cond(_is_measuring(factors), measure, add, met)

    total, measured = over_microbatches(step, flat, None, len(factors), at_once)
    return _Tap(measured, total)


def _inside(site: Site) -> Site:
    """The site as one iteration of the scans around it sees it."""

    def inner(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[len(site.scans) :], x.dtype)

    tap, kept = jax.tree.map(inner, (site.tap, site.kept))
    view = parameter_view(site.view.leaf, site.view.value)
    return site._replace(view=view, scans=(), tap=tap, kept=kept)


def _at_once(task: TracedLoss, leaf: int, met: int, num_examples: int) -> int:
    """Of how many examples gradients are formed at once: they take a quarter of what they meet.

    A divisor of their number, since to fill up the last part everything would have to be copied.
    """
    if task.costs[leaf].way == "inner_products":
        return num_examples
    fitting = num_examples * met // max(4 * task.params[leaf].size, 1)
    return max(
        n for n in range(1, num_examples + 1) if num_examples % n == 0 and n <= max(fitting, 1)
    )
