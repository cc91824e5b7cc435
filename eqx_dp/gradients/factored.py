"""From residuals and cotangents to each leaf's norms and weighted sum.

A factored leaf (Goodfellow, 2015; Li et al., "Large Language Models Can Be Strong Differentially
Private Learners", 2022) has its norm from inner products between time steps, and its sum as one
contraction over examples and time; no example's gradient is ever formed. Leaves whose uses are
equal have one program, which is traced once.

In ghost clipping (`Seen`), cotangents become norms, then sums, within the backward pass.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..isolation import of_one
from ..precision import stage
from ..sharding import evaluated_whole
from . import lookup
from .blocks import in_blocks
from .gram import (
    OneHot,
    OuterProducts,
    gram_norms,
    one_term,
    row_norms,
    sum_of_products,
    to_common_scale,
)
from .leaves import Known, LeafGradient, combined, computed_once, norm_and_bound
from .norms import contracted, halves, norm_error, norms, parts_of, unit_roundoff, without_subnormal
from .uses import Member, ParamUse, Scattering, overlaps

Pair: TypeAlias = tuple[Any, Array]
"""Residuals of a use and its cotangent, examples in front, then the scans around it."""


class LeafForm(NamedTuple):
    """How the gradient of a factored leaf is found: leaves of equal form differ only in numbers.

    Attributes:
        shape: of the parameter.
        uses: all uses of it.
        dtype: the accumulate dtype.
        is_formed: whether each example's gradient is formed, of a leaf with one use.
    """

    shape: tuple[int, ...]
    uses: tuple[ParamUse, ...]
    dtype: np.dtype[Any]
    is_formed: bool = False


def leaf_gradient(
    form: LeafForm, pairs: Sequence[Pair], scattering: Scattering | None = None
) -> LeafGradient:
    """The gradient of one factored leaf from its uses.

    Args:
        form: of the leaf.
        pairs: of every use.
        scattering: how the weighted sum goes to devices slice by slice, which then hold a part each
            of the sum over all; None where it is this device's own.
    """
    if form.is_formed:
        return LeafGradient(computed_once(functools.partial(_formed, form), pairs[0], pairs[0][1]))
    if scattering is not None:
        return _sliced(form, pairs[0], scattering)
    norm, bound, held = measured(form, list(pairs))
    return LeafGradient(known=(norm, bound), weighted=functools.partial(summed, form, held))


def _formed(form: LeafForm, pair: Pair) -> Float[Array, "batch *shape"]:
    """Each example's gradient, from outer products."""
    (use,), parts = form.uses, parts_of_uses(form.uses, form.dtype)

    def of_one(residuals: Any, cotangent: Array) -> Array:
        x, g = use.factors(residuals, cotangent, form.dtype)
        return use.to_parameter(contracted("gtk,gtp->gkp", x, g, (parts, parts)))

    return jax.vmap(of_one)(*pair)


@functools.partial(jax.jit, static_argnums=0)
def measured(form: LeafForm, pairs: list[Pair]) -> tuple[Array, Array, Any]:
    """Norm, bound, and the parts of the weighted sum, see `_factored`."""
    pairs = [(residuals, cotangent.astype(form.dtype)) for residuals, cotangent in pairs]
    parts = [_factored(form, members, pairs) for members in _sets(form)]
    known, batch = [its[:2] for its in parts], len(jax.tree.leaves(pairs)[0])
    return *combined(known, batch, form.dtype), [held for _, _, held in parts]


@functools.partial(jax.jit, static_argnums=0)
def summed(
    form: LeafForm, held: Any, factors: Float[Array, "batch"], contributes: Bool[Array, " batch"]
) -> Array:
    """The weighted sum."""
    parts = parts_of_uses(form.uses, form.dtype)

    def of_block(operands: Any) -> Array:
        held, factors, contributes = operands
        sums: list[Array] = []
        for members, (products, powers) in zip(_sets(form), held, strict=True):
            # Powers of two are multiplied into the factor: g alone could vanish beside a large x.
            # No product is below the normal range, where numbers have lost digits.
            weights = without_subnormal(functools.reduce(jnp.multiply, powers, factors[:, None]))
            for (index, _), (x, g) in zip(members, products, strict=False):
                use = form.uses[index]
                sums.append(use.to_parameter(weighted(use, x, g, weights, contributes, parts)))
        return functools.reduce(jnp.add, sums)

    return in_blocks(of_block, (held, factors, contributes), form.dtype)


