"""From what the sites of a parameter kept to its norms and its weighted sum, leaf by leaf.

Two ways lead there. *Ghost* (Goodfellow, 2015; Li et al., "Large Language Models Can Be Strong
Differentially Private Learners", 2022): the norm from inner products between time steps, the sum as
one contraction over examples and time; no example's gradient is ever formed. *Kept*: each example's
gradient is formed from its factors, and summed by its weight.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .clip import (
    norm_error,
    norms,
    sum_in_blocks,
    to_unit_scale,
    unit_roundoff,
    weighted_sum,
)
from .sites import MatrixKind, contraction, convolution, lookup
from .sites.site import outer_products
from .taps import Site
from .views import shape_of

Way: TypeAlias = Literal["ghost", "kept", "whole", "unused"]

_MATRICES: tuple[MatrixKind, ...] = (contraction, convolution)


class LeafGradient(NamedTuple):
    """The gradient of one leaf for a batch of examples, in whatever form it is at hand.

    Attributes:
        norm: the norm of each example's gradient, as it was computed.
        bound: an upper bound on the true norm of what ``sum`` adds for a factor of 1.
        sum: from factors and a mask of the examples that contribute to their weighted sum.
    """

    norm: Float[Array, " batch"]
    bound: Float[Array, " batch"]
    sum: Callable[[Float[Array, " batch"], Bool[Array, " batch"]], Array]


def from_per_example(grads: Float[Array, "batch ..."]) -> LeafGradient:
    """The leaf's gradient where each example's is there.

    What is added is what is there, so the bound has only the error of the norm to make up for.
    """
    norm = norms(grads)
    size = math.prod(grads.shape[1:])
    return LeafGradient(
        norm,
        norm * (1 + norm_error(size, grads.dtype)),
        lambda factors, contributes: weighted_sum(grads, factors, contributes),
    )


def has_ghost(sites: list[Site]) -> bool:
    """Whether the norm can be had without the gradient: one matrix-like use, through isometries."""
    return (
        len(sites) == 1
        and sites[0].view.isometric
        and (sites[0].kind in _MATRICES or sites[0].kind is lookup)
    )


def leaf_gradient(
    parameter: jax.ShapeDtypeStruct,
    sites: list[tuple[Site, Any, Array]],
    way: Way,
    dtype: np.dtype[Any],
) -> LeafGradient:
    """The gradient of one leaf from its sites.

    Args:
        parameter: shape of the leaf.
        sites: each with what it kept and its cotangent, examples in front, then the scans.
        way: how.
        dtype: the accumulate dtype.
    """
    if way == "kept":
        parts = [_kept(parameter, *site, dtype) for site in sites]
        return from_per_example(functools.reduce(jnp.add, parts))
    ((site, kept, cotangent),) = sites
    if site.kind is lookup:
        return _ghost_lookup(parameter, site, kept, cotangent.astype(dtype))
    return _ghost_matrices(parameter, site, kept, cotangent, dtype)


def _over_scans(function: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Maps a function of one iteration over the scans around a site."""
    for _ in site.scans:
        function = jax.vmap(function)
    return function


def _kept(
    parameter: jax.ShapeDtypeStruct, site: Site, kept: Any, cotangent: Array, dtype: np.dtype[Any]
) -> Float[Array, "batch ..."]:
    """Each example's gradient with respect to the parameter."""
    times = tuple(axis for axis, use in enumerate(site.scans) if use == "time")

    def one(kept: Any, cotangent: Array) -> Array:
        if site.kind in _MATRICES:
            x, g = _matrices(site, kept, cotangent, dtype)
            image = _from_matrices(site, outer_products(x, g))
        else:
            kept = jax.tree.map(lambda x: _float_to(x, dtype), kept)
            gradient = _over_scans(
                lambda kept, g: site.kind.gradient(site.equation, site.operand, kept, g), site
            )(kept, cotangent.astype(dtype))
            image = jnp.sum(gradient, times)
        return site.view.pull_back(image, parameter)

    return jax.vmap(one)(kept, cotangent)


