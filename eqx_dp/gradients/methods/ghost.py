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

from ..clip import norm_error, norms
from ..leaves import LeafGradient, from_per_example, leaf_gradient, per_example_gradients
from ..microbatches import over_microbatches
from ..taps import Place, Site, evaluate, tapped
from ..views import apply, parameter_view
from .contract import ClippedSum, Task, clip, held_gradient

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


class _Backward(NamedTuple):
    """What one pass through the loss and back finds."""

    loss: Float[Array, " batch"]
    aux: list[Array]
    kept: dict[Place, Any]
    cotangents: dict[str, Any]


def clipped_sum(
    task: Task, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Sums clipped gradients in a second pass that repeats the first.

    Guarantee: as that of the method ``per_example``. Cotangents that nearly cancel would round
    differently if the factors came in at the loss, or if the two passes were compiled apart. So
    both are one loop's body, and the factors come in at the sites: what is added is what was
    measured. The forward pass is in it too, for what it leaves to a backward pass costs the
    compiler less memory where it sees both.

    A leaf whose norm is not the sum of what its sites know each by itself (several uses, a use at
    every step of a scan, a use that no site describes) is treated as by ``book_keeping``.
    """
    direct = _direct(task)

    def once(factors: list[Array], norms: list[Array]) -> tuple[list[Array], ClippedSum]:
        # Were the barrier not there, the compiler would see that both passes find the same
        # cotangents, and hold them all from the first to the second.
        here, factors = jax.lax.optimization_barrier((examples, factors))
        found = _backward(task, direct, here, factors)
        return jax.lax.cond(
            _is_measuring(factors[0]),
            lambda found: _clip(task, direct, found, is_padding_example),
            lambda found: (factors, _sums(task, direct, found, factors, norms)),
            found,
        )

    groups, batch = len(task.clipping.clip_norms), len(is_padding_example)
    factors = [jnp.full(batch, _MEASURE, task.accumulate_dtype)] * groups
    shapes = jax.eval_shape(once, factors, factors)[1]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    _, result = jax.lax.fori_loop(
        0, 2, lambda _, past: once(past[0], past[1].grad_norms), (factors, zeros)
    )
    return result


def _is_measuring(factors: Float[Array, " batch"]) -> Bool[Array, ""]:
    return factors[0] < 0


def _backward(
    task: Task, direct: dict[int, Place], examples: list[Array], factors: list[Array]
) -> _Backward:
    """The cotangents of all taps, which bring the factors to the sites."""
    taps, axes = _taps(task, direct, len(factors[0]))

    def one(example: list[Array], taps: dict[str, Any]) -> tuple[Any, Any]:
        params = [taps["whole"].get(leaf, value) for leaf, value in enumerate(task.params)]
        at_site = functools.partial(_at_site, task)
        loss, aux, kept = evaluate(
            task.program, task.found, params, task.frozen, example, taps["sites"], at_site
        )
        carriers = {place: kept.pop(place) for place in direct.values()}
        return (loss, carriers), (aux, kept)

    mapped = jax.vmap(one, in_axes=(0, axes))
    (loss, carriers), pullback, (aux, kept) = jax.vjp(
        lambda taps: mapped(examples, taps), taps, has_aux=True
    )
    at_sites = {
        place: jnp.broadcast_to(
            factors[task.groups[leaf]].reshape(-1, *[1] * (carriers[place].ndim - 1)),
            carriers[place].shape,
        )
        for leaf, place in direct.items()
    }
    (cotangents,) = pullback((jnp.full_like(loss, task.loss_scale), at_sites))
    return _Backward(loss, aux, kept, cotangents)


def _held(task: Task, leaf: int, found: _Backward) -> LeafGradient:
    """A leaf of which something is held for each example."""
    sites, whole = found.cotangents["sites"], found.cotangents["whole"]
    places = task.found.of(leaf)
    if len(places) == 1 and isinstance(own := sites[places[0][0]], _Own):
        pull_back = places[0][1].view.pull_back
        return from_per_example(
            jax.vmap(lambda gradient: pull_back(gradient, task.accumulated(leaf)))(own.gradient)
        )
    return held_gradient(task, leaf, found.kept, sites, whole, len(found.loss))


def _clip(
    task: Task, direct: dict[int, Place], found: _Backward, is_padding_example: Array
) -> tuple[list[Array], ClippedSum]:
    """The factors, from the norms of all leaves; and no sum yet."""
    measured = [
        _of_slices(found.cotangents["sites"][direct[leaf]].measured)
        if leaf in direct
        else _held(task, leaf, found)[:2]
        for leaf in range(len(task.params))
    ]
    of_leaves, bounds = map(list, zip(*measured, strict=True))
    clipped = clip(task, of_leaves, bounds, found.loss, is_padding_example)
    shapes = map(task.accumulated, range(len(task.params)))
    return (
        [jnp.where(clipped.contributes, factor, 0) for factor in clipped.factors],
        ClippedSum(
            [jnp.zeros(x.shape, x.dtype) for x in shapes], found.loss, clipped.norms, found.aux
        ),
    )


def _sums(
    task: Task,
    direct: dict[int, Place],
    found: _Backward,
    factors: list[Array],
    norms: list[Array],
) -> ClippedSum:
    """The weighted sums of all leaves."""
    sums: list[Array] = []
    for leaf, group in enumerate(task.groups):
        if leaf in direct:
            view = task.found.sites[direct[leaf]].view
            total = found.cotangents["sites"][direct[leaf]].total
            sums.append(view.pull_back(total, task.accumulated(leaf)))
        else:
            sums.append(_held(task, leaf, found).sum(factors[group], factors[group] > 0))
    return ClippedSum(sums, found.loss, norms, found.aux)


def _direct(task: Task) -> dict[int, Place]:
    """The leaves whose norm and sum are found at their site, each with its place."""
    return {
        site.view.leaf: place
        for place, site in task.found.sites.items()
        if _is_alone(task, site) and not _is_small(task, site)
    }


def _is_alone(task: Task, site: Site) -> bool:
    """Whether what it knows, slice by slice, is all that there is to know of its leaf."""
    alone = len(task.found.of(site.view.leaf)) == 1
    return alone and site.view.isometric and "time" not in site.scans


def _is_small(task: Task, site: Site) -> bool:
    formed, met = _sizes(site)
    return task.costs[site.view.leaf].way == "kept" and 8 * formed <= met


def _sizes(site: Site) -> tuple[int, int]:
    """Entries of one example's gradient at a site, and of all that it meets there."""
    here = _inside(site)
    met = sum(math.prod(x.shape) for x in jax.tree.leaves((here.tap, here.kept)))
    return math.prod(here.view.value.shape), met


def _taps(
    task: Task, direct: dict[int, Place], batch: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Zeros for every site, and where each has examples in front: no total has."""
    dtype, at_once = task.accumulate_dtype, set(direct.values())
    sites: dict[Place, Any] = {}
    axes: dict[Place, Any] = {}
    for place, site in task.found.sites.items():
        slices = site.tap.shape[: len(site.scans)]
        view = (*slices, *site.view.value.shape)
        axes[place] = 0
        if place in at_once:
            sites[place] = _Tap(jnp.zeros((batch, *slices, 2), dtype), jnp.zeros(view, dtype))
            axes[place] = _Tap(0, None)
        elif _is_alone(task, site):
            sites[place] = _Own(jnp.zeros((batch, *view), dtype))
        else:
            sites[place] = jnp.zeros((batch, *site.tap.shape), site.tap.dtype)
    whole = {
        leaf: jnp.broadcast_to(task.params[leaf], (batch, *task.params[leaf].shape))
        for leaf in task.found.whole
    }
    return {"sites": sites, "whole": whole}, {"sites": axes, "whole": dict.fromkeys(whole, 0)}


def _of_slices(measured: Float[Array, "batch *slices 2"]) -> tuple[Array, Array]:
    """Norm and bound of a stacked parameter from those of its slices."""
    batch = measured.shape[0]
    norm, bound = (norms(measured[..., i].reshape(batch, -1)) for i in range(2))
    slices = math.prod(measured.shape[1:-1])
    return norm, bound if slices == 1 else bound * (1 + norm_error(slices, measured.dtype))


def _at_site(task: Task, site: Site, inputs: list[Any], tap: Any) -> tuple[Array, Any]:
    """The result of a site, and a zero whose cotangent brings the clip factor.

    The zero comes from the tap, which every example has its own of; of a constant the cotangent
    would be summed over examples.
    """
    if not isinstance(tap, _Tap | _Own):
        return tapped(site, inputs, tap)
    data = [i for i, x in enumerate(inputs) if i != site.operand and _is_data(site, i, x)]
    of_cotangent = _in_batch(task, site) if isinstance(tap, _Tap) else _alone(task, site)

    def with_carrier(result: Array, tap: _Tap | _Own) -> tuple[Array, Any]:
        return result, tap.measured[0] if isinstance(tap, _Tap) else ()

    @jax.custom_vjp
    def use(tap: _Tap | _Own, *inputs: Any) -> tuple[Array, Any]:
        return with_carrier(apply(site.equation, inputs)[0], tap)

    def forward(tap: _Tap | _Own, *inputs: Any) -> tuple[Any, Any]:
        def of_data(*values: Array) -> Array:
            at = dict(zip(data, values, strict=True))
            return apply(site.equation, [at.get(i, x) for i, x in enumerate(inputs)])[0]

        result, pull_back = jax.vjp(of_data, *(inputs[i] for i in data))
        kept = site.kind.keep(site.equation, site.operand, list(inputs))
        return with_carrier(result, tap), (kept, pull_back)

    def backward(residuals: Any, cotangents: tuple[Array, Any]) -> tuple[Any, ...]:
        kept, pull_back = residuals
        of_data = dict(zip(data, pull_back(cotangents[0]), strict=True))
        return of_cotangent(kept, *cotangents), *(of_data.get(i) for i in range(len(inputs)))

    use.defvjp(forward, backward)
    return use(tap, *inputs)


def _is_data(site: Site, index: int, value: Any) -> bool:
    literal = isinstance(site.equation.invars[index], jex_core.Literal)
    return not literal and jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _alone(task: Task, site: Site) -> Callable[[Any, Array, Any], _Own]:
    """From what one example keeps and its cotangent to its gradient."""
    here, dtype = _inside(site), task.accumulate_dtype
    view = jax.ShapeDtypeStruct(here.view.value.shape, dtype)

    def of_one(kept: Any, cotangent: Array, carrier: Any) -> _Own:
        del carrier
        kept, cotangent = jax.tree.map(lambda x: x[None], (kept, cotangent))
        unscaled = cotangent.astype(dtype) / task.loss_scale
        return _Own(per_example_gradients(view, here, kept, unscaled, dtype)[0])

    return of_one


def _in_batch(task: Task, site: Site) -> Callable[[Any, Array, Array], _Tap]:
    """From what one example keeps, its cotangent and its factor to norms and weighted sum.

    It speaks of one example, as everything inside of ``vmap``, but sums over all of them: the total
    has no examples in front.
    """

    def of_batch(kept: Any, cotangent: Array, factors: Array) -> _Tap:
        flat, structure = jax.tree.flatten((factors, (kept, cotangent)))
        total, measured = over_microbatches(
            lambda values, is_padding: _tap(task, site, *structure.unflatten(values), is_padding),
            flat,
            None,
            len(factors),
            _at_once(task, site, len(factors)),
        )
        return _Tap(measured, total)

    @custom_vmap
    def of_one(kept: Any, cotangent: Array, factor: Array) -> _Tap:
        alone = jax.tree.map(lambda x: x[None], (kept, cotangent, factor))
        tap = of_batch(*alone)
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


def _tap(
    task: Task, site: Site, factors: Array, values: tuple[Any, Array], is_padding: Array
) -> tuple[Array, Array]:
    """Total and norms of a few examples, at one iteration of the scans; one of them is zero."""
    dtype, here = task.accumulate_dtype, _inside(site)
    view = jax.ShapeDtypeStruct(here.view.value.shape, dtype)
    kept, cotangent = values
    values = (kept, cotangent.astype(dtype) / task.loss_scale)
    way = task.costs[site.view.leaf].way

    def measure(values: tuple[Any, Array]) -> tuple[Array, Array]:
        leaf = leaf_gradient(view, [(here, *values)], way, dtype)
        return jnp.zeros(view.shape, dtype), jnp.stack([leaf.norm, leaf.bound], axis=-1)

    def add(values: tuple[Any, Array]) -> tuple[Array, Array]:
        leaf = leaf_gradient(view, [(here, *values)], way, dtype)
        total = leaf.sum(factors, (factors > 0) & ~is_padding)
        return total, jnp.zeros((len(factors), 2), dtype)

    return jax.lax.cond(_is_measuring(factors), measure, add, values)


def _inside(site: Site) -> Site:
    """The site as one iteration of the scans around it sees it."""

    def inner(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[len(site.scans) :], x.dtype)

    tap, kept = jax.tree.map(inner, (site.tap, site.kept))
    view = parameter_view(site.view.leaf, site.view.value)
    return site._replace(view=view, scans=(), tap=tap, kept=kept)


def _at_once(task: Task, site: Site, num_examples: int) -> int:
    """How many examples' gradients are formed at once: a quarter of what the site meets, at most.

    A divisor of their number, since to fill up the last part everything would have to be copied.
    """
    if task.costs[site.view.leaf].way == "ghost":
        return num_examples
    formed, met = _sizes(site)
    fitting = num_examples * met // max(4 * formed, 1)
    return max(
        n for n in range(1, num_examples + 1) if num_examples % n == 0 and n <= max(fitting, 1)
    )
