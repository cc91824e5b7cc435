"""The norm of a sum of outer products, and a proved bound on the norm of what is added.

A gradient is here a sum of terms x_n g_n', n = 1..N, that is never formed. Its norm comes from
inner products (Goodfellow, "Efficient Per-Example Gradient Computations", 2015; Li et al., "Large
Language Models Can Be Strong Differentially Private Learners", 2022):

    |sum_n x_n g_n'|^2 = sum_nm A_nm B_nm,    A_nm = x_n . x_m,    B_nm = g_n . g_m.

The x of a lookup is a one-hot vector, and is given by its row. Terms of other groups are
orthogonal.

Proofs, and what they assume of arithmetic, are in `gram.md` beside this file.
"""

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..precision.stages import in_narrow_product
from ..rewrites import computed_once
from .norms import (
    SPLIT,
    contracted,
    exponent_of,
    in_parts,
    norm_error,
    norms,
    power,
    power_of_two,
    product_roundoff,
    roundings_in_blocks,
    sum_in_blocks,
    unit_roundoff,
    without_subnormal,
)


class OneHot(NamedTuple):
    """One-hot vectors, given by the row of the one."""

    rows: Int[Array, "batch group time"]


Side: TypeAlias = Float[Array, "batch group _ _"] | OneHot


class OuterProducts(NamedTuple):
    """The outer products of one use of a parameter.

    Attributes:
        x: the vectors on the side of the data.
        g: the vectors on the side of the cotangent.
        transposed: whether this use has the parameter transposed, compared with the first use.
    """

    x: Side
    g: Float[Array, "batch group time features_out"]
    transposed: bool = False

    @property
    def sides(self) -> tuple[Side, Side]:
        """The rows and the columns of the parameter, as the first use has them."""
        return (self.g, self.x) if self.transposed else (self.x, self.g)

    @property
    def time(self) -> int:
        """How many outer products there are in each group."""
        return self.g.shape[2]


def to_common_scale(
    uses: list[OuterProducts], parts: int = 0
) -> tuple[list[OuterProducts], Int[Array, " batch"]]:
    """Divides by powers of two so that nothing overflows, and nothing significant underflows.

    Every vector of x is brought to a largest entry in [1, 4), and so is the vector of g whose
    product is the largest; the other vectors of g follow it. Numbers that are then below the normal
    range (or were before) become zero. Norm and weighted sum both use the result, on machines with
    and without subnormal numbers.

    Numbers that are one bfloat16 part are kept as that, exactly: half the memory, to write and to
    read again for every product.

    Returns:
        The scaled products, and the binary exponent that each example's lost.
    """
    scaled = [(*_to_unit(use.x), *_to_unit(use.g)) for use in uses]
    largest = functools.reduce(
        jnp.maximum, [jnp.max(e + f, axis=(1, 2), initial=_NOTHING) for _, e, _, f in scaled]
    )
    largest = jnp.where(largest > _NOTHING, largest, 0)

    def follow(g: Array, exponent: Array) -> Array:
        of_all = power(exponent - largest[:, None, None], g.dtype)
        return without_subnormal(g * of_all[..., None])

    def kept(x: Side) -> Any:
        if parts != 1 or isinstance(x, OneHot) or x.shape[2] == 1:
            return x
        with in_narrow_product():
            return jax.lax.optimization_barrier(in_parts(x, 1)[0])

    uses = [
        use._replace(x=kept(x), g=kept(follow(g, e + f)))
        for use, (x, e, g, f) in zip(uses, scaled, strict=True)
    ]
    return uses, largest


_NOTHING = -(2**20)
"""The exponent of zero."""


