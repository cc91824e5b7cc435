"""From residuals and cotangents to each leaf's norms and weighted sum.

Two ways lead there. *Ghost* (Goodfellow, 2015; Li et al., "Large Language Models Can Be Strong
Differentially Private Learners", 2022): the norm from inner products between time steps, the sum as
one contraction over examples and time; no example's gradient is ever formed. *Kept*: each example's
gradient is formed from its factors, and summed by its weight.

Leaves whose uses are equal have one program, which is traced once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .clip import combined_norms, norm_error, norms_of_parts, weighted_sum
from .computed_once import computed_once
from .cross_terms import Member, overlaps
from .gram import (
    OneHot,
    OuterProducts,
    gram_norms,
    one_term,
    row_norms,
    sum_of_products,
    to_common_scale,
)
from .layouts import layout_of
from .powers import halves, without_subnormal
from .scattering import Scattering
from .uses import ParamUse, contraction, convolution, lookup

Way: TypeAlias = Literal["inner_products", "kept", "whole", "unused"]

Met: TypeAlias = tuple[Any, Array]
"""Residuals of a use and its cotangent, examples in front, then the scans around it."""


def _as_it_is(total: Array) -> Array:
    return total


class LeafGradient(NamedTuple):
    """The gradient of one leaf for a batch of examples, in whatever form it is at hand.

    Attributes:
        formed: each example's gradient, where it is there.
        arranged: where it is, from a weighted sum of what is there to that of the leaf.
        known: where it is not, the norm of each example's gradient as it was computed, and an upper
            bound on the true norm of what is added for a factor of 1; None where both are zero.
        weighted: from factors and a mask of the examples that contribute to their weighted sum;
            None where that is made of what is there.
    """

    formed: Float[Array, "batch ..."] | None = None
    arranged: Callable[[Array], Array] = _as_it_is
    known: tuple[Float[Array, " batch"], Float[Array, " batch"]] | None = None
    weighted: Callable[[Float[Array, " batch"], Bool[Array, " batch"]], Array] | None = None

    def sum(self, factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]) -> Array:
        """The weighted sum over the examples that contribute."""
        if self.weighted is not None:
            return self.weighted(factors, contributes)
        assert self.formed is not None
        return self.arranged(weighted_sum(self.formed, factors, contributes))


class LeafForm(NamedTuple):
    """How the gradient of a leaf is found. Leaves of equal form differ in their numbers alone.

    Attributes:
        shape: of the parameter.
        uses: all uses of it.
        way: which way.
        dtype: the accumulate dtype.
    """

    shape: tuple[int, ...]
    uses: tuple[ParamUse, ...]
    way: Way
    dtype: np.dtype[Any]


def no_gradient(shape: tuple[int, ...], dtype: np.dtype[Any]) -> LeafGradient:
    """That of a leaf which the loss does not use: what it adds is zero, and so is the bound."""
    return LeafGradient(weighted=lambda *_: jnp.zeros(shape, dtype))


def norm_and_bound(
    leaves: Sequence[LeafGradient], batch: int, dtype: np.dtype[Any]
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """The norm of the gradient that some leaves make together, and the bound on what is added.

    What is there as it is added is measured together, so that all has one scale: its bound covers
    no more than the norm's own error.
    """
    formed = [leaf.formed for leaf in leaves if leaf.formed is not None]
    known = [leaf.known for leaf in leaves if leaf.known is not None]
    if formed:
        known.append(_of_formed(formed))
    return combined(known, batch, dtype)


def combined(
    known: Sequence[tuple[Float[Array, " batch"], Float[Array, " batch"]]],
    batch: int,
    dtype: np.dtype[Any],
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """Norm and bound of gradients from those of their parts."""
    if len(known) == 1:
        return known[0]
    norm, bound = (combined_norms([of[i] for of in known], (batch,), dtype) for i in range(2))
    return norm, bound * (1 + norm_error(len(known), dtype))


@jax.jit
def _of_formed(grads: list[Float[Array, "batch ..."]]) -> tuple[Array, Array]:
    norm = norms_of_parts(grads)
    longest = max(math.prod(x.shape[1:]) for x in grads)
    return norm, norm * (1 + norm_error(longest, norm.dtype, len(grads)))


def leaf_gradient(
    form: LeafForm, met: Sequence[Met], scattering: Scattering | None = None
) -> LeafGradient:
    """The gradient of one leaf from its uses.

    Args:
        form: of the leaf.
        met: of every use.
        scattering: how the weighted sum goes to devices slice by slice, which then hold a part each
            of the sum over all; None where it is this device's own. It changes nothing where each
            example's gradient is formed, and so held as a whole.
    """
    if form.way == "kept":
        return LeafGradient(_formed_alike(form, list(met)), functools.partial(arranged, form))
    norm, bound, held = measured(form, list(met))
    total = functools.partial(summed, form, held)
    if scattering is not None:
        total = functools.partial(_scattered, form, scattering, held)
    return LeafGradient(known=(norm, bound), weighted=total)


@functools.partial(jax.jit, static_argnums=0)
def measured(form: LeafForm, met: list[Met]) -> tuple[Array, Array, Any]:
    """Norm, bound, and what the weighted sum is made of, see `_ghost`, where none is formed."""
    met = [(residuals, cotangent.astype(form.dtype)) for residuals, cotangent in met]
    parts = [_ghost(form, members, met) for members in _sets(form)]
    known, batch = [its[:2] for its in parts], len(jax.tree.leaves(met)[0])
    return *combined(known, batch, form.dtype), [held for _, _, held in parts]


@functools.partial(jax.jit, static_argnums=0)
def summed(
    form: LeafForm, held: Any, factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]
) -> Array:
    """The weighted sum."""
    sums: list[Array] = []
    for members, (products, powers) in zip(_sets(form), held, strict=True):
        weights = _times(factors, powers)
        for (index, *_), (x, g) in zip(members, products, strict=True):
            use = form.uses[index]
            total = weighted(use, x, g, weights, contributes)
            sums.append(to_parameter(form, use, total))
    return functools.reduce(jnp.add, sums)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scattered(
    form: LeafForm,
    scattering: Scattering,
    held: Any,
    factors: Float[Array, " batch"],
    contributes: Bool[Array, " batch"],
) -> Array:
    """The weighted sum of a leaf with one use, slice by slice, of which a device keeps its part."""
    (use,), ((((x, g),), powers),) = form.uses, held
    weights, inner = _times(factors, powers), use.inside()
    here = LeafForm(inner.view.shape, (inner,), form.way, form.dtype)
    steps = math.prod(use.slices)

    def at(index: Array) -> Array:
        def taken(x: Array) -> Array:
            size = x.shape[1] // steps if x.shape[1] > 1 else 1
            return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1)

        at_hand, cotangents, of_slice = jax.tree.map(taken, (x, g, weights))
        total = weighted(inner, at_hand, cotangents, of_slice, contributes)
        return scattering(to_parameter(here, inner, total))

    return scattering.stacked(jax.lax.map(at, jnp.arange(steps)))


def _times(
    factors: Float[Array, " batch"], powers: Sequence[Float[Array, "batch #group"]]
) -> Float[Array, "batch #group"]:
    """Powers of two come in with the factor: g alone could vanish beside a large x.

    What is no normal number then is zero: where a machine keeps it, it has lost digits.
    """
    return without_subnormal(functools.reduce(jnp.multiply, powers, factors[:, None]))


def _sets(form: LeafForm) -> tuple[tuple[Member, ...], ...]:
    """The uses that overlap, together."""
    found = overlaps(form.uses, form.shape)
    assert found is not None
    return found


def example_gradient(form: LeafForm, residuals: Any, cotangent: Array) -> Float[Array, "..."]:
    """One example's gradient with respect to a parameter that has one use."""
    formed = _formed(form.uses[0], residuals, cotangent, form.dtype)
    return to_parameter(form, form.uses[0], formed)