def _float_to(x: Array, dtype: np.dtype[Any]) -> Array:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _matrices(
    site: Site, kept: Any, cotangent: Array, dtype: np.dtype[Any]
) -> tuple[Float[Array, "group time features_in"], Float[Array, "group time features_out"]]:
    """One example's factors: scans over slices make groups, scans over time more time."""
    kind: Any = site.kind
    factors = _over_scans(
        lambda kept, g: kind.matrices(site.equation, site.operand, kept, g), site
    )(kept, cotangent)
    x, g = (_fold_scans(site, factor.astype(dtype)) for factor in factors)
    return x, g


def _fold_scans(site: Site, factor: Array) -> Array:
    """``(*scans, group, time, features)`` to ``(slices x group, scans x time, features)``."""
    slices = [axis for axis, use in enumerate(site.scans) if use == "slices"]
    times = [axis for axis, use in enumerate(site.scans) if use == "time"]
    group, time, features = (len(site.scans) + i for i in range(3))
    shape = factor.shape
    groups = math.prod(shape[i] for i in (*slices, group))
    return jnp.transpose(factor, (*slices, group, *times, time, features)).reshape(
        groups, -1, shape[features]
    )


def _from_matrices(site: Site, gradient: Float[Array, "group in out"]) -> Array:
    """The gradient of the stacked image from the one in matrix form."""
    kind: Any = site.kind
    slices = [n for n, use in zip(site.tap.shape, site.scans, strict=False) if use == "slices"]
    function: Callable[[Array], Array] = lambda one: kind.from_matrix(  # noqa: E731
        site.equation, site.operand, one
    )
    for _ in slices:
        function = jax.vmap(function)
    groups = gradient.shape[0] // math.prod(slices)
    return function(gradient.reshape(*slices, groups, *gradient.shape[1:]))


def matrix_sizes(site: Site) -> tuple[int, int, int, int]:
    """Groups, time, and features in and out of a matrix-like site, for one example."""
    x, g = jax.eval_shape(
        lambda kept, g: _matrices(site, kept, g, np.dtype("float32")), site.kept, site.tap
    )
    return x.shape[0], x.shape[1], x.shape[2], g.shape[2]


def _ghost_matrices(
    parameter: jax.ShapeDtypeStruct, site: Site, kept: Any, cotangent: Array, dtype: np.dtype[Any]
) -> LeafGradient:
    """Norm from inner products of time steps: |sum_t x_t g_t'|^2 = sum_ts (x_t.x_s)(g_t.g_s)."""
    x, g = jax.vmap(lambda kept, g: _matrices(site, kept, g, dtype))(kept, cotangent)

    def sum_(factors: Array, contributes: Array) -> Array:
        mask = contributes[:, None, None, None]
        weighted = jnp.where(mask, g * factors[:, None, None, None], 0)
        total = jnp.einsum(
            "bgtk,bgtp->gkp",
            jnp.where(mask, x, 0),
            weighted,
            precision=jax.lax.Precision.HIGHEST,
        )
        return site.view.pull_back(_from_matrices(site, total), parameter)

    return LeafGradient(*_gram_norms(x, g), sum_)


