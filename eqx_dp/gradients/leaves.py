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

from .clip import combined_norms, norm_error, norms, power_of_two, weighted_sum
from .cross_terms import Member, overlaps, place
from .gram import (
    OneHot,
    Side,
    Terms,
    gram_norms,
    one_term,
    row_norms,
    sum_of_products,
    to_common_scale,
)
from .sites import MatrixKind, contraction, convolution, lookup
from .sites.site import outer_products
from .taps import Site
from .views import shape_of

Way: TypeAlias = Literal["inner_products", "kept", "whole", "unused"]

_MATRICES: tuple[MatrixKind, ...] = (contraction, convolution)


class LeafGradient(NamedTuple):
    """The gradient of one leaf for a batch of examples, in whatever form it is at hand.

    Attributes:
        norm: the norm of each example's gradient, as it was computed.
        bound: an upper bound on the true norm of what `sum` adds for a factor of 1.
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


def has_ghost(sites: list[Site], parameter: jax.ShapeDtypeStruct | None = None) -> bool:
    """Whether the norm can be had without the gradient: matrix-like uses, through isometries.

    Several uses must each be of the same part of the parameter, or of parts that share no entry;
    where that is depends on the parameter's shape.
    """
    return sets_of_uses(sites, parameter) is not None


def sets_of_uses(
    sites: list[Site], parameter: jax.ShapeDtypeStruct | None
) -> list[list[Member]] | None:
    """The uses of a parameter, those of the same part of it together; None if there is no ghost."""
    if not sites or not all(map(_is_matrix_like, sites)):
        return None
    if len(sites) == 1:
        return [[Member(0, False, 1)]]
    if parameter is None:
        return None
    placements = [
        place(
            site.view.image,
            parameter.shape,
            functools.partial(_from_matrices, site),
            site_sizes(site).matrices,
        )
        for site in sites
    ]
    return overlaps(placements, parameter.shape)


def _is_matrix_like(site: Site) -> bool:
    return site.view.isometric and (site.kind in _MATRICES or site.kind is lookup)


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
        site, *_ = sites[0]
        if len(sites) == 1 and site.kind is convolution and site.view.isometric:
            return _as_formed(parameter, *sites[0], dtype)
        parts = [per_example_gradients(parameter, *site, dtype) for site in sites]
        return from_per_example(functools.reduce(jnp.add, parts))
    sets = sets_of_uses([site for site, _, _ in sites], parameter)
    assert sets is not None
    parts = [_ghost(parameter, [(m, *sites[m.use]) for m in members], dtype) for members in sets]
    if len(parts) == 1:
        return parts[0]
    shape = parts[0].norm.shape
    norm = combined_norms([part.norm for part in parts], shape, dtype)
    bound = combined_norms([part.bound for part in parts], shape, dtype)
    return LeafGradient(
        norm,
        bound * (1 + norm_error(len(parts), dtype)),
        lambda factors, contributes: functools.reduce(
            jnp.add, [part.sum(factors, contributes) for part in parts]
        ),
    )


def _over_scans(function: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Maps a function of one iteration over the scans around a site."""
    for _ in site.scans:
        function = jax.vmap(function)
    return function


def per_example_gradients(
    parameter: jax.ShapeDtypeStruct, site: Site, kept: Any, cotangent: Array, dtype: np.dtype[Any]
) -> Float[Array, "batch ..."]:
    """Each example's gradient with respect to the parameter."""
    return jax.vmap(lambda kept, g: _to_parameter(parameter, site, _formed(site, kept, g, dtype)))(
        kept, cotangent
    )


def _as_formed(
    parameter: jax.ShapeDtypeStruct, site: Site, kept: Any, cotangent: Array, dtype: np.dtype[Any]
) -> LeafGradient:
    """The gradient of a leaf with one use, each example's left in the form that it came in.

    The way to the parameter's form only moves entries: it changes no norm, and the sum takes it
    once where the examples would each. That is for convolutions: the product of a contraction
    comes in the parameter's form by itself, and is slower in another (a fifth of the whole on the
    small GPT of the benchmark).
    """
    grads = jax.vmap(lambda kept, g: _formed(site, kept, g, dtype))(kept, cotangent)
    found = from_per_example(grads)
    return found._replace(
        sum=lambda factors, contributes: _to_parameter(
            parameter, site, found.sum(factors, contributes)
        )
    )


