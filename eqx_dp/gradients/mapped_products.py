"""The norm of a linear map of an outer product, and a bound on what is added of it.

A parameter that reaches data through a value (a weight that is normed row by row) has the gradient
T(x g'): x g' is that with respect to the value, and T the transposed derivative of the value, the
same for all examples. What comes of x g' on the way through T is a sum of terms, each an array that
all examples share times one vector of each example along each axis. So no example's gradient is
formed: entries are added up by products of matrices, and T of the weighted sum is found once.

The proof of the bound is in `gram.md` beside this file.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..programs import evaluated
from .clip import norms, product_roundoff
from .layouts import Layout
from .linear_maps import LinearMap, MapSize, applied, roundings_over, sum_over
from .powers import exponent_of, power_of_two, times_power, without_subnormal
from .weighted_products import products_in_blocks, to_powers


class _Term(NamedTuple):
    """An array times vectors of each example.

    Attributes:
        fixed: of all examples.
        vectors: along which axis; one number of each example is along none, -1.
        roundings: how many roundings each product goes through.
    """

    fixed: Float[Array, "..."]
    vectors: dict[int, Float[Array, "batch _"]]
    roundings: int

    def without(self, axis: int) -> "_Term | None":
        """Its entries added up along an axis; None where what is left is no product of vectors."""
        shape, vectors = self.fixed.shape, dict(self.vectors)
        vector = vectors.pop(axis, None)
        vectors = {at - (at > axis): its for at, its in vectors.items()}
        if vector is None:
            roundings = self.roundings + roundings_over(shape, (axis,))
            return _Term(sum_over(self.fixed, (axis,)), vectors, roundings)
        left = shape[:axis] + shape[axis + 1 :]
        several = [at for at, size in enumerate(left) if size > 1]
        if len(several) > 1:
            return None
        matrix = jnp.moveaxis(self.fixed, axis, -1).reshape(1, -1, shape[axis])
        (found,), roundings = products_in_blocks(vector[None], matrix)
        at = several[0] if several else -1
        vectors[at] = found * vectors[at] if at in vectors else found
        return _Term(jnp.ones(left, found.dtype), vectors, self.roundings + roundings + 1)

    def times(self, other: "_Term") -> "_Term":
        """Entry by entry."""
        vectors = dict(self.vectors)
        for axis, its in other.vectors.items():
            vectors[axis] = vectors[axis] * its if axis in vectors else its
        roundings = self.roundings + other.roundings + 4
        return _Term(self.fixed * other.fixed, vectors, roundings)

    def total(self) -> "_Term | None":
        """Of all entries, one number of each example."""
        term: _Term | None = self
        while term is not None and term.fixed.ndim:
            shape = term.fixed.shape
            term = term.without(max(range(len(shape)), key=lambda axis: shape[axis]))
        return term


class _Products(NamedTuple):
    """Sums of terms.

    Attributes:
        terms: the terms.
        are_sizes: whether all numbers stand for their absolute values.
    """

    terms: tuple[_Term, ...]
    are_sizes: bool = False

    def times(self, fixed: Array) -> "_Products":
        fixed = jnp.abs(fixed) if self.are_sizes else fixed
        found = (t._replace(fixed=t.fixed * fixed, roundings=t.roundings + 1) for t in self.terms)
        return self._replace(terms=tuple(found))

    def negated(self) -> "_Products":
        if self.are_sizes:
            return self
        return self._replace(terms=tuple(t._replace(fixed=-t.fixed) for t in self.terms))

    def plus(self, other: "_Products") -> "_Products | None":
        """Terms of the same vectors become one."""
        found = {_same(term): term for term in self.terms}
        for term in other.terms:
            if (key := _same(term)) in found:
                first = found[key]
                roundings = max(first.roundings, term.roundings) + 1
                term = _Term(first.fixed + term.fixed, term.vectors, roundings)
            found[key] = term
        return self._replace(terms=tuple(found.values())) if len(found) <= _MOST else None

    def summed(self, axes: tuple[int, ...]) -> "_Products | None":
        terms: Sequence[_Term | None] = self.terms
        for axis in sorted(axes, reverse=True):
            terms = [None if term is None else term.without(axis) for term in terms]
        known = tuple(term for term in terms if term is not None)
        return self._replace(terms=known) if len(known) == len(terms) else None

    def moved(self, equation: jex_core.JaxprEqn, axes: dict[int, int]) -> "_Products":
        def of_term(term: _Term) -> _Term:
            (fixed,) = evaluated(equation, [term.fixed])
            return _Term(
                fixed, {axes.get(at, at): x for at, x in term.vectors.items()}, term.roundings
            )

        return self._replace(terms=tuple(map(of_term, self.terms)))

    def squares(self) -> list[tuple[int, _Term]] | None:
        """The terms of the squared norm, and how often each is there: twice for a pair."""
        found = [
            (1 if i == j else 2, term.times(other).total())
            for i, term in enumerate(self.terms)
            for j, other in enumerate(self.terms[: i + 1])
        ]
        known = [(times, term) for times, term in found if term is not None]
        return known if len(known) == len(found) else None


_MOST = 8
"""Terms, whose pairs are as many products of matrices; `gram.md` counts on that."""


def _same(term: _Term) -> tuple[Any, ...]:
    return tuple(sorted((axis, id(vector)) for axis, vector in term.vectors.items()))


def vector_axes(matrices: Layout, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The axes of an array that are the rows and the columns of its one matrix.

    It is -1 where there is only one row, or column; None where the matrix is not all of the array,
    axis by axis.
    """
    groups, *sides = matrices.axes
    if groups or matrices.offset or math.prod(matrices.shape) != math.prod(shape):
        return None
    strides = {math.prod(shape[axis + 1 :]): axis for axis, size in enumerate(shape) if size != 1}
    found: list[int] = []
    for side in sides:
        if len(side) > 1:
            return None
        axis = strides.get(side[0][1], -1) if side else -1
        if side and (axis < 0 or shape[axis] != side[0][0]):
            return None
        found.append(axis)
    return found[0], found[1]