def per_example_gradients(form: LeafForm, met: Sequence[Met]) -> Float[Array, "batch ..."]:
    """Each example's gradient with respect to the parameter."""

    def form_all(met: Sequence[Met]) -> Array:
        parts = [
            jax.vmap(functools.partial(example_gradient, form._replace(uses=(use,))))(*its)
            for use, its in zip(form.uses, met, strict=True)
        ]
        return functools.reduce(jnp.add, parts)

    # A sum of products, which several loops could round in several ways.
    return form_all(met) if len(met) == 1 else computed_once(form_all, met, met[0][1])


@functools.partial(jax.jit, static_argnums=0)
def _formed_alike(form: LeafForm, met: list[Met]) -> Float[Array, "batch ..."]:
    """Each example's gradient, in the form that it comes in where that is as good as another."""
    met = [(residuals, cotangent.astype(form.dtype)) for residuals, cotangent in met]
    if not _is_left_as_formed(form):
        return per_example_gradients(form, met)
    (use,), (one,) = form.uses, met
    return jax.vmap(lambda residuals, g: _formed(use, residuals, g, form.dtype))(*one)


def _is_left_as_formed(form: LeafForm) -> bool:
    """Whether each example's gradient stays as it comes, and only the sum is rearranged.

    To rearrange entries changes no norm. It is for convolutions: the product of a contraction comes
    as the parameter is by itself, and is slower in another form (a fifth of the whole on the small
    GPT of the benchmark).
    """
    (use, *others) = form.uses
    return not others and use.kind is convolution and use.view.is_isometric