def _formed(site: Site, kept: Any, cotangent: Array, dtype: np.dtype[Any]) -> Array:
    """One example's gradient, in matrix form at a matrix-like site, else that of the image."""
    kind: Any = site.kind
    if kind in _MATRICES and site.scans:
        return outer_products(*_matrices(site, kept, cotangent, dtype))
    if kind in _MATRICES:
        operands = kept.astype(dtype), cotangent.astype(dtype)
        return kind.in_matrix_form(site.equation, site.operand, *operands)
    times = tuple(axis for axis, use in enumerate(site.scans) if use == "time")
    kept = jax.tree.map(lambda x: _float_to(x, dtype), kept)
    gradient = _over_scans(
        lambda kept, g: site.kind.gradient(site.equation, site.operand, kept, g), site
    )(kept, cotangent.astype(dtype))
    return jnp.sum(gradient, times)


def _to_parameter(parameter: jax.ShapeDtypeStruct, site: Site, gradient: Array) -> Array:
    """From the form that a gradient came in to the parameter's."""
    image = _from_matrices(site, gradient) if site.kind in _MATRICES else gradient
    return site.view.pull_back(image, parameter)


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
    """`(*scans, group, time, features)` to `(slices x group, scans x time, features)`."""
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
    slices = _slices(site)
    if kind is lookup:
        return gradient.reshape(*slices, *shape_of(site.equation.invars[0]))
    function: Callable[[Array], Array] = lambda one: kind.from_matrix(  # noqa: E731
        site.equation, site.operand, one
    )
    for _ in slices:
        function = jax.vmap(function)
    groups = gradient.shape[0] // math.prod(slices)
    return function(gradient.reshape(*slices, groups, *gradient.shape[1:]))


def _slices(site: Site) -> list[int]:
    """The lengths of the scans around a site that go over slices of the parameter."""
    return [n for n, use in zip(site.tap.shape, site.scans, strict=False) if use == "slices"]


class SiteSizes(NamedTuple):
    """What one example's gradient is made of at a matrix-like site.

    Attributes:
        matrices: its shape in matrix form: groups, features in and out.
        steps: how many outer products there are in each group.
        is_lookup: whether these are rows, each added where it was looked up.
    """

    matrices: tuple[int, int, int]
    steps: int
    is_lookup: bool

    @property
    def outer(self) -> int:
        """Floating-point operations for adding up all outer products."""
        groups, features_in, features_out = self.matrices
        return 2 * groups * self.steps * (1 if self.is_lookup else features_in) * features_out


