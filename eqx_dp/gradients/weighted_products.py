"""The norm of an outer product whose entries are each multiplied by a weight, and its bound.

The proof is in `gram.md` beside this file.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .clip import norm_error, norms, product_roundoff, sum_in_blocks
from .computed_again import MOST_ROUNDINGS
from .powers import exponent_of, power_of_two, times_power, without_subnormal


class Weighted(NamedTuple):
    """Outer products x g' whose entries are each multiplied by a weight, all groups side by side.

    Attributes:
        x: the vectors on the side of the data, divided by powers of two.
        g: the vectors on the side of the cotangent, likewise.
        weights: the weights as they are, outputs first.
        inverse: the power of two that brings them near one.
        exponent: the binary exponents that all lose together.
    """

    x: Float[Array, "group batch features_in"]
    g: Float[Array, "group batch features_out"]
    weights: Float[Array, "group features_out features_in"]
    inverse: Float[Array, "group 1 1"]
    exponent: Int[Array, "group batch"]

    def sum(
        self, factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]
    ) -> Float[Array, "group features_out features_in"]:
        """The weighted sum, multiplied by the entries' weights once.

        What does not contribute is selected away.
        """
        mask = contributes[:, None]
        x = jnp.where(mask, self.x, 0)
        g = jnp.where(
            mask, self.g * without_subnormal(times_power(factors, self.exponent))[..., None], 0
        )
        spec, highest = "gnp,gnk->gpk", jax.lax.Precision.HIGHEST
        if len(x) == 1:
            x, g, spec = x[0], g[0], "np,nk->pk"
        # Where it is not finite no example adds anything, and zero times it must be zero.
        weights = jnp.where(jnp.isfinite(self.weights), self.weights * self.inverse, 0)
        return jnp.einsum(spec, g, x, precision=highest).reshape(weights.shape) * weights


def weighted_products(
    x: Float[Array, "batch group features_in"],
    g: Float[Array, "batch group features_out"],
    weights: Float[Array, "group features_out features_in"],
) -> tuple[Float[Array, " batch"], Float[Array, " batch"], Weighted]:
    """The norm of an outer product x g' whose entries are each multiplied by a weight.

    Its square is (x^2)' W^2 (g^2), with squares entry by entry: one product of matrices gives it
    for all examples. No term is negative, so that no digits are lost but to underflow.

    Returns:
        The norm; a bound on that of what is added for a factor of 1, where g is multiplied by the
        factor, the product by the weight; and what the sum is made of.

        | x, g, weights | norm | bound |
        |---|---|---|
        | squares that overflow, or vanish | right, to rounding | right, to rounding |
        | zero | 0 | next to 0 |
        | below 1e-15 of what the largest entries could make | loses digits | at least that |
        | the largest entries could make 1e36 or more | the same | inf |
        | NaN or infinity, whatever the weight | NaN or inf | NaN or inf |
    """
    dtype, (groups, columns, rows) = g.dtype, weights.shape
    roundoff, tiny = product_roundoff(dtype), float(jnp.finfo(dtype).tiny)
    # Groups first, as products of matrices take them.
    (x, of_x), (g, of_g) = (to_powers(jnp.swapaxes(side, 0, 1)) for side in (x, g))
    largest = jnp.max(jnp.abs(weights), axis=(1, 2), keepdims=True, initial=0)
    scale, inverse = power_of_two(largest)
    # Behind a barrier: the compiler would square weights and scale apart where that is one number.
    scaled = jax.lax.optimization_barrier(weights * inverse)
    of_weights = exponent_of(scale)[..., 0]
    of_rows, roundings = products_in_blocks(jnp.square(x), jnp.square(scaled))
    terms = of_rows * jnp.square(g)
    square = sum_in_blocks(terms.reshape(-1, columns)).reshape(terms.shape[:2])
    lost = [times_power(jnp.asarray(tiny, dtype), -e) for e in (of_x, of_g, of_weights)]
    vanished = 64 * math.sqrt(rows * columns) * (3 * tiny + sum(lost))
    bound = jnp.sqrt(square + 1024 * rows * columns * tiny) + vanished
    exponent = of_x + of_g + of_weights
    norm, bound = (times_power(size, exponent) for size in (jnp.sqrt(square), bound))
    # Beyond, a factor times that power of two could be infinite where the weighted sum is not.
    is_within = exponent < int(jnp.finfo(dtype).maxexp) - 8
    bound = jnp.where(is_within, jnp.maximum(bound, tiny), jnp.inf)
    error = sum(norm_error(n, dtype) for n in (groups, columns))
    error += 33 / 32 * (roundings + 3) / 2 * roundoff  # 33 / 32 for products of errors
    error += (8 + 2 * MOST_ROUNDINGS) * roundoff
    norm, bound = norms(norm.T), norms(bound.T) * (1 + error)
    return norm, bound, Weighted(x, g, weights, inverse, exponent)


def products_in_blocks(
    x: Float[Array, "group n features"], y: Float[Array, "group m features"]
) -> tuple[Float[Array, "group n m"], int]:
    """The inner products of vectors with others, a block of features at a time.

    Beside that, how many roundings a product goes through. Blocks are few, and there is one as long
    as that many roundings are few: the compiler copies both sides to cut them.
    """
    size = x.shape[-1]
    block = max(1, -(-size // min(8, -(-size // _FEATURES) or 1)))
    spec = "gnk,gmk->gnm"
    if x.shape[0] == 1:
        x, y, spec = x[0], y[0], "nk,mk->nm"
    blocks = [
        jnp.einsum(
            spec,
            x[..., i : i + block],
            y[..., i : i + block],
            precision=jax.lax.Precision.HIGHEST,
        )
        for i in range(0, size, block)
    ]
    # The barrier keeps the compiler from adding one block up on top of another.
    blocks = jax.lax.optimization_barrier(blocks) if len(blocks) > 1 else blocks
    total = functools.reduce(jnp.add, blocks)
    total = total[None] if spec == "nk,mk->nm" else total
    return total, min(size, block) + len(blocks) - 1


_FEATURES = 1024
"""So many in one block, in float32, are a relative error of 3e-5 of a norm at most."""


def to_powers(x: Float[Array, "*n entry"]) -> tuple[Float[Array, "*n entry"], Int[Array, "*n"]]:
    """Divides every vector by a power of two near its largest entry, and says which."""
    scale, inverse = power_of_two(jnp.max(jnp.abs(x), axis=-1, initial=0))
    return x * inverse[..., None], exponent_of(scale)
