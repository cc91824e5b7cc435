"""The gradient of a parameter that penalties depend on.

A penalty (or whatever else is one number, and depends on parameters alone) adds h r to the gradient
G of a parameter's own uses: r is the penalty's gradient, found once, and h the gradient of an
example's loss with respect to the penalty. So |G + h r|^2 = |G|^2 + 2 h <G, r> + h^2 |r|^2, and of
outer products <G, r> = sum_n x_n' r g_n is one product of matrices.

The proof of the bound is in `gram.md` beside this file.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .clip import (
    norm_error,
    norms,
    product_roundoff,
    sum_in_blocks,
    unit_roundoff,
    weighted_sum,
)
from .computed_again import MOST_ROUNDINGS
from .gram import OneHot, OuterProducts, to_common_scale
from .leaves import LeafForm, LeafGradient, Met, measured, sides, summed
from .powers import exponent_of, power_of_two, times_power, without_subnormal
from .weighted_products import products_in_blocks


class Penalties(NamedTuple):
    """Penalties' gradients with respect to one parameter, each divided by a power of two.

    Attributes:
        gradients: one penalty after the other.
        exponents: the binary exponents that they have lost.
    """

    gradients: Float[Array, "penalty ..."]
    exponents: Int[Array, " penalty"]

    @property
    def finite(self) -> Float[Array, "penalty ..."]:
        """The gradients for the sum: where one is not finite, no example adds anything."""
        return jnp.where(jnp.isfinite(self.gradients), self.gradients, 0)


def of_penalties(gradients: Sequence[Float[Array, "..."]]) -> Penalties:
    """Divides penalties' gradients, in the accumulate dtype, by powers of two."""
    stacked = jnp.stack(gradients)
    axes = tuple(range(1, stacked.ndim))
    scale, inverse = power_of_two(jnp.max(jnp.abs(stacked), axis=axes, initial=0))
    # Behind a barrier: the compiler would square gradient and scale apart where that is one number.
    scaled = jax.lax.optimization_barrier(stacked * jnp.expand_dims(inverse, axes))
    return Penalties(scaled, exponent_of(scale))


def formed_penalties(
    heights: Float[Array, "batch penalty"], penalties: Penalties
) -> list[Float[Array, "batch ..."]]:
    """What each penalty adds to the gradient of each example."""
    weights = times_power(heights, penalties.exponents)
    return [
        weights[:, i].reshape(-1, *[1] * gradient.ndim) * gradient
        for i, gradient in enumerate(penalties.gradients)
    ]


def penalised(
    form: LeafForm,
    met: list[Met],
    heights: Float[Array, "batch penalty"],
    penalties: Penalties,
) -> LeafGradient:
    """The gradient of a parameter whose uses' gradient is a sum of outer products.

    Args:
        form: how the norm of that is found, from inner products.
        met: of the parameter's own uses.
        heights: the gradient with respect to each penalty, in the accumulate dtype.
        penalties: with respect to the parameter.
    """
    norm, bound, held = measured(form, met)
    known = _measured(form, met, norm, bound, heights, penalties)

    def total(factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]) -> Array:
        found = summed(form, held, factors, contributes)
        return found + _summed(heights, penalties, factors, contributes)

    return LeafGradient(known=known, weighted=total)


@jax.jit
def _summed(
    heights: Float[Array, "batch penalty"],
    penalties: Penalties,
    factors: Float[Array, " batch"],
    contributes: Bool[Array, " batch"],
) -> Array:
    """What penalties add to the weighted sum."""
    weights = [
        weighted_sum(height, without_subnormal(times_power(factors, exponent)), contributes)
        for height, exponent in zip(heights.T, penalties.exponents, strict=True)
    ]
    pairs = zip(weights, penalties.finite, strict=True)
    return functools.reduce(jnp.add, [weight * gradient for weight, gradient in pairs])


