"""From residuals and cotangents to each leaf's norms and weighted sum.

A factored leaf (Goodfellow, 2015; Li et al., "Large Language Models Can Be Strong Differentially
Private Learners", 2022) has its norm from inner products between time steps, and its sum as one
contraction over examples and time; no example's gradient is ever formed. Leaves whose uses are
equal have one program, which is traced once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..sharding import Cut
from .clip import combined_norms, norm_error, norms_of_parts, weighted_sum
from .gram import (
    OneHot,
    OuterProducts,
    gram_norms,
    one_term,
    row_norms,
    sum_of_products,
    to_common_scale,
)
from .powers import halves, without_subnormal
from .uses import ParamUse, contraction, lookup


class Scattering(NamedTuple):
    """How the weighted sum at a use, in one iteration of the scans around, goes to devices.

    Attributes:
        use: of the slice of a parameter; of the parameter where no scan goes over slices.
        cut: of the parameter.
        ahead: the parameter's dimensions in front of those of a slice.
    """

    use: ParamUse
    cut: Cut
    ahead: tuple[int, ...]

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a device's part."""
        return self.cut.local(self.use.shape)

    def stacked(self, parts: Array) -> Array:
        """A device's part of the whole parameter's sum, from those of all slices."""
        return parts.reshape(*self.ahead, *self.part)

    def __call__(self, total: Array) -> Array:
        """A device's part of the sum over devices, from the operand's over its own examples."""
        return self.cut.scattered(self.use.from_operand(total))


def scattering_of(use: ParamUse, cut: Cut | None) -> Scattering | None:
    """The same, where scans go over whole slices of a parameter, in order, and cut none of it.

    Args:
        use: the only one of a parameter.
        cut: how its sum is cut; None where it is not.

    Returns:
        None where there are no such slices: the sum is then known, and scattered, as a whole.
    """
    scans = len(use.slices)
    if cut is None or any(dim < scans for dim, _ in cut.over(len(use.shape))):
        return None
    if any(step.lead < scans for step in use.view) or use.shape[:scans] != use.slices:
        return None
    inner = use.inside()._replace(
        shape=use.shape[scans:], view=tuple(step.inside(scans) for step in use.view)
    )
    return Scattering(inner, cut, use.shape[:scans])


Met: TypeAlias = tuple[Any, Array]
"""Residuals of a use and its cotangent, examples in front, then the scans around it."""

Known: TypeAlias = tuple[Float[Array, " batch"], Float[Array, " batch"]]
"""The norm of each example's gradient as it was computed, and an upper bound on the true norm of
what is added for a factor of 1."""


class LeafGradient(NamedTuple):
    """The gradient of one leaf for a batch of examples, in whatever form it is at hand.

    Attributes:
        formed: each example's gradient, where it is there.
        known: where it is not, norm and bound; None where both are zero.
        weighted: from factors and a mask of the examples that contribute to their weighted sum;
            None where that is made of what is there.
    """

    formed: Float[Array, "batch ..."] | None = None
    known: Known | None = None
    weighted: Callable[[Float[Array, " batch"], Bool[Array, " batch"]], Array] | None = None

    def sum(self, factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]) -> Array:
        """The weighted sum over the examples that contribute."""
        if self.weighted is not None:
            return self.weighted(factors, contributes)
        assert self.formed is not None
        return weighted_sum(self.formed, factors, contributes)


class LeafForm(NamedTuple):
    """How the gradient of a factored leaf is found: leaves of equal form differ in numbers alone.

    Attributes:
        shape: of the parameter.
        uses: all uses of it.
        dtype: the accumulate dtype.
    """

    shape: tuple[int, ...]
    uses: tuple[ParamUse, ...]
    dtype: np.dtype[Any]


def no_gradient(shape: tuple[int, ...], dtype: np.dtype[Any]) -> LeafGradient:
    """That of a leaf which the loss does not use: what it adds is zero, and so is the bound."""
    return LeafGradient(weighted=lambda *_: jnp.zeros(shape, dtype))


def norm_and_bound(leaves: Sequence[LeafGradient], batch: int, dtype: np.dtype[Any]) -> Known:
    """The norm of the gradient that some leaves make together, and the bound on what is added.

    What is there as it is added is measured together, so that all has one scale: its bound covers
    no more than the norm's own error.
    """
    formed = [leaf.formed for leaf in leaves if leaf.formed is not None]
    known = [leaf.known for leaf in leaves if leaf.known is not None]
    if formed:
        known.append(_of_formed(formed))
    return combined(known, batch, dtype)


def combined(known: Sequence[Known], batch: int, dtype: np.dtype[Any]) -> Known:
    """Norm and bound of gradients from those of their parts."""
    if len(known) == 1:
        return known[0]
    norm, bound = (combined_norms([of[i] for of in known], (batch,), dtype) for i in range(2))
    return norm, bound * (1 + norm_error(len(known), dtype))


@jax.jit
def _of_formed(grads: list[Float[Array, "batch ..."]]) -> Known:
    norm = norms_of_parts(grads)
    longest = max(math.prod(x.shape[1:]) for x in grads)
    return norm, norm * (1 + norm_error(longest, norm.dtype, len(grads)))