def as_formed(form: LeafForm) -> LeafForm:
    """The form whose parameter is what each example's gradient comes as; see `arranged`."""
    if form.way != "kept" or not _is_left_as_formed(form):
        return form
    (use,) = form.uses
    shape = (use.view if use.matrices is None else use.matrices).shape
    return form._replace(shape=shape, uses=(use._replace(matrices=layout_of(shape)),))


def arranged(form: LeafForm, total: Array) -> Array:
    """The sum of gradients of `as_formed`, in the order of the parameter."""
    is_moved = form.way == "kept" and _is_left_as_formed(form)
    return to_parameter(form, form.uses[0], total) if is_moved else total


def _over_scans(function: Callable[..., Any], use: ParamUse) -> Callable[..., Any]:
    """Maps a function of one iteration over the scans around a use."""
    for _ in use.stacked:
        function = jax.vmap(function)
    return function


def _formed(use: ParamUse, residuals: Any, cotangent: Array, dtype: np.dtype[Any]) -> Array:
    """One example's gradient, as matrices where the use has some, else as the view."""
    if use.scans and (use.kind is contraction or use.kind is convolution):
        return contraction.outer_products(*_factors_of_one(use, residuals, cotangent, dtype))

    def of_one(residuals: Any, cotangent: Array) -> Array:
        wide = jax.tree.map(lambda x: _float_to(x, dtype), use.restored(residuals))
        return use.kind.gradient(use.operation, use.operand, wide, cotangent)

    gradient = _over_scans(of_one, use)(residuals, cotangent.astype(dtype))
    times = tuple(axis for axis, its in enumerate(use.stacked) if its == "time")
    return jnp.sum(gradient, times) if times else gradient


def to_parameter(form: LeafForm, use: ParamUse, gradient: Array) -> Array:
    """From the form that a gradient comes in to the parameter's."""
    layout = use.view if use.matrices is None else use.matrices
    return layout.pulled_back(gradient.reshape(layout.shape), form.shape)


def _float_to(x: Array, dtype: np.dtype[Any]) -> Array:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _factors_of_one(
    use: ParamUse, residuals: Any, cotangent: Array, dtype: np.dtype[Any]
) -> tuple[Array, Float[Array, "group time features_out"]]:
    """One example's factors: scans over slices make groups, scans over time more time."""
    kind: Any = use.kind

    def of_one(residuals: Any, cotangent: Array) -> tuple[Array, Array]:
        return kind.factors(use.operation, use.operand, use.restored(residuals), cotangent)

    x, g = _over_scans(of_one, use)(residuals, cotangent)
    return _fold_scans(use, _float_to(x, dtype)), _fold_scans(use, g.astype(dtype))