def _gram_norms(
    x: Float[Array, "batch group time features_in"],
    g: Float[Array, "batch group time features_out"],
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """The norm of sum_t x_t g_t', and a bound on that of what the weighted sum adds.

    The *gross* norm, the sum over t of |x_t| |g_t|, bounds what rounding can do, however much the
    terms cancel: a contraction over T steps is off by at most a few roundings a step of it, and a
    sum of T^2 inner products by at most a few roundings of its square. With u the unit roundoff,
    k = 2 + T / 16 and s the computed square of the norm, the norm of what is added is taken to be
    at most sqrt(s + 2 u gross^2) + k u gross. That is a model, not a worst case (which is T u gross
    for the contraction, Higham 2002, section 3.1): contractions are summed in blocks by several
    accumulators at once, and the tests attack it. One step has no sum to get wrong: there the norm
    is |x| |g|, and the bound is proved.
    """
    batch, groups, time, _ = x.shape
    error = sum(norm_error(f.shape[-1], f.dtype) for f in (x, g)) + norm_error(groups, x.dtype)
    lengths_x, lengths_g = (norms(f.reshape(batch * groups * time, -1)) for f in (x, g))
    products = (lengths_x * lengths_g).reshape(batch, groups, time)
    if time == 1:
        norm = norms(products)
        return norm, norm * (1 + error)
    roundoff = unit_roundoff(x.dtype)
    gross = norms(jnp.sum(products, axis=2)) * (1 + error + time * roundoff)
    (x, x_scale), (g, g_scale) = to_unit_scale(x), to_unit_scale(g)
    highest = jax.lax.Precision.HIGHEST
    inner_x = jnp.einsum("bgtk,bgsk->bgts", x, x, precision=highest)
    inner_g = jnp.einsum("bgtp,bgsp->bgts", g, g, precision=highest)
    square = sum_in_blocks((inner_x * inner_g).reshape(batch, -1))
    norm = jnp.sqrt(jnp.maximum(square, 0)) * x_scale * g_scale
    in_square = math.sqrt(2 * roundoff) * gross
    in_sum = (2 + time / 16) * roundoff * gross
    return norm, jnp.hypot(norm, in_square) * (1 + 4 * roundoff) + in_sum


def _ghost_lookup(
    parameter: jax.ShapeDtypeStruct, site: Site, kept: Array, cotangent: Array
) -> LeafGradient:
    """Norm from the rows that were looked up, those of one row added up first."""

    def one(kept: Array, cotangent: Array) -> tuple[Array, Array]:
        rows = _over_scans(lambda g: lookup.rows_of(site.equation, g), site)(cotangent)
        return (
            _fold_scans(site, kept[..., None, :, None])[..., 0],
            _fold_scans(site, rows[..., None, :, :]),
        )

    rows, values = jax.vmap(one)(kept, cotangent)
    found = rows < shape_of(site.equation.invars[0])[0]
    values = jnp.where(found[..., None], values, 0)

    def sum_(factors: Array, contributes: Array) -> Array:
        weighted = jnp.where(
            contributes[:, None, None, None], values * factors[:, None, None, None], 0
        )
        groups, features = values.shape[1], values.shape[-1]
        by_group = (
            jnp.moveaxis(rows, 1, 0).reshape(groups, -1),
            jnp.moveaxis(weighted, 1, 0).reshape(groups, -1, features),
        )
        tables = jax.vmap(lambda r, v: lookup.scatter(site.equation, r, v))(*by_group)
        slices = [n for n, use in zip(site.tap.shape, site.scans, strict=False) if use == "slices"]
        return site.view.pull_back(tables.reshape(*slices, *tables.shape[1:]), parameter)

    return LeafGradient(*_row_norms(rows, values), sum_)


def _row_norms(
    rows: Int[Array, "batch group time"], values: Float[Array, "batch group time entry"]
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """The norm of a table of rows, and a bound on that of what the weighted sum adds.

    Lookups of one row add up, and may cancel: the sum of their lengths bounds what rounding does.
    """
    batch, _, time = rows.shape
    same = rows[..., :, None] == rows[..., None, :]
    is_first = jnp.argmax(same, axis=-1) == jnp.arange(time)
    # A row's first lookup takes the sum of all of its lookups, the others nothing.
    totals = jnp.einsum(
        "bgts,bgse->bgte",
        (same & is_first[..., :, None]).astype(values.dtype),
        values,
        precision=jax.lax.Precision.HIGHEST,
    )
    norm = norms(totals)
    roundoff = unit_roundoff(values.dtype)
    lengths = norms(values.reshape(-1, values.shape[-1])).reshape(batch, -1)
    gross = jnp.sum(lengths, axis=1)
    in_sums = 0 if time == 1 else 2 * time * roundoff * gross
    return norm, norm * (1 + norm_error(math.prod(totals.shape[1:]), totals.dtype)) + in_sums
