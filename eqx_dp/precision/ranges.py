"""Refuses numbers whose sums, or whose noise, a dtype cannot hold."""

import math
from typing import Any

import jax.numpy as jnp


def check_sum_range(
    bound: float, divisor: float, dtype: Any, slots: int, entries: int, steps: int
) -> None:
    """Refuses a sum that could leave the range of normal numbers before there is noise.

    Guarantee: no sum overflows, and what a machine loses that takes numbers below the normal range
        for zero is at most 6 u of the bound, u the unit roundoff: `finite_precision.md` of privacy
        has the proof. A dtype narrower than float32, whose policy says that it is unsafe, has the
        first half of it.

    Args:
        bound: the L2 norm that one example adds at most to the sum.
        divisor: what the sum is divided by.
        dtype: the accumulate dtype.
        slots: the length of the batch.
        entries: of the sum.
        steps: how many vectors of an example factored parameters meet, all together.

    Raises:
        ValueError: bound and divisor do not fit the others.
    """
    limits = jnp.finfo(dtype)
    least = 2 * math.sqrt(entries) * float(limits.tiny / limits.eps) * (limits.nmant >= 23)
    low = max(slots / 2 + 2400 * steps, divisor) * least
    high = min(1, divisor) * float(limits.max) / 4 / max(slots, 1)
    if 0 < bound < math.inf and not low <= bound <= high:
        raise ValueError(
            f"one example adds at most {bound:.3g} to the sum; {low:.2g} to {high:.2g} is allowed "
            f"for {slots} examples, {entries} entries in {dtype} and normalize_by={divisor:g}. The "
            "sum could overflow, or lose entries, before the noise. Change one of these numbers."
        )


def check_noise_range(stddev: float, dtype: Any) -> None:
    """Refuses a standard deviation at the ends of the range of its dtype: float32, or wider.

    The longest noise, of 19 standard deviations, is within the range. Numbers below it, which a
    machine may take for zero, are at most 2^-22 standard deviations in all 2^32 entries of a leaf.
    """
    limits = jnp.finfo(dtype)
    least = float(limits.smallest_normal) * 2.0**39
    if not least <= stddev <= float(limits.max) / 32:
        raise ValueError(
            f"stddev {stddev} is beyond the normal range of the noise dtype {dtype} "
            f"({least:.2g} to {float(limits.max) / 32:.2g}): noise, or the sum beside it, would be "
            "rounded to zero or infinity. Rescale the gradients, or take a wider noise dtype."
        )
