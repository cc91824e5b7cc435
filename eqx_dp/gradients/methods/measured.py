"""Uses whose cotangents become norms or weighted sums within the backward pass, and are forgotten.

Both of a leaf are found by one program, which is traced once for all uses that are equal.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from ...isolation import sum_over_examples
from ...precision import stage
from ...sharding import evaluated_whole
from ..clip import norm_error, norms
from ..leaves import (
    LeafForm,
    LeafGradient,
    Way,
    arranged,
    as_formed,
    columns_last,
    example_gradient,
    leaf_gradient,
    norm_and_bound,
)
from ..microbatches import over_microbatches
from ..scattering import Scattering, scattering_of
from ..tapped import tapped, zero_tap
from ..taps import Address
from ..targets import Target
from ..uses import ParamUse, ScanUse, vjp
from .contract import TracedLoss


class Ask(NamedTuple):
    """What is asked for, in the accumulate dtype.

    Attributes:
        is_measuring: 1 for norms, 0 for weighted sums.
        factors: the weights; of one example, or of a batch.
    """

    is_measuring: Float[Array, ""]
    factors: Float[Array, "*batch"]


class Found(NamedTuple):
    """What a cotangent becomes; the one that is not asked for is zero. As a tap it is zero.

    Attributes:
        measured: the norm of an example's gradient, and a bound on that of what is added of it.
        total: the weighted sum of all gradients.
    """

    measured: Float[Array, "*slices 2"]
    total: Float[Array, "*view"]


class Formed(NamedTuple):
    """The same where an example's gradient is small beside what the use meets.

    Attributes:
        gradient: one example's own gradient.
    """

    gradient: Float[Array, "*view"]


class Known(NamedTuple):
    """What is known of a use.

    Attributes:
        use: the use; where its view repeats entries and its gradient is small, as if it did not.
        group: of clip norms, the one of its leaf.
        form: how the gradient with respect to the operand is found, in one iteration of the scans
            around. None where the cotangent is held, as it alone does not tell what there is to
            know of the leaf: there are several uses, or one that does not keep norms, or one that
            meets all of its leaf at every step of a scan; and of a `vjp`, which is a gradient.
        is_small: whether each example's gradient is formed, and leaves the backward pass.
        scattering: how the weighted sum leaves it, where each device keeps a part.
    """

    use: ParamUse
    group: int
    form: LeafForm | None = None
    is_small: bool = False
    scattering: Scattering | None = None

    @property
    def scans(self) -> tuple[ScanUse, ...]:
        """The scans around it."""
        return self.use.scans


def known_uses(traced: TracedLoss, is_held: bool = False) -> dict[Address, Known]:
    """What is known of every use.

    Args:
        traced: the loss.
        is_held: whether cotangents are held unless the gradient is small.
    """
    return {
        at: _known_of(traced, target, use, is_held)
        for target in traced.targets
        for root in target.roots
        for at, use in traced.uses.of[root].items()
    }


def _known_of(traced: TracedLoss, target: Target, use: ParamUse, is_held: bool) -> Known:
    way, group, root = target.way, target.group, target.roots[0]
    is_alone = target.relation == "itself" and len(traced.uses.of[root]) == 1
    is_alone &= "time" not in use.scans
    is_once = use.view.is_isometric
    if not is_alone or use.kind is vjp or not (is_once or use.matrices is None):
        return Known(use, group)
    here, own, shape = use.inside(), use, use.inside().view.shape
    if not is_once:
        view, inner = use.view.without_repeats(len(use.slices))
        here, own = here._replace(view=inner), use._replace(view=view)
        shape = view.shape[len(use.slices) :]
    is_small = way == "kept" and 8 * math.prod(shape) <= _met(here)
    if not is_small and (is_held or not is_once):
        return Known(use, group)
    use, form = own, LeafForm(shape, (here,), way, traced.accumulate_dtype)
    if is_small or root >= len(traced.params):
        return Known(use, group, form, is_small)
    scattering = scattering_of(use, traced.params[root].shape, traced.cut(root))
    return Known(use, group, form, False, scattering)


def tap_of(known: Known, dtype: np.dtype[Any]) -> Array | Formed:
    """Zeros of one example, whose cotangent is its gradient, or the cotangent of the use."""
    use, form = known.use, known.form
    if form is None:
        return zero_tap(use, dtype)
    assert known.is_small
    return Formed(jnp.zeros((*use.slices, *form.shape), form.dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def of_parameter(formed: Formed, use: ParamUse, shape: tuple[int, ...]) -> Array:
    """Each example's gradient with respect to the parameter, from that to the only use of it."""
    return jax.vmap(lambda one: use.view.pulled_back(one, shape))(formed.gradient)