def _to_unit(x: Side) -> tuple[Any, Int[Array, "batch group time"]]:
    """Divides every vector by a power of two near its largest entry."""
    if isinstance(x, OneHot):
        return x, jnp.zeros_like(x.rows)
    largest = jnp.max(jnp.abs(x), axis=-1, initial=0)
    limit = int(jnp.finfo(x.dtype).maxexp) - 2
    exponent = jnp.clip(exponent_of(largest), -limit, limit)
    is_zero = largest < jnp.finfo(x.dtype).tiny
    inverse = power(jnp.where(is_zero, _NOTHING, -exponent), x.dtype)
    return without_subnormal(x * inverse[..., None]), jnp.where(is_zero, _NOTHING, exponent)


def sum_of_products(
    x: Float[Array, "batch group time features_in"],
    g: Float[Array, "batch group time features_out"],
    weights: Float[Array, "batch #group"],
    contributes: Bool[Array, " batch"],
    parts: int = 0,
) -> Float[Array, "group features_in features_out"]:
    """Adds up the outer products of all examples, each weighted.

    At the highest precision; or x in `parts` bfloat16 numbers, and weighted g in two.

    Examples that do not contribute are selected away, not multiplied by zero.
    """
    mask = contributes[:, None, None, None]
    x = jnp.where(mask, x, 0)
    g = jnp.where(mask, g * weights[:, :, None, None], 0)
    if x.shape[1] == 1:
        # Outputs first, as layers have it: otherwise the compiler copies x into another order.
        x, g = (side.reshape(-1, side.shape[-1]) for side in (x, g))
        return contracted("nk,np->pk", x, g, weighted_parts(parts)).T[None]
    return contracted("bgtk,bgtp->gkp", x, g, weighted_parts(parts))


def weighted_parts(parts: int) -> tuple[int, int]:
    """The bfloat16 parts of x, and of g times the factor, which is not exact in one."""
    return parts, min(2 * parts, 2)


