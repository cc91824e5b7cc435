"""Each leaf's gradients in a batch: measured, weighted and summed.

The measured array is the array that is added: `computed_once` of `rewrites/` sees to it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..device import is_cpu
from .blocks import in_blocks
from .norms import PRECISION, norm_error, norms, unit_roundoff, without_subnormal

Measure: TypeAlias = tuple[Float[Array, " batch"], Float[Array, " batch"]]
"""The norm of each example's gradient as it was computed, and an upper bound on the true norm of
what is added for a factor of 1, or a limit that it is scaled down to (`within`)."""


class LeafGradient(NamedTuple):
    """The gradient of one leaf for a batch of examples, formed or factored.

    Attributes:
        formed: each example's gradient, if it is formed.
        measure: otherwise norm and bound; None if both are zero.
        weighted: takes factors and a mask of the examples that contribute, and returns their
            weighted sum; None if that follows from `formed`.
    """

    formed: Float[Array, "batch ..."] | None = None
    measure: Measure | None = None
    weighted: Callable[[Float[Array, " batch"], Bool[Array, " batch"]], Array] | None = None

    def sum(self, factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]) -> Array:
        """The weighted sum over the examples that contribute."""
        if self.weighted is not None:
            return self.weighted(factors, contributes)
        assert self.formed is not None
        return weighted_sum(self.formed, factors, contributes)


def no_gradient(
    shape: tuple[int, ...], dtype: np.dtype[Any], measure: Measure | None = None
) -> LeafGradient:
    """The gradient of a leaf whose sum is zero, or not wanted; by default, so are its norms."""
    return LeafGradient(None, measure, lambda *_: jnp.zeros(shape, dtype))


def norm_and_bound(leaves: Sequence[LeafGradient], batch: int, dtype: np.dtype[Any]) -> Measure:
    """The norm of the gradient that some leaves make together, and the bound on what is added.

    Formed gradients are measured together, at one scale: their bound covers only the error of the
    norm.
    """
    formed = [leaf.formed for leaf in leaves if leaf.formed is not None]
    measures = [leaf.measure for leaf in leaves if leaf.measure is not None]
    if formed:
        measures.append(_of_formed(formed))
    return combined(measures, batch, dtype)


def combined(measures: Sequence[Measure], batch: int, dtype: np.dtype[Any]) -> Measure:
    """Norm and bound of gradients from those of their parts."""
    if len(measures) == 1:
        return measures[0]
    zero = jnp.zeros(batch, dtype)
    parts = zip((zero, zero), *measures, strict=True)
    norm, bound = (norms(jnp.stack(part, axis=-1)) for part in parts)
    return norm, bound * (1 + norm_error(len(measures), dtype))


def of_slices(measured: Float[Array, "batch *slices 2"]) -> Measure:
    """Norm and bound of a stacked parameter from those of its slices."""
    batch, size = measured.shape[0], math.prod(measured.shape[1:-1])
    norm, bound = (norms(measured[..., i].reshape(batch, size)) for i in range(2))
    return norm, bound * (1 + norm_error(size, measured.dtype))


@jax.jit
def _of_formed(grads: list[Float[Array, "batch ..."]]) -> Measure:
    norm = norms(*grads)
    longest = max(math.prod(x.shape[1:]) for x in grads)
    return norm, norm * (1 + norm_error(longest, norm.dtype, len(grads)))


@jax.jit
def weighted_sum(
    leaf: Float[Array, "batch *shape"],
    factors: Float[Array, " batch"],
    contributes: Bool[Array, " batch"],
) -> Float[Array, "*shape"]:
    """Sums factor x gradient over examples, in the dtype of `factors`.

    An example that does not contribute is selected away after the product, because 0 x NaN is NaN.
    Bit for bit, the sum is that with a zero gradient in its place.

    A few large gradients are added one by one, which the compiler fuses into one pass; others in
    blocks, on a CPU as a contraction at the highest precision, which needs a second copy of all
    gradients. An accelerator would round its inputs, or leave its tensor cores.
    """
    batch, dtype = leaf.shape[0], factors.dtype
    # Measured on two CPU cores: 16 gradients of a million entries take 2.4 ms so, and 18 ms in
    # blocks; 64 of 18,000 take equally long, with more code.
    if 0 < batch <= (64 if math.prod(leaf.shape[1:]) >= 2**15 else 8):
        weighted = [
            jnp.where(contributes[i], leaf[i].astype(dtype) * factors[i], 0) for i in range(batch)
        ]
        return functools.reduce(jnp.add, weighted)

    def of_block(operands: tuple[Array, Array, Array]) -> Array:
        leaf, factors, contributes = operands
        factors = jnp.where(contributes, factors, 0)
        mask = contributes.reshape(-1, *[1] * (leaf.ndim - 1))
        selected = jnp.where(mask, leaf.astype(dtype), 0)
        if is_cpu():
            return jnp.tensordot(factors, selected, axes=1, precision=PRECISION)
        return jnp.sum(selected * factors.reshape(mask.shape), axis=0)

    return in_blocks(of_block, (leaf, factors, contributes), dtype)


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
