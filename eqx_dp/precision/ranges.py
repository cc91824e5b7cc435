"""Refuses what a dtype cannot do: hold some sums or some noise, decompose a matrix."""

import math
from typing import Any, cast

import jax.numpy as jnp

from ..programs import equations, named, own_line

_DECOMPOSITIONS = named(
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd tridiagonal"
)


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


def check_decompositions(program: Any) -> None:
    """Refuses decompositions of matrices in 8 or 16 bits, which JAX cannot compile on all devices.

    Raises:
        TypeError: the program of a loss holds one; the line and its function are named.
    """
    walked = [*equations(program)]
    for index, equation in enumerate(walked):
        name, operands = equation.primitive.name, cast("list[Any]", equation.invars)
        if name in _DECOMPOSITIONS and operands[0].aval.dtype.itemsize < 4:
            # JAX's own functions keep no line of their caller, whose equation comes before theirs.
            lines = filter(None, map(own_line, reversed(walked[: index + 1])))
            found = f"'{name}' of {operands[0].aval.dtype}, at {next(lines, '')}"
            raise TypeError(f"JAX cannot compile {found}")
