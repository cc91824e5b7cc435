"""Clip norms, the norms of per-example gradients, and the factors between them.

The bounds here and in `gram.py` hold for the arithmetic of processors, GPUs and TPUs:

| operation | assumed |
|---|---|
| addition, multiplication, both in one | rounded to nearest once: off by a relative u at most |
| division, square root | off by 2 units in the last place: a relative 4 u (`div.full` on GPUs) |
| products of a contraction | at `PRECISION`: off by `product_roundoff` |
| sums | in any order, another one for every entry and every run |
| numbers below the normal range | kept, or taken for zero |

u is `unit_roundoff`, the largest relative error of one rounding to nearest.
"""

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..paths import below
from ..shown import shown
from ..trees import PyTree
from .powers import power_of_two


class Clipping(NamedTuple):
    """How each group of leaves is clipped: one group for a single clip norm, several for a tree.

    Attributes:
        clip_norms: the L2 bound of each group's clipped gradient.
        structure: the tree that the user gave, with one leaf a group.
        rescale_to_unit_norm: whether each clipped group is divided by its clip norm.
    """

    clip_norms: tuple[float, ...]
    structure: Any
    rescale_to_unit_norm: bool

    @property
    def l2_norm_bound(self) -> float:
        """The L2 norm that one example's clipped gradient cannot exceed, over all groups.

        Groups are orthogonal, so their bounds add in squares.
        """
        return math.hypot(*self.bounds)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The same for each group."""
        return (1.0,) * len(self.clip_norms) if self.rescale_to_unit_norm else self.clip_norms

    def groups(self, params: PyTree[Array]) -> list[int]:
        """Finds the group of every leaf of `params`, in the order of its leaves.

        Raises:
            ValueError: the tree of clip norms is no prefix of the tree of trainable parameters.
        """
        indices = self.structure.unflatten(range(len(self.clip_norms)))
        indices = jax.tree.map(lambda i: _NO_GROUP if i is None else i, indices, is_leaf=_is_none)
        try:
            groups = jax.tree.broadcast(indices, params)
        except ValueError as error:
            raise ValueError(f"{_NO_PREFIX} {error}") from error
        for path, group in jax.tree_util.tree_leaves_with_path(groups):
            if group == _NO_GROUP:
                where = below("model", path)
                raise ValueError(f"{_NO_PREFIX} {where} is trained and has no clip norm.")
        return jax.tree.leaves(groups)


_NO_GROUP = -1
_NO_PREFIX = (
    "l2_clip_norm is no prefix of the trainable parameters' tree. Give one number, or a tree whose "
    "numbers each stand where a trainable leaf or a whole subtree of the model stands "
    "(jax.tree_util's prefix rule)."
)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def parse_clip_norm(l2_clip_norm: PyTree[Any], rescale_to_unit_norm: bool) -> Clipping:
    """Reads a clip norm, or a tree of them, as the user gave it.

    Leaves of the tree that are neither numbers nor arrays (an activation function of the model
    that the tree was made from, say) have no clip norm; whether a trainable leaf is left without
    one is known, and refused, once the model is there.

    Raises:
        ValueError: a clip norm is negative, NaN, or not a number; or there is none at all.
    """
    norms = jax.tree_util.tree_map_with_path(_parse_one, l2_clip_norm)
    clip_norms, structure = jax.tree.flatten(norms)
    if not clip_norms:
        raise ValueError(
            f"l2_clip_norm holds no number: found {shown(l2_clip_norm)}. Give a number of at "
            "least 0."
        )
    return Clipping(tuple(clip_norms), structure, rescale_to_unit_norm)


def _parse_one(path: tuple[Any, ...], leaf: Any) -> float | None:
    where = below("l2_clip_norm", path)
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"{where} is a traced value. The clip norm decides the sensitivity, so it has to be a "
            "known number: pass a Python float, or mark the argument as static."
        )
    if isinstance(leaf, numbers.Real) or (eqx.is_array_like(leaf) and np.ndim(leaf) == 0):
        if isinstance(leaf, bool | np.bool_) or jnp.iscomplexobj(leaf):
            raise ValueError(f"{where} must be a real number, found {shown(leaf)}.")
        value = float(leaf)
        if not value >= 0:
            raise ValueError(f"{where} must be at least 0 (inf for no clipping), found {value}.")
        return value
    if eqx.is_array(leaf):
        raise ValueError(
            f"{where} is an array of shape {leaf.shape}; a clip norm is one number. Replace every "
            "trainable leaf, or a subtree above it, by a number, and the other arrays by None."
        )
    return None


def norms(gradients: Float[Array, "batch ..."]) -> Float[Array, " batch"]:
    """The L2 norm of each example's gradient, at any scale.

    Squares of entries beyond the square root of the dtype's range overflow, or vanish. So each
    example is first divided by a power of two near its largest entry; entries whose squares vanish
    then are too small beside that one to count.

    Args:
        gradients: one gradient an example, in the accumulate dtype.

    Returns:
        One norm an example, in the same dtype.

        | gradient | norm |
        |---|---|
        | all zero, or no entries | 0 |
        | entries whose squares overflow | right, to rounding |
        | entries whose squares vanish | right, to rounding |
        | norm beyond the dtype's range | inf |
        | NaN or infinity among them | NaN or inf |
    """
    return norms_of_parts([gradients])


def norms_of_parts(parts: Sequence[Float[Array, "batch ..."]]) -> Float[Array, " batch"]:
    """The same of gradients that are given in parts, one array a leaf."""
    # A gradient known to the compiler would be squared before it is divided, and overflow.
    parts = jax.lax.optimization_barrier(list(parts))
    flat = [x.reshape(len(x), math.prod(x.shape[1:])) for x in parts]
    if len(flat) == 1 and flat[0].shape[1] == 1:
        return jnp.abs(flat[0][:, 0])
    # In blocks from the start: what comes after a reshape is one loop with the sum.
    blocks = [_in_blocks(x) for x in flat]
    largest = functools.reduce(jnp.maximum, map(_largest, blocks))
    scale, inverse = power_of_two(largest)
    if len(blocks) > 1:
        # The same number. The compiler repeats anything but a division for every part.
        inverse = 1 / scale
    squares = [
        jax.lax.optimization_barrier(jnp.sum(jnp.square(x * inverse[:, None, None]), axis=2))
        for x in blocks
    ]
    sums = [sum_in_blocks(x) for x in squares]
    total = sums[0] if len(sums) == 1 else sum_in_blocks(jnp.stack(sums, axis=1))
    return jnp.sqrt(total) * scale


_BLOCK = 64
"""Longer blocks are no faster on a CPU, and shorter ones are slower."""


def sum_in_blocks(x: Float[Array, "batch n"]) -> Float[Array, " batch"]:
    """Sums each example's entries, never more than 64 at a time.

    Barriers keep the compiler from merging the levels into one long sum, whose error would grow
    with its length.
    """
    while x.shape[1] > _BLOCK:
        x = jax.lax.optimization_barrier(jnp.sum(_in_blocks(x), axis=2))
    return jnp.sum(x, axis=1)


def _in_blocks(x: Float[Array, "batch n"]) -> Float[Array, "batch blocks entry"]:
    """Each example's entries in blocks of one length, filled up with zeros where need be."""
    batch, size = x.shape
    entries = _block(size)
    blocks = -(-size // entries)
    x = jnp.pad(x, ((0, 0), (0, blocks * entries - size)))
    return x.reshape(batch, blocks, entries)


def _block(size: int) -> int:
    """The length of blocks: one that divides the size, so that nothing has to be copied, or 64."""
    if size <= _BLOCK:
        return max(1, size)
    divisors = [n for n in range(_BLOCK // 4, _BLOCK + 1) if size % n == 0]
    return max(divisors, default=_BLOCK)


def norm_error(size: int, dtype: np.dtype[Any], parts: int = 1) -> float:
    """A bound on the relative error of `norms` for gradients of `size` entries.

    In so many parts it is for parts of at most that size.

    A square is rounded once, and goes through sums of at most 64 terms, a sum a level. A sum of n
    terms costs at most n - 1 roundings in whatever order. All terms are positive, so the sum of
    squares is off by no more than all of these together, and its root by half of that (Higham,
    "Accuracy and Stability of Numerical Algorithms", 2002, section 4.2). The root itself costs 4,
    the inverse of the scale 4 (where it is a quotient), and an entry divided by the scale 1. Two
    more make up for products of errors, and for squares that vanish beside the largest.
    """
    roundings = 1 + roundings_in_blocks(size) + roundings_in_blocks(parts)
    return (roundings / 2 + 11) * unit_roundoff(dtype)


def roundings_in_blocks(size: int) -> int:
    """How many roundings a term goes through in `sum_in_blocks`."""
    roundings = 0
    while size > 1:
        entries = _block(size)
        roundings += entries - 1
        size = -(-size // entries)
    return roundings


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """The largest relative error of one rounding to nearest."""
    return float(jnp.finfo(dtype).eps) / 2


PRECISION = jax.lax.Precision.HIGHEST
"""What every contraction asks for whose result is measured, bounded or added."""


def product_roundoff(dtype: np.dtype[Any], platform: str | None = None) -> float:
    """The largest relative error of one product, and its addition, in a contraction at `PRECISION`.

    | platform | a product is made of | error |
    |---|---|---|
    | CPU, GPU | the numbers as they are, no TensorFloat-32 | u |
    | TPU | six passes of bfloat16 parts | 16 u |

    A TPU splits a float32 number into three bfloat16 parts, exactly, and leaves out three of nine
    products, which are less than u / 2 together. The other six are exact, and each costs an
    addition, which may cut off instead of rounding: 2 u each. Platforms that are not known count as
    TPUs.

    Args:
        dtype: of the numbers and the sum.
        platform: where the contraction runs; None for JAX's default.
    """
    if platform is None:
        platform = jax.default_backend()
    is_whole = platform in ("cpu", "gpu", "cuda", "rocm")
    return (1 if is_whole else 16) * unit_roundoff(dtype)


def _largest(x: Float[Array, "batch blocks entry"]) -> Float[Array, " batch"]:
    return jnp.max(jnp.abs(x), axis=(1, 2), initial=0)


def combined_norms(
    parts: Sequence[Float[Array, " batch"]], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Float[Array, " batch"]:
    """The norms of gradients from those of their parts; zero where there are none."""
    if not parts:
        return jnp.zeros(shape, dtype)
    return norms(jnp.stack(parts, axis=-1))


def clip_factors(
    bounds: Float[Array, " batch"],
    clip_norm: float,
    rescale_to_unit_norm: bool,
    contributes: Bool[Array, " batch"],
) -> Float[Array, " batch"]:
    """The factor that brings each gradient to a norm of at most `clip_norm`.

    It is zero for an example that does not contribute.

    This is min(1, C / norm) of Abadi et al., "Deep Learning with Differential Privacy", 2016; with
    `rescale_to_unit_norm` it is divided by C (De et al., "Unlocking High-Accuracy
    Differentially Private Image Classification through Scale", 2022).

    Guarantee: with `bound` an upper bound on the true norm of what is multiplied, factor x
    gradient has, rounded entry by entry and divided by `normalize_by`, a norm of at most C (1).
    Proof: with p u the error of a product (`product_roundoff`), the quotient is off by 4 u, the
    product by p u, the division by `normalize_by` by 4 u: 8 + p in all. Room of at least 8 + p is
    added to the bound (of which its own rounding takes 1), and as much is taken off C. Where the
    factor is 1 the last division alone and the product count, for which the bound's room suffices.
    Products of errors take less than one more. Factors are zero or normal numbers, whose relative
    error is as said whether or not a machine keeps smaller numbers.

    | clip norm C | bound | factor (rescaled) |
    |---|---|---|
    | 0 | > 0 | 0 (1 / bound, the limit of C to 0) |
    | 0 | 0 | 1 (0: the gradient is zero anyway) |
    | inf | finite | 1 (0) |
    | any | <= C | 1 (1 / C) |
    | any | > C | C / bound (1 / bound) |
    | any | C / bound is below twice the smallest normal number | exactly 0 |
    | any | NaN or inf | as if finite: such an example must not contribute |
    """
    roundoff, tiny = unit_roundoff(bounds.dtype), float(jnp.finfo(bounds.dtype).tiny)
    # An even number, so that 1 + room is a number of the dtype.
    room = 2 * math.ceil((9 + product_roundoff(bounds.dtype) / roundoff) / 2) * roundoff
    margin = 1 - room
    bounds = bounds * (1 + room)
    clip, less = (_round_down(c, bounds.dtype) for c in (clip_norm, clip_norm * margin))
    if not rescale_to_unit_norm:
        is_within = bounds <= clip
        numerator, denominator = jnp.where(is_within, 1, less), jnp.where(is_within, 1, bounds)
    else:
        larger = jnp.maximum(bounds, clip)
        numerator = jnp.where(larger > 0, margin, 0)
        # The inverse of a smaller number may overflow.
        denominator = jnp.maximum(larger, tiny)
    numerator = jnp.where(numerator < denominator * (2 * tiny), 0, numerator)
    # The division comes last: the compiler repeats anything else in the sum of every leaf.
    nothing, one = jnp.zeros_like(bounds), jnp.ones_like(bounds)
    numerator = jnp.where(contributes, numerator, nothing)
    return numerator / jnp.where(contributes, denominator, one)


def _round_down(value: float, dtype: np.dtype[Any]) -> float:
    """Rounds a clip norm to the dtype so that it never grows."""
    with np.errstate(over="ignore"):
        rounded = np.asarray(value, dtype)
    return float(np.nextafter(rounded, np.zeros((), dtype)) if float(rounded) > value else rounded)


@jax.jit
def weighted_sum(
    leaf: Float[Array, "batch *shape"],
    factors: Float[Array, " batch"],
    contributes: Bool[Array, " batch"],
) -> Float[Array, "*shape"]:
    """Sums factor x gradient over examples, in the dtype of `factors`.

    An example that does not contribute is selected away after the product, since 0 x NaN is NaN:
    the sum is, bit for bit, what it would be with a zero gradient in its place.

    A few large gradients are added one by one, which the compiler makes one pass of; others as a
    contraction at the highest precision, so that no accelerator rounds its inputs to a narrower
    format. The contraction needs a second copy of all gradients.
    """
    batch, dtype = leaf.shape[0], factors.dtype
    if 0 < batch <= few(math.prod(leaf.shape[1:])):
        weighted = [
            jnp.where(contributes[i], leaf[i].astype(dtype) * factors[i], 0) for i in range(batch)
        ]
        return functools.reduce(jnp.add, weighted)
    mask = contributes.reshape(-1, *[1] * (leaf.ndim - 1))
    selected = jnp.where(mask, leaf.astype(dtype), 0)
    factors = jnp.where(contributes, factors, 0)
    return jnp.tensordot(factors, selected, axes=1, precision=PRECISION)


def few(size: int) -> int:
    """How many gradients of so many entries are summed in one pass, without a copy of them all.

    Measured on two CPU cores: 16 gradients of a million entries take 2.4 ms, not 18; 64 of 18 000
    as long either way, for more code.
    """
    return 64 if size >= 2**15 else 8
