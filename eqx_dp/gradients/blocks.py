"""Sums over examples and over microbatches, so that rounding hardly depends on their number.

A contraction adds up at most `BLOCK` examples; its sums are added here. So are the sums of
microbatches: when one example leaves a batch, others may change slots, and hardly anything else may
move. `Prepared.drift` bounds what rounding may still move. `privacy/finite_precision.md` has the
proof.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .norms import has_wide, unit_roundoff

BLOCK = 128
"""Examples that one contraction adds up: 0.4 % of a clip norm at most in float32. Smaller blocks
pass more often over sums of the size of the parameters."""

# The largest share of a clip norm that plain additions may move a sum by.
_PLAIN = 2.5e-4

Total: TypeAlias = tuple[Array, ...]
"""A sum: one float, of the dtype of its terms or of float64; or two, where there is no float64."""

Operands = TypeVar("Operands")


def in_blocks(
    function: Callable[[Operands], Array],
    operands: Operands,
    dtype: np.dtype[Any],
    block: int = BLOCK,
) -> Array:
    """The sum over a batch, of those of its blocks.

    Args:
        function: from a block of the operands to its sum.
        operands: arrays with examples in front.
        dtype: of the sum.
        block: the examples of a block, at most `BLOCK`.
    """
    batch = jax.tree.leaves(operands)[0].shape[0]
    if batch <= block:
        return function(operands)

    def of_block(start: Any, length: int) -> Array:
        its = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length), operands)
        return function(its)

    first, count = batch % block or block, -(-batch // block)
    one = of_block(0, first)
    total = added(nothing(one, count, batch), one)
    # In a loop: unrolled, all sums are in memory at once, which takes half as long again.
    return jax.lax.fori_loop(
        1, count, lambda i, total: added(total, of_block(first + (i - 1) * block, block)), total
    )[0].astype(dtype)


def added_roundoff(terms: int, num_examples: int, dtype: Any) -> float:
    """How far rounding moves a sum of terms at most, in units of what all examples add at most.

    Args:
        terms: their number.
        num_examples: how many examples they are sums over, together.
        dtype: of the terms, and of the sum.
    """
    u = unit_roundoff(dtype)
    return (terms - 1) * u if _is_plain(terms, num_examples, dtype) else u + 3 * terms * u**2


def _is_plain(terms: int, num_examples: int, dtype: Any) -> bool:
    """Whether so many terms are added in their own dtype: that costs little of the clip norm."""
    return terms == 1 or 2 * terms * num_examples * unit_roundoff(dtype) <= _PLAIN


def nothing(zero: Array, terms: int, num_examples: int) -> Total:
    """An empty sum, in which so many terms will be added that are sums over so many examples."""
    zero = jnp.zeros_like(zero)
    if _is_plain(terms, num_examples, zero.dtype):
        return (zero,)
    if not has_wide(zero.dtype):
        return zero, zero
    with jax.enable_x64(True):
        return (zero.astype(jnp.float64),)


def added(so_far: Total, x: Array, terms: int = 2) -> Total:
    """A sum and one more number; in two floats by TwoSum (Knuth), then FastTwoSum (Dekker).

    Of two floats the first is the whole sum, rounded once.
    """
    if terms == 1:
        return (x,)
    if len(so_far) == 1:
        with jax.enable_x64(True):
            return (so_far[0] + x.astype(so_far[0].dtype),)
    high, low = so_far
    total = high + x
    of_x = total - high
    low = low + ((high - (total - of_x)) + (x - of_x))
    high = total + low
    return high, low - (high - total)