def formed_gradient(
    traced: TracedLoss, known: dict[Address, Known], target: Target, cotangents: dict[Address, Any]
) -> LeafGradient | None:
    """The gradient of a target that was formed within the backward pass; None where it was not."""
    root = target.roots[0]
    for at in traced.uses.of[root]:
        if isinstance(tap := cotangents[at], Formed):
            return LeafGradient(of_parameter(tap, known[at].use, traced.root(root).shape))
    return None


def _met(use: ParamUse) -> int:
    """Entries of all that one example meets at a use, in one iteration of the scans around."""
    arrays = jax.tree.leaves((use.result, use.residuals))
    return sum(math.prod(x.shape[len(use.stacked) :]) for x in arrays)


def at_use(
    known: Known, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Any
) -> tuple[Array, Any]:
    """The result of a use, whose cotangent becomes that of the tap.

    In the place of residuals stands what asks for it (an `Ask` of zeros), where something is to be
    asked for: what its cotangent says. So the forward pass does not depend on it.
    """
    use = known.use
    if known.form is None:
        return tapped(use, equation, inputs, tap)
    (result,) = evaluated_whole(equation, inputs)
    found: Any = _watched(known, result, tap, use.kept(inputs))
    watched, asking = found
    return use.received(watched), asking


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(
    known: Known, result: Array, tap: Found | Formed, residuals: Any
) -> tuple[Array, Ask | tuple[()]]:
    """The result of a use as it is; from its cotangent follows that of the tap.

    A tap of `Formed` asks for nothing.

    It depends on the tap, which every example has its own of: the cotangent of what all examples
    share would be summed over them before it comes here.
    """
    del residuals
    return _marked(known, result, tap)


def _marked(known: Known, result: Array, tap: Found | Formed) -> tuple[Array, Ask | tuple[()]]:
    """What `_watched` returns, without its rule: a rule that stays would have no derivative."""
    zero = tap.measured if isinstance(tap, Found) else tap.gradient
    result = result + zero.reshape(-1)[0].astype(result.dtype)
    if isinstance(tap, Formed):
        return result, ()
    assert known.form is not None
    nothing = jnp.zeros((), known.form.dtype)
    return result, Ask(nothing, nothing)


def _watched_forward(
    known: Known, result: Array, tap: Found | Formed, residuals: Any
) -> tuple[Any, Any]:
    return _marked(known, result, tap), residuals