def gram_norms(
    uses: list[OuterProducts], parts: int = 0, dtype: Any = np.float32
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """The norm of a sum of outer products, and a bound on that of what is added for a factor of 1.

    The terms are those of `to_common_scale`. What is added is the weighted sum as it is computed:
    g rounded after its multiplication by the factor, products, and sums over n.
    """
    roundoff = product_roundoff(dtype)
    inner = product_roundoff(dtype, parts=(parts, parts))
    steps = sum(use.time for use in uses)
    lefts, rights = (tuple(use.sides[i] for use in uses) for i in (0, 1))
    alpha, beta = (inner * max(_roundings(x, parts) for x in its) for its in (lefts, rights))
    grams = {
        (i, j): (
            _inner_products(lefts[i], lefts[j], dtype, parts),
            _inner_products(rights[i], rights[j], dtype, parts),
        )
        for i in range(len(uses))
        for j in range(i + 1)
    }
    a, b = ([_lengths(grams[i, i][side]) for i in range(len(uses))] for side in (0, 1))
    square, slack = [], []
    for (i, j), (inner_a, inner_b) in grams.items():
        twice = 1 if i == j else 2
        rho = (roundings_in_blocks(inner_a[0].size) + 7 + len(grams)) * roundoff
        aa, bb = (x[i][..., :, None] * x[j][..., None, :] for x in (a, b))
        error = (alpha * aa + rho * abs(inner_a)) * abs(inner_b)
        error += beta * bb * (abs(inner_a) + alpha * aa)
        square.append(twice * sum_in_blocks(inner_a * inner_b))
        slack.append(twice * sum_in_blocks(error))
    square, slack = (functools.reduce(jnp.add, x) for x in (square, slack))
    lengths = jnp.concatenate([x * y for x, y in zip(a, b, strict=True)], axis=-1)
    gross = norms(jnp.sum(lengths, axis=-1))
    deepest = steps + 3 + 256 * bool(parts)  # tensor cores add many terms at once
    in_sum = jnp.minimum((steps + 1) * gross, math.sqrt(deepest**3 / 3) * norms(lengths))
    room = 9 / 8 if parts > 1 else 33 / 32
    bound = jnp.sqrt(jnp.maximum(square + room * slack, 0))
    in_sum *= product_roundoff(dtype, parts=weighted_parts(parts))
    bound += room * (in_sum + SPLIT * bool(parts) * gross)
    bound = jnp.maximum(bound, least_share(dtype) * gross)
    return jnp.sqrt(jnp.maximum(square, 0)), bound * (1 + 8 * roundoff)


def least_share(dtype: np.dtype[Any]) -> float:
    """The least bound of terms that cancel, by their gross norm: the sum of their norms.

    It limits what a sum of many examples may be off: in float32 a factor times a gross norm is at
    most 1,024 clip norms.
    """
    return 4 * math.sqrt(unit_roundoff(dtype))


def likely_norm(
    x: Float[Array, "batch group time _"], g: Float[Array, "batch group time _"], parts: int
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """The norm of a sum of outer products as rounding leaves it, and what it hardly exceeds.

    Nothing is proven of either. They are for gradients that are formed for their sum, measured
    then, and scaled down to the second (`within`). Vectors are not brought to one scale, which
    would take copies of all: inner products below 2^-126 vanish, and so do their products; beyond
    2^127 neither is finite.
    """
    of_x, of_g = (contracted("bgtk,bgsk->bgts", side, side, (parts, parts)) for side in (x, g))
    norm = jnp.sqrt(jnp.maximum(jnp.sum(of_x * of_g, axis=(1, 2, 3)), 0))
    gross = jnp.sum(_lengths(of_x) * _lengths(of_g), axis=(1, 2))
    return norm, jnp.maximum(norm * (1 + 2**-12), least_share(norm.dtype) * gross)


def one_term(
    x: Float[Array, "batch group 1 features_in"],
    g: Float[Array, "batch group 1 features_out"],
    parts: int = 0,
) -> tuple[
    Float[Array, " batch"],
    Float[Array, " batch"],
    Float[Array, "batch group 1 features_in"],
    Float[Array, "batch group"],
]:
    """The norm of x g', a bound on that of what the weighted sum adds, and x by powers of two.

    One term needs no sum. Its norm is |x| |g|, each factor of which is off by no more than
    `norm_error`. What is added is rounded twice: g times the factor, and the product in a
    contraction; of parts, the rest is lost. A length that a machine without subnormal numbers
    treats as zero counts as the smallest normal number.

    Returns:
        The norm, the bound, x divided by a power of two near its length, and that power.
    """
    shape = x.shape[:2]
    lengths = [norms(side.reshape(-1, side.shape[-1])).reshape(shape) for side in (x, g)]
    norm = norms(lengths[0] * lengths[1])
    tiny = jnp.finfo(x.dtype).tiny
    at_least = [jnp.maximum(length, tiny) for length in lengths]
    bound = jnp.maximum(norms(at_least[0] * at_least[1]), tiny)
    error = sum(norm_error(n, norm.dtype) for n in (shape[1], x.shape[-1], g.shape[-1]))
    scale, inverse = power_of_two(lengths[0])
    error += product_roundoff(norm.dtype, parts=weighted_parts(parts)) + SPLIT * bool(parts)
    bound *= 1 + 1.0001 * error + 6 * unit_roundoff(norm.dtype)
    return norm, bound, x * inverse[..., None, None], scale


_BLOCK, _BLOCK_OF_PARTS, _MOST_BLOCKS = 64, 2048, 32
"""Smaller blocks make for smaller bounds, and more of them for slower products: on two cores blocks
of 64 take up to twice the time of a single product, for bounds that are tighter by a few 1e-5.
Tensor cores would wait for memory: T^2 numbers are read and written for T^2 block products. Blocks
of 512 moved 0.8 times the bytes of the whole ordinary gradient of a GPT of 1B parameters."""

_AT_ONCE = 2**19
"""Of more entries than these (2 MiB in float32) blocks are added in a loop: otherwise the compiler
keeps all of them for one addition. So it should of up to four blocks of parts: adding takes more
time than multiplying there."""


def _block(features: int, parts: int) -> int:
    return max(_BLOCK_OF_PARTS if parts else _BLOCK, -(-features // _MOST_BLOCKS))


def _roundings(side: Side, parts: int) -> int:
    """How many roundings a product goes through in an inner product."""
    if isinstance(side, OneHot):
        return 0
    features = side.shape[-1]
    block = _block(features, parts)
    return min(features, block) + -(-features // block) - 1


def _inner_products(
    x: Side, y: Side, dtype: Any, parts: int
) -> Float[Array, "batch group time_x time_y"]:
    """The inner products of all pairs of vectors, one block of features after another."""
    if isinstance(x, OneHot):
        if isinstance(y, OneHot):
            return (x.rows[..., :, None] == y.rows[..., None, :]).astype(dtype)
        return jnp.swapaxes(_inner_products(y, x, dtype, parts), 2, 3)
    if isinstance(y, OneHot):
        taken = jnp.take_along_axis(x, y.rows[..., None, :], axis=-1, mode="clip")
        return taken.astype(dtype)
    size, block = x.shape[-1], _block(x.shape[-1], parts)

    # The barrier stops the compiler from continuing the sum of one block in the next.
    def of_block(start: Any, length: int) -> Array:
        left, right = (jax.lax.dynamic_slice_in_dim(x, start, length, axis=3) for x in (x, y))
        inner = contracted("bgtk,bgsk->bgts", left, right, (parts, parts))
        return jax.lax.optimization_barrier(inner)

    first = size % block or block
    total, others = of_block(0, first), (size - first) // block
    if others * total.size <= _AT_ONCE or (parts and others < 4):
        return sum((of_block(first + i * block, block) for i in range(others)), total)

    def add(i: Array, total: Array) -> Array:
        return total + of_block(first + i * block, block)

    return jax.lax.fori_loop(0, others, add, total)


def _lengths(inner: Float[Array, "batch group time time"]) -> Float[Array, "batch group time"]:
    return jnp.sqrt(jnp.maximum(jnp.diagonal(inner, axis1=-2, axis2=-1), 0))


def row_norms(
    rows: Int[Array, "batch group time"], values: Float[Array, "batch group time entry"]
) -> tuple[Float[Array, " batch"], Float[Array, " batch"], Float[Array, "batch group time entry"]]:
    """The norm of a table of rows, a bound on that of what is added for a factor of 1, and that.

    Lookups of one row add up first, and may cancel. The first of them takes their sum, which is
    measured and added; the others take zero.

    Returns:
        The norm, the bound, and what is to be added at the rows.

        | values | norm | bound |
        |---|---|---|
        | squares that overflow, or vanish | right, to rounding | right, to rounding |
        | zero | 0 | 0 |
        | one row's lookups cancel | what remains | at least `least_share` of the gross norm |
        | NaN or infinity among them | NaN or inf | NaN or inf |
        | other examples' | as if they were not there | the same |
    """
    dtype = values.dtype
    batch, groups, time = rows.shape
    error = norm_error(values[0].size, dtype) + 2 * unit_roundoff(dtype)
    if time == 1:
        norm = norms(values)
        return norm, norm * (1 + error), values
    same = rows[..., :, None] == rows[..., None, :]
    first = jnp.min(jnp.where(same, jnp.arange(time)[:, None], time), axis=-2)
    place = (jnp.arange(batch * groups)[:, None] * time + first.reshape(-1, time)).reshape(-1)

    def of_rows(x: Float[Array, "lookup entry"]) -> Float[Array, "lookup entry"]:
        return jnp.zeros_like(x).at[place].add(x, mode="promise_in_bounds")

    flat = values.reshape(len(place), -1)
    sums = computed_once(of_rows, flat, flat).reshape(values.shape)
    gross = norms(of_rows(least_share(dtype) * norms(flat)[:, None]).reshape(batch, -1))
    norm = norms(sums)
    return norm, jnp.maximum(norm * (1 + error), gross), sums