def _fold_scans(use: ParamUse, factor: Array) -> Array:
    """`(*scans, group, time, features)` to `(slices x group, scans x time, features)`."""
    slices = [axis for axis, its in enumerate(use.scans) if its == "slices"]
    times = [axis for axis, its in enumerate(use.scans) if its == "time"]
    group, time, features = (len(use.scans) + i for i in range(3))
    shape = factor.shape
    groups, steps = (
        math.prod(shape[i] for i in axes) for axes in ((*slices, group), (*times, time))
    )
    order = (*slices, group, *times, time, features)
    return jnp.transpose(factor, order).reshape(groups, steps, shape[features])


def _ghost(form: LeafForm, members: Sequence[Member], met: list[Met]) -> tuple[Array, Array, Any]:
    """Norm and bound of what uses that overlap add, and what their weighted sum is made of.

    The latter is of each use the sides of its outer products, and the powers of two, of every
    example (and group), that they were divided by, to be multiplied one after the other.
    """
    terms = [
        OuterProducts(*sides(form.uses[index], *met[index], form.dtype), transposed, sign)
        for index, transposed, sign in members
    ]
    first, *others = terms
    rows = [use.x.rows for use in terms if isinstance(use.x, OneHot) and not use.transposed]
    if len(rows) == len(terms):  # all look up rows, and none of them columns
        values = jnp.concatenate([use.sign * use.g for use in terms], axis=2)
        norm, bound = row_norms(jnp.concatenate(rows, axis=2), values)
        powers = ()
    elif not others and first.time == 1 and not isinstance(first.x, OneHot):
        norm, bound, x, scale = one_term(first.x, first.g)
        terms, powers = [first._replace(x=x)], (scale,)
    else:
        terms, exponent = to_common_scale(terms)
        norm, bound = gram_norms(terms)
        tiny = jnp.finfo(form.dtype).tiny
        powers = halves(exponent, form.dtype)
        norm, scaled_back = (functools.reduce(jnp.multiply, powers, x) for x in (norm, bound))
        bound = jnp.where(bound > 0, jnp.maximum(scaled_back, tiny), bound)
        powers = tuple(x[:, None] for x in powers)
    return norm, bound, ([(use.x, use.g) for use in terms], powers)


def columns_last(use: ParamUse) -> tuple[int, ...]:
    """The axes of the cotangent of a contraction in the order in which it is needed.

    A cotangent on its way into a conditional, from which it comes in another order, is rearranged
    before it goes in: the compiler would compute it, and all that leads to it in the same loop, a
    second time.
    """
    rank = len(use.result.shape)
    if use.kind is not contraction:
        return tuple(range(rank))
    order = contraction.columns_last(use.operation, use.operand)
    front = rank - len(order)
    return (*range(front), *(front + axis for axis in order))


def sides(
    use: ParamUse, residuals: Any, cotangent: Array, dtype: np.dtype[Any]
) -> tuple[Any, Float[Array, "batch group time features_out"]]:
    """All examples' outer products."""
    x, g = jax.vmap(lambda r, g: _factors_of_one(use, r, g, dtype))(residuals, cotangent)
    if use.kind is not lookup:
        return x, g
    rows, (num_rows, *_) = x[..., 0], use.operation.operands[0]
    return OneHot(rows), jnp.where((rows < num_rows)[..., None], g, 0)


def weighted(
    use: ParamUse,
    x: Any,
    g: Float[Array, "batch group time features_out"],
    weights: Float[Array, "batch #group"],
    contributes: Bool[Array, " batch"],
) -> Float[Array, "group features_in features_out"]:
    """The weighted sum of all examples' outer products."""
    if not isinstance(x, OneHot):
        return sum_of_products(x, g, weights, contributes)
    groups, features = g.shape[1], g.shape[-1]
    g = jnp.where(contributes[:, None, None, None], g * weights[..., None, None], 0)
    scatter = functools.partial(lookup.scatter, use.operation.operands[0][0])
    if groups == 1:
        return scatter(x.rows.reshape(-1), g.reshape(-1, features))[None]
    return jax.vmap(scatter)(
        jnp.moveaxis(x.rows, 1, 0).reshape(groups, -1),
        jnp.moveaxis(g, 1, 0).reshape(groups, -1, features),
    )