def _watched_backward(known: Known, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    cotangent, asked = cotangents
    assert known.form is not None
    if known.is_small:
        return cotangent, _formed(known.form, residuals, cotangent), None
    of_batch = _of_batch(known.form, known.scattering)
    return cotangent, of_batch(residuals, cotangent, asked), None


_watched.defvjp(_watched_forward, _watched_backward)


@functools.partial(jax.jit, static_argnums=0)
def _formed(form: LeafForm, residuals: Any, cotangent: Array) -> Formed:
    """One example's gradient."""
    with stage("norm"):
        return Formed(example_gradient(form, residuals, cotangent))


@functools.lru_cache(maxsize=1024)
def _of_batch(form: LeafForm, scattering: Scattering | None) -> Callable[[Any, Array, Ask], Found]:
    """From what one example meets and is asked for to norms and weighted sum.

    It speaks of one example, as everything inside of `vmap`, but sums over all of them: the total
    has no examples in front. With a `scattering` it is over those of other devices as well.
    """

    def scattered(total: Array) -> Array:
        assert scattering is not None
        return scattering(arranged(form, total))

    @sum_over_examples
    def of_batch(residuals: Any, cotangent: Array, asked: Ask) -> Found:
        batch = len(asked.factors)
        several = at_once(form.way, form.shape, form.uses, batch)
        order = columns_last(form.uses[0])
        cotangent = jnp.transpose(cotangent, (0, *(1 + axis for axis in order)))
        met, own = (residuals, cotangent), as_formed(form)

        def gradient(met: Any) -> LeafGradient:
            residuals, cotangent = met
            back = (0, *(1 + axis for axis in np.argsort(order)))
            return leaf_gradient(own, [(residuals, jnp.transpose(cotangent, back))])

        if scattering is not None:
            ends = scattering.part, scattered
            return ask(gradient, own.shape, met, asked, several, ends)
        found = ask(gradient, own.shape, met, asked, several)
        return found._replace(total=arranged(form, found.total))

    @custom_vmap
    def of_one(residuals: Any, cotangent: Array, asked: Ask) -> Found:
        met = residuals, cotangent, asked.factors
        residuals, cotangent, factors = jax.tree.map(lambda x: x[None], met)
        found = of_batch(residuals, cotangent, Ask(asked.is_measuring, factors))
        return Found(found.measured[0], found.total)

    @of_one.def_vmap
    def _(size: int, is_mapped: list[Any], *values: Any) -> tuple[Found, Found]:
        residuals, cotangent, asked = jax.tree.map(
            lambda x, there: x if there else jnp.broadcast_to(x, (size, *x.shape)),
            values,
            tuple(is_mapped),
        )
        asked = asked._replace(is_measuring=values[2].is_measuring)
        is_mapped_out: Any = Found(cast(Any, True), cast(Any, False))
        return of_batch(residuals, cotangent, asked), is_mapped_out

    return of_one


def ask(
    gradient: Callable[[Any], LeafGradient],
    shape: tuple[int, ...],
    met: Any,
    asked: Ask,
    several: int,
    ends: tuple[tuple[int, ...], Callable[[Array], Array]] | None = None,
) -> Found:
    """The norms, or the weighted sum, whichever is asked for; the other is zero.

    Guarantee: what is measured and what is added, in one pass or in two, is one array, made by one
    and the same kernel, or the bound covers every order of all sums on the way. A gradient that is
    formed is an operand of the choice between the two; each half of it would be compiled apart, and
    might add up in another order: where terms nearly cancel, to something else.

    Args:
        gradient: from what some examples meet to their gradients.
        shape: of the sum.
        met: what all of them meet, examples in front of every array.
        asked: what for.
        several: of how many examples gradients are found at once.
        ends: the shape of what becomes of the sum, and how it does; None where it stays. Devices
            may meet there: all of them ask for the same.
    """
    flat, structure = jax.tree.flatten((asked.factors, met))
    batch, dtype = len(asked.factors), asked.factors.dtype

    def step(values: list[Array], is_padding: Array) -> tuple[Array, Array]:
        factors, met = structure.unflatten(_within(values))
        with stage("norm"):
            there = gradient(met)
        formed = there.formed
        held = _within(jax.tree.leaves(met) if formed is None else [formed])

        def leaf(held: list[Array]) -> LeafGradient:
            if formed is not None:
                return there._replace(formed=held[0])
            with stage("norm"):  # again: what is not asked for is dead code
                return gradient(jax.tree.unflatten(jax.tree.structure(met), held))

        def measure(held: list[Array]) -> tuple[Array, Array]:
            with stage("norm"):
                known = norm_and_bound([leaf(held)], len(factors), dtype)
            return jnp.zeros(shape, dtype), jnp.stack(known, axis=-1)

        def add(held: list[Array]) -> tuple[Array, Array]:
            its = leaf(held)
            with stage("sum"):
                total = its.sum(factors, (factors > 0) & ~is_padding)
            return total, jnp.zeros((len(factors), 2), dtype)

        return jax.lax.cond(asked.is_measuring > 0, measure, add, held)

    total, measured = over_microbatches(step, flat, None, batch, several)
    if ends is not None:
        part, end = ends
        total = jax.lax.cond(asked.is_measuring > 0, lambda _: jnp.zeros(part, dtype), end, total)
    return Found(measured, total)


def _within(flat: list[Array]) -> list[Array]:
    """What a branch is given, in the form that it is given in: none is rearranged on the way in."""
    return jax.lax.optimization_barrier(flat)


@jax.jit
def ask_formed(grads: Float[Array, "batch *shape"], asked: Ask) -> Found:
    """The same of gradients that are there."""
    return ask(LeafGradient, grads.shape[1:], grads, asked, len(grads))


def of_slices(measured: Float[Array, "batch *slices 2"]) -> Float[Array, "batch 2"]:
    """Norm and bound of a stacked parameter from those of its slices."""
    batch = measured.shape[0]
    with stage("norm"):
        norm, bound = (norms(measured[..., i].reshape(batch, -1)) for i in range(2))
    error = norm_error(math.prod(measured.shape[1:-1]), measured.dtype)
    return jnp.stack([norm, bound * (1 + error)], axis=-1)


def at_once(way: Way, shape: tuple[int, ...], uses: tuple[ParamUse, ...], batch: int) -> int:
    """Of how many examples gradients are formed at once: they take a quarter of what they meet.

    A divisor of their number, since to fill up the last part everything would have to be copied.
    """
    if way == "inner_products":
        return batch
    fitting = batch * sum(map(_met, uses)) // max(4 * math.prod(shape), 1)
    return max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(fitting, 1))
