"""The norms of per-example gradients at any scale, and powers of two.

The bounds here and in `gram.py` hold for the arithmetic of processors, GPUs and TPUs:

| operation | assumed |
|---|---|
| addition, multiplication, fused or not | rounded to nearest once: a relative error of at most u |
| division, square root | off by 2 units in the last place: a relative 4 u (`div.full` on GPUs) |
| products of a contraction | at `PRECISION`, or of bfloat16 parts: off by `product_roundoff` |
| sums | in any order, which may differ between entries and runs |
| numbers below the normal range | kept, or treated as zero |

u is `unit_roundoff`, the largest relative error of one rounding to nearest.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..device import is_cpu
from ..device import platform as made_for_platform
from ..precision.stages import in_narrow_product


def norms(*parts: Float[Array, "batch ..."]) -> Float[Array, " batch"]:
    """The L2 norm of each example's gradient, at any scale.

    Squares of entries beyond the square root of the dtype's range overflow, or vanish. Such entries
    are squared at another scale. A gradient of at most 2^16 entries is divided by a power of two
    near its largest entry; entries whose squares vanish then are too small to count beside it.

    Args:
        *parts: one gradient per example, in the accumulate dtype, in one array or in several.

    Returns:
        One norm per example, in the same dtype.

        | gradient | norm |
        |---|---|
        | all zero, or no entries | 0 |
        | entries whose squares overflow | right, to rounding |
        | entries whose squares vanish | right, to rounding |
        | norm beyond the dtype's range | inf |
        | NaN or infinity among them | NaN or inf |
    """
    sizes, dtype = [math.prod(x.shape[1:]) for x in parts], parts[0].dtype
    if sizes == [1]:
        return jnp.abs(parts[0].reshape(-1))
    flat = [x.reshape(len(x), size) for x, size in zip(parts, sizes, strict=True)]
    if has_wide(dtype):
        with jax.enable_x64(True):
            squares = [jnp.sum(jnp.square(x.astype(jnp.float64)), axis=1) for x in flat]
            return jnp.sqrt(functools.reduce(jnp.add, squares)).astype(dtype)
    # If the compiler folds a constant gradient, it squares before it divides: an overflow.
    parts, flat = jax.lax.optimization_barrier((parts, flat))
    if sum(sizes) > 2**16:  # three sums of fewer start for longer than they run
        flat = [_of_ranges(x) for x in parts]
    found = jnp.concatenate(flat, axis=1)
    scale, inverse = power_of_two(jnp.max(jnp.abs(found), axis=1, initial=0))
    return jnp.sqrt(sum_in_blocks(jnp.square(found * inverse[:, None]))) * scale


def _of_ranges(x: Float[Array, "batch ..."]) -> Float[Array, "batch 3"]:
    """The norms of the small entries, of the large ones and of all others, which may be NaN.

    All are read once, whatever their scale (Blue, "A portable Fortran program to find the Euclidean
    norm of a vector", 1978): no square of a range overflows or vanishes at the scale of the range.
    """
    most = int(jnp.finfo(x.dtype).maxexp)
    limit, inverse = 2.0 ** (5 * most // 16), 2.0 ** (-5 * most // 8)
    is_small, is_large = jnp.abs(x) < 1 / limit, jnp.abs(x) >= limit
    # Not a known number for each range: a compiler that squared that first would have zero.
    squares = jnp.square(x * jnp.where(is_small, 1 / inverse, jnp.where(is_large, inverse, 1)))
    ranges = (is_small, inverse), (is_large, 1 / inverse), (~(is_small | is_large), 1.0)
    found = [jnp.sqrt(sum_in_blocks(jnp.where(mask, squares, 0))) * scale for mask, scale in ranges]
    return jnp.stack(found, axis=1)


def has_wide(dtype: np.dtype[Any]) -> bool:
    """Whether squares of numbers of this dtype are exact in float64, and it costs little.

    None of them overflows there, or vanishes. It costs little on CPUs alone: many GPUs compute
    float64 at 1/64 of the speed of float32.
    """
    return dtype.itemsize < 8 and is_cpu()


def sum_in_blocks(x: Float[Array, "batch ..."]) -> Float[Array, " batch"]:
    """Sums each example's entries, a block at a time, then the sums of blocks, and so on.

    Barriers keep the compiler from merging the levels into one long sum, whose error would grow
    with its length. A TPU copies matrices to flatten them: there it is better to add rows first.
    """
    if x.ndim > 2 and x.shape[-2] % 256 == 0 and not has_float64():  # whole tiles of a TPU
        rows = x.reshape(*x.shape[:-2], x.shape[-2] // 256, 256, x.shape[-1])
        x = jax.lax.optimization_barrier(jnp.sum(rows, axis=-2))
    x = x.reshape(len(x), math.prod(x.shape[1:]))
    while (entries := _block(x.shape[1])) < x.shape[1]:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % entries)))
        blocks = x.reshape(len(x), x.shape[1] // entries, entries)
        x = jax.lax.optimization_barrier(jnp.sum(blocks, axis=2))
    return jnp.sum(x, axis=1)


def _block(size: int) -> int:
    """How many of so many entries are added at once.

    More are no faster on a CPU, and fewer are slower. On a GPU each level of a sum is a kernel,
    which takes as long to start as to run.
    """
    return min(max(1, size), 64 if is_cpu() else 1024)


def norm_error(size: int, dtype: np.dtype[Any], parts: int = 1) -> float:
    """A bound on the relative error of `norms` for gradients of `size` entries.

    With several parts it holds for parts of at most that size.

    In float64 squares of float32 numbers are exact. A sum of n terms costs at most n - 1 roundings
    in whatever order. All terms are positive, so the sum of squares is off by no more than all of
    these together, and its root by half of that (Higham, "Accuracy and Stability of Numerical
    Algorithms", 2002, section 4.2). The root costs 4 roundings in float64, and one in float32;
    three more make up for products of errors, and for 1 plus this error and its product with a
    norm.

    Elsewhere a square is rounded once, and goes through a sum a level (`sum_in_blocks`). So do the
    squares of the norms of three ranges of every part. Each of the two roots costs 4; four more
    make up for products of errors, for 1 plus this error and its product with a norm, and for
    squares that vanish beside the largest.
    """
    if has_wide(np.dtype(dtype)):
        return 4 * unit_roundoff(dtype) + (size * parts + 10) / 2 * unit_roundoff(np.dtype("f8"))
    roundings = 2 + roundings_in_blocks(size * parts) + roundings_in_blocks(3 * parts)
    return (roundings / 2 + 12) * unit_roundoff(dtype)


def roundings_in_blocks(size: int) -> int:
    """How many roundings a term goes through in `sum_in_blocks` at most."""
    roundings = 0  # to add 256 rows first costs no more: 256 divides a block
    while size > 1:
        entries = _block(size)
        roundings += entries - 1
        size = -(-size // entries)
    return roundings


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """The largest relative error of one rounding to nearest."""
    return float(jnp.finfo(dtype).eps) / 2


PRECISION = jax.lax.Precision.HIGHEST
"""The precision of every contraction whose result is measured, bounded or added."""


def product_roundoff(
    dtype: np.dtype[Any], platform: str | None = None, parts: tuple[int, int] = (0, 0)
) -> float:
    """The largest relative error of one product, and its addition, in a contraction.

    | platform | a product is made of | error |
    |---|---|---|
    | CPU, GPU | the numbers as they are, no TensorFloat-32 | u |
    | TPU | six passes of bfloat16 parts | 16 u |
    | GPU, TPU | `parts` of both sides: p q exact products | 4 p q u (`gram.md`) |

    A TPU splits a float32 number into three bfloat16 parts, exactly, and leaves out three of nine
    products, which are less than u / 2 together. The other six are exact, and each costs an
    addition, which may cut off instead of rounding: 2 u each. Unknown platforms count as TPUs.

    Args:
        dtype: of the numbers and the sum.
        platform: where the contraction runs; None for that which programs are made for.
        parts: how many bfloat16 numbers each side is split into; 0 where it runs at `PRECISION`.
    """
    of_whole = 1 if has_float64(platform) else 16
    return (4 * math.prod(parts) or of_whole) * unit_roundoff(dtype)


def has_float64(platform: str | None = None) -> bool:
    """Whether the platform that programs are made for computes float32 and float64 as they are."""
    return (platform or made_for_platform()) in ("cpu", "gpu", "cuda", "rocm")


def parts_of(dtypes: Sequence[Any]) -> int:
    """How many bfloat16 numbers add up to any number of these dtypes; 0 to multiply in float32.

    Tensor cores and MXUs multiply bfloat16 numbers 15 times as fast; CPUs do not.
    """
    has_parts = not is_cpu() and all(dtype.itemsize <= 2 for dtype in dtypes)
    return has_parts * (2 if jnp.float16 in dtypes else 1)


SPLIT = 2.0**-17
"""What two bfloat16 parts of a float32 number leave of it: 2 x 8 bits, rounded to nearest."""


def in_parts(x: Float[Array, "*n"], parts: int) -> list[Array]:
    """Splits float32 numbers into bfloat16 numbers that add up to them: exactly, or to `SPLIT`.

    A compiler may leave out a cast to bfloat16 and back, but not `reduce_precision`. A cast that it
    leaves out of the last part loses nothing.
    """
    if parts == 1:
        return [x.astype(jnp.bfloat16)]
    part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return [part.astype(jnp.bfloat16), *in_parts(x - part, parts - 1)]


def contracted(pattern: str, x: Array, y: Array, parts: tuple[int, int]) -> Float[Array, "..."]:
    """An einsum of float32 or float64 arrays: at `PRECISION`, or of bfloat16 parts, in float32."""
    if 0 in parts:
        return jnp.einsum(pattern, x, y, precision=PRECISION)
    with in_narrow_product():
        pairs = itertools.product(in_parts(x, parts[0]), in_parts(y, parts[1]))
        terms = [jnp.einsum(pattern, *pair, preferred_element_type=jnp.float32) for pair in pairs]
    return functools.reduce(jnp.add, reversed(terms))  # small ones first


def exponent_of(size: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """The binary exponent of a positive normal number: the floor of its logarithm.

    For smaller numbers and zero it is one below that of the smallest normal number; for numbers
    that are not finite it is any number.
    """
    # The compiler would square a known scale together with its operand, which overflows.
    size = jax.lax.optimization_barrier(size)
    # The bits of a positive number begin with its exponent.
    info = jnp.finfo(size.dtype)
    bits = jax.lax.bitcast_convert_type(size, f"int{info.bits}")
    return (bits >> info.nmant).astype(jnp.int32) - _bias(size.dtype)


def power(exponent: Int[Array, "*n"], dtype: np.dtype[Any]) -> Float[Array, "*n"]:
    """Two to an exponent; zero if that is no normal number, and at most the largest number."""
    # The bits of a power of two end with its exponent, and those of zero are zero.
    info, bias = jnp.finfo(dtype), _bias(dtype)
    bits = (jnp.clip(exponent, -bias, bias) + bias).astype(f"int{info.bits}")
    return jax.lax.bitcast_convert_type(bits << info.nmant, dtype)


def halves(exponent: Int[Array, "*n"], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Two powers whose product is two to an exponent, which may be beyond the dtype's range.

    Both are on the same side of 1: a number is multiplied by one, then by the other, and overflows
    or vanishes on the way only if it does in the end.
    """
    half = exponent >> 1
    return power(half, dtype), power(exponent - half, dtype)


def without_subnormal(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Numbers, with zero for those below the normal range, which may have few digits."""
    return jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).tiny, 0, x)


def power_of_two(size: Float[Array, "*n"]) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """The power of two at or below a positive number, and its inverse, both normal numbers."""
    most = _bias(size.dtype) - 1
    exponent = jnp.clip(exponent_of(size), -most, most)
    return power(exponent, size.dtype), power(-exponent, size.dtype)


def _bias(dtype: Any) -> int:
    return int(jnp.finfo(dtype).maxexp) - 1