@functools.partial(jax.jit, static_argnums=0)
def _measured(
    form: LeafForm,
    met: list[Met],
    own_norm: Float[Array, " batch"],
    own_bound: Float[Array, " batch"],
    heights: Float[Array, "batch penalty"],
    penalties: Penalties,
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """Norm and bound, in units of a power of two near the larger of |G| and |h r|."""
    dtype, count = form.dtype, heights.shape[1]
    roundoff, tiny = product_roundoff(dtype), jnp.finfo(dtype).tiny
    flat = penalties.gradients.reshape(count, -1)
    pairs = (flat[:, None] * flat[None, :]).reshape(count * count, -1)
    of_pairs = sum_in_blocks(pairs).reshape(count, count)
    lengths = jnp.sqrt(jnp.diagonal(of_pairs))
    inner, gross, of_own, roundings = _inner_products(form, met, penalties)
    of_heights = exponent_of(jnp.abs(heights)) + penalties.exponents
    unit = jnp.max(jnp.where(heights == 0, -(2**20), of_heights), axis=1)
    unit = jnp.maximum(unit, jnp.where(gross > 0, of_own, -(2**20)))
    unit = jnp.where(unit > -(2**20), unit, 0)
    scaled = times_power(heights, penalties.exponents - unit[:, None])
    own_norm, own_bound = (times_power(size, -unit) for size in (own_norm, own_bound))
    inner = times_power(inner, (of_own - unit)[:, None])
    gross = times_power(gross, of_own - unit)

    cross = 2 * jnp.sum(scaled * inner, axis=1)
    alone = jnp.sum(scaled[:, :, None] * scaled[:, None, :] * of_pairs, axis=(1, 2))
    of_penalties = jnp.sum(jnp.abs(scaled) * lengths, axis=1)

    few = (count + 4) ** 2
    steps = sum(use.steps for use in form.uses)
    again = MOST_ROUNDINGS
    slack = (roundings + again + 2 * steps + few) * 2 * gross * of_penalties
    slack += (few + 2 * again + 2 * norm_error(flat.shape[1], dtype) / roundoff) * of_penalties**2
    slack = 33 / 32 * roundoff * (slack + few * own_bound**2)
    slack += 2.0**-60 * (gross + of_penalties) ** 2
    bound = jnp.sqrt(jnp.maximum(own_bound**2 + cross + alone, 0) + slack)
    bound += (few + again) * roundoff * (own_bound + of_penalties)
    bound *= 1 + 8 * roundoff
    norm = jnp.sqrt(jnp.maximum(own_norm**2 + cross + alone, 0))
    norm, back = times_power(norm, unit), times_power(bound, unit)
    return norm, jnp.where(bound > 0, jnp.maximum(back, tiny), bound)


def _inner_products(
    form: LeafForm, met: list[Met], penalties: Penalties
) -> tuple[Float[Array, "batch penalty"], Float[Array, " batch"], Int[Array, " batch"], float]:
    """<G, r> for each penalty, sum_n |x_n| |g_n|, the binary exponents both have lost.

    Beside them, how many roundings a product goes through.
    """
    terms = [
        OuterProducts(*sides(use, residuals, cotangent.astype(form.dtype), form.dtype))
        for use, (residuals, cotangent) in zip(form.uses, met, strict=True)
    ]
    terms, exponent = to_common_scale(terms)
    batch, roundings = len(exponent), 0.0
    inner, gross = [], []
    for use, (x, g, *_) in zip(form.uses, terms, strict=True):
        assert use.matrices is not None
        matrices = [use.matrices.outputs_first.taken(one) for one in penalties.gradients]
        products, its = zip(*(_rows(x, matrix) for matrix in matrices), strict=True)
        inner.append([sum_in_blocks((y * g).reshape(batch, -1)) for y in products])
        of_sum = 2 * norm_error(g[0].size, form.dtype) / unit_roundoff(form.dtype)
        roundings = max(roundings, its[0] + of_sum)
        lengths = _lengths(g) if isinstance(x, OneHot) else _lengths(x) * _lengths(g)
        gross.append(jnp.sum(lengths, axis=(1, 2)))
    found = jnp.stack([functools.reduce(jnp.add, its) for its in zip(*inner, strict=True)], axis=1)
    return found, functools.reduce(jnp.add, gross), exponent, roundings + len(terms)


def _lengths(x: Float[Array, "batch group time entry"]) -> Float[Array, "batch group time"]:
    return norms(x.reshape(-1, x.shape[-1])).reshape(x.shape[:3])


def _rows(x: Any, matrix: Float[Array, "group features_out features_in"]) -> tuple[Array, int]:
    """x_n' r for all vectors, and how many roundings a product goes through."""
    if isinstance(x, OneHot):
        of_group = functools.partial(jnp.take, axis=0, mode="clip")
        columns = jnp.swapaxes(matrix, 1, 2)
        return jax.vmap(of_group, in_axes=(0, 1), out_axes=1)(columns, x.rows), 0
    batch, groups, time, features = x.shape
    rows = jnp.moveaxis(x, 1, 0).reshape(groups, batch * time, features)
    found, roundings = products_in_blocks(rows, matrix)
    return jnp.moveaxis(found.reshape(groups, batch, time, -1), 0, 1), roundings