def leaf_gradient(
    form: LeafForm, met: Sequence[Met], scattering: Scattering | None = None
) -> LeafGradient:
    """The gradient of one factored leaf from its uses.

    Args:
        form: of the leaf.
        met: of every use.
        scattering: how the weighted sum goes to devices slice by slice, which then hold a part each
            of the sum over all; None where it is this device's own.
    """
    norm, bound, held = measured(form, list(met))
    total = functools.partial(summed, form, held)
    if scattering is not None:
        total = functools.partial(_scattered, form, scattering, held)
    return LeafGradient(known=(norm, bound), weighted=total)


@functools.partial(jax.jit, static_argnums=0)
def measured(form: LeafForm, met: list[Met]) -> tuple[Array, Array, Any]:
    """Norm, bound, and what the weighted sum is made of, see `_factored`."""
    met = [(residuals, cotangent.astype(form.dtype)) for residuals, cotangent in met]
    parts = [_factored(form, members, met) for members in _sets(form)]
    known, batch = [its[:2] for its in parts], len(jax.tree.leaves(met)[0])
    return *combined(known, batch, form.dtype), [held for _, _, held in parts]


@functools.partial(jax.jit, static_argnums=0)
def summed(
    form: LeafForm, held: Any, factors: Float[Array, "batch"], contributes: Bool[Array, " batch"]
) -> Array:
    """The weighted sum."""
    sums: list[Array] = []
    for members, (products, powers) in zip(_sets(form), held, strict=True):
        weights = _times(factors, powers)
        for (index, _), (x, g) in zip(members, products, strict=True):
            use = form.uses[index]
            sums.append(use.to_parameter(weighted(use, x, g, weights, contributes)))
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
    steps = math.prod(use.slices)

    def at(index: Array) -> Array:
        def taken(x: Array) -> Array:
            size = x.shape[1] // steps if x.shape[1] > 1 else 1
            return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1)

        at_hand, cotangents, of_slice = jax.tree.map(taken, (x, g, weights))
        total = weighted(inner, at_hand, cotangents, of_slice, contributes)
        return scattering(inner.to_parameter(total))

    return scattering.stacked(jax.lax.map(at, jnp.arange(steps)))


def _times(
    factors: Float[Array, " batch"], powers: Sequence[Float[Array, "batch #group"]]
) -> Float[Array, "batch #group"]:
    """Powers of two come in with the factor: g alone could vanish beside a large x.

    What is no normal number then is zero: where a machine keeps it, it has lost digits.
    """
    return without_subnormal(functools.reduce(jnp.multiply, powers, factors[:, None]))


class Member(NamedTuple):
    """A use among those of the same matrices.

    Attributes:
        use: which use it is.
        transposed: whether its rows are the columns of the first.
    """

    use: int
    transposed: bool


@functools.lru_cache(maxsize=1024)
def overlaps(uses: tuple[ParamUse, ...]) -> tuple[tuple[Member, ...], ...] | None:
    """Sorts the uses of a parameter: those of the same matrices go together.

    |sum_i G_i|^2 = sum_ij <G_i, G_j>. Two uses of the same matrices, upright or transposed (an
    embedding and the output that is tied to it), have inner products that never form a gradient;
    uses of separate parts have none at all.

    Returns:
        The uses, sorted; None where two overlap in any other way.
    """
    sets: list[tuple[ParamUse, list[Member]]] = []
    for index, use in enumerate(uses):
        for first, members in sets:
            one, its = first.place, use.place
            assert one is not None
            assert its is not None
            if its in (one, one._replace(rows=one.columns, columns=one.rows)):
                members.append(Member(index, its != one))
                break
            if not one.is_apart(its):
                return None
        else:
            sets.append((use, [Member(index, False)]))
    return tuple(tuple(members) for _, members in sets)


def _sets(form: LeafForm) -> tuple[tuple[Member, ...], ...]:
    found = overlaps(form.uses)
    assert found is not None
    return found


def _factors_of_one(
    use: ParamUse, residuals: Any, cotangent: Array, dtype: np.dtype[Any]
) -> tuple[Array, Float[Array, "group time features_out"]]:
    """One example's factors: scans over slices make groups, scans over time more time."""

    def of_one(residuals: Any, cotangent: Array) -> tuple[Array, Array]:
        return use.kind.factors(use.operation, use.operand, use.restored(residuals), cotangent)

    for _ in use.scans:
        of_one = jax.vmap(of_one)
    x, g = of_one(residuals, cotangent)
    x = x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return _fold_scans(use, x), _fold_scans(use, g.astype(dtype))


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


def _factored(form: LeafForm, members: Sequence[Member], met: list[Met]) -> tuple[Any, Any, Any]:
    """Norm and bound of what uses that overlap add, and what their weighted sum is made of.

    The latter is of each use the sides of its outer products, and the powers of two, of every
    example (and group), that they were divided by, to be multiplied one after the other.
    """
    terms = [
        OuterProducts(*sides(form.uses[index], *met[index], form.dtype), transposed)
        for index, transposed in members
    ]
    first, *others = terms
    rows = [use.x.rows for use in terms if isinstance(use.x, OneHot) and not use.transposed]
    if len(rows) == len(terms):  # all look up rows, and none of them columns
        values = jnp.concatenate([use.g for use in terms], axis=2)
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