def _sliced(form: LeafForm, pair: Pair, scattering: Scattering) -> LeafGradient:
    """A stacked leaf's gradient; one slice at a time is scaled by powers of two, and copied."""
    (use,) = form.uses
    inner, steps = use.inside(), math.prod(use.slices)
    form_of_slice, scans = LeafForm(inner.shape, (inner,), form.dtype), len(use.slices)
    stacked = jax.tree.map(lambda x: x.reshape(len(x), steps, *x.shape[1 + scans :]), pair)

    def over_slices(of_slice: Callable[[LeafGradient], Array]) -> Array:
        def at(index: Array) -> Array:
            taken = functools.partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)
            one = jax.tree.map(lambda x: taken(x, index), stacked)
            return of_slice(leaf_gradient(form_of_slice, [one]))

        return jax.lax.map(at, jnp.arange(steps))

    def known(leaf: LeafGradient) -> Float[Array, "batch 2"]:
        return jnp.stack(norm_and_bound([leaf], len(pair[1]), form.dtype), axis=-1)

    def weighted(factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]) -> Array:
        total = over_slices(lambda leaf: scattering(leaf.sum(factors, contributes)))
        return scattering.stacked(total)

    known_of_slices = jnp.moveaxis(over_slices(known), 0, 1)
    return LeafGradient(known=of_slices(known_of_slices), weighted=weighted)


def _sets(form: LeafForm) -> tuple[tuple[Member, ...], ...]:
    found = overlaps(form.uses)
    assert found is not None
    return found


def _factored(form: LeafForm, members: Sequence[Member], pairs: list[Pair]) -> tuple[Any, Any, Any]:
    """Norm and bound of what uses that overlap add, and what their weighted sum is made of.

    The latter is of each use the sides of its outer products, and the powers of two, of every
    example (and group), that they were divided by, to be multiplied one after the other.
    """
    terms = [
        OuterProducts(*sides(form.uses[index], *pairs[index], form.dtype), transposed)
        for index, transposed in members
    ]
    first, *others = terms
    parts = parts_of_uses(form.uses, form.dtype)
    rows = [use.x.rows for use in terms if isinstance(use.x, OneHot) and not use.transposed]
    if len(rows) == len(terms):  # all look up rows, none looks up columns
        values = jnp.concatenate([use.g for use in terms], axis=2)
        at = jnp.concatenate(rows, axis=2)
        norm, bound, sums = row_norms(at, values)
        terms, powers = [OuterProducts(OneHot(at), sums)], ()  # the first use stands for all
    elif not others and first.time == 1 and not isinstance(first.x, OneHot):
        norm, bound, x, scale = one_term(first.x, first.g, parts)
        terms, powers = [first._replace(x=x)], (scale,)
    else:
        terms, exponent = to_common_scale(terms)
        norm, bound = gram_norms(terms, parts)
        tiny = jnp.finfo(form.dtype).tiny
        powers = halves(exponent, form.dtype)
        norm, scaled_back = (functools.reduce(jnp.multiply, powers, x) for x in (norm, bound))
        bound = jnp.where(bound > 0, jnp.maximum(scaled_back, tiny), bound)
        powers = tuple(x[:, None] for x in powers)
    return norm, bound, ([(use.x, use.g) for use in terms], powers)


def parts_of_uses(uses: Sequence[ParamUse], dtype: np.dtype[Any]) -> int:
    """How many bfloat16 numbers add up to any number that the uses meet; 0 if some take more."""
    met: list[Any] = []
    for use in uses:
        met += [use.matmul.backward if use.matmul else use.result.dtype]
        if use.kind is not lookup:  # which meets whole numbers
            met += [use.matmul.forward if use.matmul else use.residuals.dtype]
    return parts_of(met) if dtype == jnp.float32 else 0


def sides(
    use: ParamUse, residuals: Any, cotangent: Array, dtype: np.dtype[Any]
) -> tuple[Any, Float[Array, "batch group time features_out"]]:
    """All examples' outer products."""
    x, g = jax.vmap(lambda r, g: use.factors(r, g, dtype))(residuals, cotangent)
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
    parts: int,
) -> Float[Array, "group features_in features_out"]:
    """The weighted sum of all examples' outer products."""
    if not isinstance(x, OneHot):
        return sum_of_products(x, g, weights, contributes, parts)
    groups, features = g.shape[1], g.shape[-1]
    g = jnp.where(contributes[:, None, None, None], g * weights[..., None, None], 0)
    scatter = functools.partial(lookup.scatter, use.operation.operands[0][0])
    if groups == 1:
        return scatter(x.rows.reshape(-1), g.reshape(-1, features))[None]
    return jax.vmap(scatter)(
        jnp.moveaxis(x.rows, 1, 0).reshape(groups, -1),
        jnp.moveaxis(g, 1, 0).reshape(groups, -1, features),
    )