class Mapped(NamedTuple):
    """What the weighted sum is made of.

    Attributes:
        x: the vectors on the side of the data, divided by powers of two.
        g: the vectors on the side of the cotangent, likewise.
        exponent: the binary exponents that they have lost together.
    """

    x: Float[Array, "batch features_in"]
    g: Float[Array, "batch features_out"]
    exponent: Int[Array, " batch"]

    def sum(
        self, factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]
    ) -> tuple[Float[Array, "features_out features_in"], Int[Array, ""]]:
        """The weighted sum of outer products, divided by a power of two, and its exponent.

        What does not contribute is selected away.
        """
        mask = contributes[:, None]
        x = jnp.where(mask, self.x, 0)
        g = jnp.where(
            mask, self.g * without_subnormal(times_power(factors, self.exponent))[:, None], 0
        )
        total = jnp.einsum("np,nk->pk", g, x, precision=jax.lax.Precision.HIGHEST)
        scale, inverse = power_of_two(jnp.max(jnp.abs(total), initial=0))
        return total * inverse, exponent_of(scale)


def start_of(
    x: Float[Array, "batch features_in"],
    g: Float[Array, "batch features_out"],
    axes: tuple[int, int],
    shape: tuple[int, ...],
    are_sizes: bool = False,
) -> _Products:
    """Each example's outer product as an array of a shape, rows and columns along its axes."""
    if are_sizes:
        x, g = jnp.abs(x), jnp.abs(g)
    vectors = dict[int, Array]()
    for axis, side in zip(axes, (x, g), strict=True):
        vectors[axis] = vectors[axis] * side if axis in vectors else side
    return _Products((_Term(jnp.ones(shape, g.dtype), vectors, 1),), are_sizes)


def mapped_products(
    x: Float[Array, "batch features_in"],
    g: Float[Array, "batch features_out"],
    axes: tuple[int, int],
    shape: tuple[int, ...],
    linear: LinearMap,
    size: MapSize,
) -> tuple[Float[Array, " batch"], Float[Array, " batch"], Mapped] | None:
    """The norm of a linear map of an outer product.

    Returns:
        The norm; a bound on that of what is added for a factor of 1; and what the sum is made of.
        None where the map cannot be followed on outer products.

        | x, g, map | norm | bound |
        |---|---|---|
        | squares that overflow, or vanish | right, to rounding | right, to rounding |
        | zero | 0 | next to 0 |
        | what comes of the map nearly cancels | loses digits | at least that |
        | numbers beyond 1e15 on the way | loses digits | at least that, or inf |
        | the largest entries could make 1e36 or more | the same | inf |
        | NaN or infinity | NaN or inf | NaN or inf |
    """
    dtype = g.dtype
    roundoff, tiny = product_roundoff(dtype), float(jnp.finfo(dtype).tiny)
    (x, of_x), (g, of_g) = to_powers(x), to_powers(g)
    inverse = times_power(jnp.ones((), dtype), -size.exponent)
    squares: list[list[tuple[int, _Term]]] = []
    largest: Any = 1.0
    for are_sizes in (False, True):
        found: _Products | None = linear.follow(start_of(x, g, axes, shape, are_sizes))
        terms = None if found is None else found.times(inverse).squares()
        if found is None or terms is None:
            return None
        squares.append(terms)
        largest = 1 + sum(jnp.max(jnp.abs(t.fixed * inverse), initial=0) for t in found.terms)
        result = math.prod(found.terms[0].fixed.shape)
    signed, unsigned = squares
    few = 3 * len(signed)
    square = sum(times * _number(term) for times, term in signed)
    gross = [times * _number(term) for times, term in unsigned]
    slack = sum(
        (term.roundings + few) * roundoff * size
        for (_, term), size in zip(signed, gross, strict=True)
    )

    lengths = [norms(side) for side in (x, g)]
    slack = 33 / 32 * slack
    slack += 64 * len(signed) * result * tiny * jnp.square((1 + size.peak) * largest)
    behind = 33 / 32 * (size.roundings + 4) * roundoff * jnp.sqrt(sum(gross))
    vanished = size.vanished + 64 * tiny * (1 + size.peak)
    behind += math.sqrt(result) * vanished * (1 + lengths[0] * lengths[1])
    lost = 3 * tiny + sum(times_power(jnp.asarray(tiny, dtype), -e) for e in (of_x, of_g))
    behind += 64 * math.sqrt(result) * lost
    bound = jnp.sqrt(jnp.maximum(square, 0) + slack) + behind
    exponent = of_x + of_g + size.exponent
    norm = times_power(jnp.sqrt(jnp.maximum(square, 0)), exponent)
    is_within = exponent < int(jnp.finfo(dtype).maxexp) - 8
    bound = jnp.where(is_within, jnp.maximum(times_power(bound, exponent), tiny), jnp.inf)
    return norm, bound * (1 + 8 * roundoff), Mapped(x, g, exponent)


def _number(term: _Term) -> Float[Array, " batch"]:
    product: Any = term.fixed
    for vector in term.vectors.values():
        product = product * vector[:, 0]
    return product


def summed(
    linear: LinearMap,
    size: MapSize,
    total: Float[Array, "..."],
    exponent: Int[Array, ""],
) -> Float[Array, "..."]:
    """The linear map of a weighted sum, which `Mapped.sum` gave."""
    return times_power(applied(linear, total), exponent - size.exponent)