def site_sizes(site: Site) -> SiteSizes:
    """The sizes of a matrix-like site."""
    if site.kind is lookup:
        rows, *entry = shape_of(site.equation.invars[0])
        groups = math.prod(_slices(site))
        matrices = groups, rows, math.prod(entry)
        return SiteSizes(matrices, math.prod(site.kept.shape) // groups, True)
    x, g = jax.eval_shape(
        lambda kept, g: _matrices(site, kept, g, np.dtype("float32")), site.kept, site.tap
    )
    return SiteSizes((x.shape[0], x.shape[2], g.shape[2]), x.shape[1], False)


_Use: TypeAlias = tuple[Member, Site, Any, Array]
"""How a use overlaps with the others, the site, what it kept, and its cotangent."""


def _ghost(parameter: jax.ShapeDtypeStruct, uses: list[_Use], dtype: np.dtype[Any]) -> LeafGradient:
    """The gradient from uses of the same part of the parameter, without forming it."""
    if all(site.kind is lookup for _, site, _, _ in uses):
        return _ghost_lookups(parameter, uses, dtype)
    terms = [
        Terms(*_factors(site, kept, cotangent, dtype), member.turned, member.sign)
        for member, site, kept, cotangent in uses
    ]
    if len(terms) == 1 and terms[0].time == 1 and not isinstance(terms[0].x, OneHot):
        return _one_term(parameter, uses[0][1], terms[0].x, terms[0].g)
    terms, exponent = to_common_scale(terms)

    def sum_(factors: Array, contributes: Array) -> Array:
        # The power of two comes in with the factor: g alone could vanish beside a large x.
        weights = jnp.ldexp(factors, exponent)
        sums = [
            site.view.pull_back(_weighted(site, use, weights, contributes), parameter)
            for (_, site, _, _), use in zip(uses, terms, strict=True)
        ]
        return functools.reduce(jnp.add, sums)

    norm, bound = gram_norms(terms)
    tiny = jnp.finfo(dtype).tiny
    scaled_back = jnp.where(bound > 0, jnp.maximum(jnp.ldexp(bound, exponent), tiny), bound)
    return LeafGradient(jnp.ldexp(norm, exponent), scaled_back, sum_)


def _one_term(parameter: jax.ShapeDtypeStruct, site: Site, x: Array, g: Array) -> LeafGradient:
    """The gradient from a use that meets one vector of data, as a layer does that sees no time."""
    norm, bound, lengths = one_term(x, g)
    scale, inverse = power_of_two(lengths)

    def sum_(factors: Array, contributes: Array) -> Array:
        # The power of two comes in with the factor: g alone could vanish beside a large x.
        weights = factors[:, None] * scale
        total = sum_of_products(x * inverse[..., None, None], g, weights, contributes)
        return site.view.pull_back(_from_matrices(site, total), parameter)

    return LeafGradient(norm, bound, sum_)


def _factors(
    site: Site, kept: Any, cotangent: Array, dtype: np.dtype[Any]
) -> tuple[Side, Float[Array, "batch group time features_out"]]:
    """All examples' factors of the gradient in matrix form."""
    if site.kind is not lookup:
        return jax.vmap(lambda kept, g: _matrices(site, kept, g, dtype))(kept, cotangent)

    def one(kept: Array, cotangent: Array) -> tuple[Array, Array]:
        rows = _over_scans(lambda g: lookup.rows_of(site.equation, g), site)(cotangent)
        return (
            _fold_scans(site, kept[..., None, :, None])[..., 0],
            _fold_scans(site, rows[..., None, :, :]),
        )

    rows, values = jax.vmap(one)(kept, cotangent.astype(dtype))
    found = rows < shape_of(site.equation.invars[0])[0]
    return OneHot(rows), jnp.where(found[..., None], values, 0)


def _weighted(
    site: Site,
    use: Terms,
    weights: Float[Array, " batch"],
    contributes: Bool[Array, " batch"],
) -> Array:
    """The weighted sum of all examples' gradients with respect to the stacked image."""
    if not isinstance(use.x, OneHot):
        return _from_matrices(site, sum_of_products(use.x, use.g, weights[:, None], contributes))
    groups, features = use.g.shape[1], use.g.shape[-1]
    weighted = jnp.where(contributes[:, None, None, None], use.g * weights[:, None, None, None], 0)
    tables = jax.vmap(lambda rows, values: lookup.scatter(site.equation, rows, values))(
        jnp.moveaxis(use.x.rows, 1, 0).reshape(groups, -1),
        jnp.moveaxis(weighted, 1, 0).reshape(groups, -1, features),
    )
    return _from_matrices(site, tables.reshape(groups, -1, features))


def _ghost_lookups(
    parameter: jax.ShapeDtypeStruct, uses: list[_Use], dtype: np.dtype[Any]
) -> LeafGradient:
    """The gradient from the rows that were looked up, those of one row added up first."""
    terms = [Terms(*_factors(site, kept, g, dtype)) for _, site, kept, g in uses]

    def sum_(factors: Array, contributes: Array) -> Array:
        sums = [
            site.view.pull_back(_weighted(site, use, factors, contributes), parameter)
            for (_, site, _, _), use in zip(uses, terms, strict=True)
        ]
        return functools.reduce(jnp.add, sums)

    rows = jnp.concatenate([_rows(use) for use in terms], axis=2)
    values = jnp.concatenate(
        [member.sign * use.g for (member, *_), use in zip(uses, terms, strict=True)], axis=2
    )
    return LeafGradient(*row_norms(rows, values), sum_)


def _rows(use: Terms) -> Int[Array, "batch group time"]:
    assert isinstance(use.x, OneHot)
    return use.x.rows