class Seen(NamedTuple):
    """A use of `ghost` that keeps nothing: the only use of its leaf.

    Attributes:
        use: the use.
        dtype: the accumulate dtype.
        scattering: how the weighted sum leaves it, where each device keeps a part.
    """

    use: ParamUse
    dtype: np.dtype[Any]
    scattering: Scattering | None

    @property
    def form(self) -> LeafForm:
        """How the operand's gradient is found, in one iteration of the enclosing scans."""
        inner = self.use.inside()
        steps, (_, features_in, features_out) = inner.steps, inner.matrices
        # A leaf that is not formed takes copies of both sides, and two steps x steps matrices.
        fewer = features_in * features_out < steps * (features_in + features_out + 2 * steps)
        return LeafForm(inner.shape, (inner,), self.dtype, fewer and inner.kind is not lookup)

    def tap(self) -> "Taps":
        """Zeros of the shapes of what is asked for."""
        part = self.form.shape if self.scattering is None else self.scattering.part
        shapes = (2,), part
        return Taps(*(jnp.zeros((*self.use.slices, *shape), self.dtype) for shape in shapes))

    def evaluated(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], tap: "Taps"
    ) -> tuple[Array, Float[Array, "2"]]:
        """The result of a use, and a zero whose cotangent holds the example's factor and limit.

        The limit is the bound that the clip factor was found from. On the way back, the cotangent
        of the result becomes those of the tap.
        """
        (result,) = evaluated_whole(equation, inputs)
        found: tuple[Array, Array] = _answering(self, result, tap, self.use.kept(inputs))
        result, asked = found
        return self.use.received(result), asked

    def of_leaf(self, total: Float[Array, "..."]) -> Array:
        """The leaf's sum."""
        if self.scattering is not None:
            return self.scattering.stacked(total)
        return self.use.from_operand(total)


class Taps(NamedTuple):
    """Zeros at a use, whose cotangents are what is asked for.

    Attributes:
        known: its cotangent is the norm and bound of one example.
        total: its cotangent is the weighted sum of all examples.
    """

    known: Float[Array, "*slices 2"]
    total: Float[Array, "..."]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _answering(seen: Seen, result: Array, taps: Taps, residuals: Any) -> tuple[Array, Array]:
    del taps, residuals
    return result, jnp.zeros(2, seen.dtype)


def _answering_forward(seen: Seen, result: Array, taps: Taps, residuals: Any) -> tuple[Any, Any]:
    # Do not call `_answering` here: the call would stay in the program, which could then not be
    # differentiated.
    del taps
    return (result, jnp.zeros(2, seen.dtype)), residuals


def _answering_back(seen: Seen, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    cotangent, asked = cotangents
    return cotangent, Taps(*_answers(seen)(residuals, cotangent, asked)), None


_answering.defvjp(_answering_forward, _answering_back)


@functools.lru_cache(maxsize=1024)
def _answers(seen: Seen) -> Callable[..., tuple[Array, Array]]:
    """Norm and bound of one example, and the weighted sum of all examples.

    Guarantee: what one example adds is at most its factor times its limit, however the pass rounded
    that found these: the same arrays are measured and added here, and scaled down to the limit.
    """

    def measured_leaf(residuals: Any, cotangent: Array) -> tuple[LeafGradient, Known]:
        with stage("norm"):
            leaf = leaf_gradient(seen.form, [(residuals, cotangent)])
            return leaf, norm_and_bound([leaf], len(cotangent), seen.dtype)

    def added(operands: Any) -> Array:
        residuals, cotangent, asked = operands
        leaf, (_, bounds) = measured_leaf(residuals, cotangent)
        with stage("norm"):
            factors = within(asked[:, 0], bounds, asked[:, 1])
        with stage("sum"):
            return leaf.sum(factors, factors > 0)

    @jax.jit
    def of_batch(residuals: Any, cotangent: Array, asked: Array) -> tuple[Array, Array]:
        _, known = measured_leaf(residuals, cotangent)
        total = computed_once(added, (residuals, cotangent, asked), cotangent)
        with stage("sum"):
            total = total if seen.scattering is None else seen.scattering(total)
        return jnp.stack(known, axis=-1), total

    return jax.jit(of_one(of_batch))


def within(
    factors: Float[Array, " batch"], bounds: Float[Array, " batch"], limits: Float[Array, " batch"]
) -> Float[Array, " batch"]:
    """Factors that bring bounds down to at most factor x limit.

    Quotient and products are off by 4 u and u each, and so may be a bound that is computed twice;
    24 are taken off the limit. No comparison of bounds chooses between two formulas: see
    `clip_factors`. Zero where a bound is not finite, or where a factor is no normal number.
    """
    reach = limits * (1 - 24 * unit_roundoff(factors.dtype))
    ratio = reach / jnp.maximum(jnp.maximum(bounds, reach), jnp.finfo(factors.dtype).tiny)
    return without_subnormal(jnp.where(jnp.isfinite(bounds), factors * ratio, 0))


def of_slices(measured: Float[Array, "batch *slices 2"]) -> Known:
    """Norm and bound of a stacked parameter from those of its slices."""
    batch = measured.shape[0]
    norm, bound = (norms(measured[..., i].reshape(batch, -1)) for i in range(2))
    return norm, bound * (1 + norm_error(measured[0, ..., 0].size, measured.dtype))
