"""Sums as whole numbers of cells of a public grid, and back: float bits, and integers alone."""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .integer_gaussian import FRACTION_BITS

GRID_BITS = 5
"""The grid is 2^-5 to 2^-6 of the standard deviation."""

_HALF, _UNITS = np.int64(2 ** (FRACTION_BITS - 1)), np.int64(FRACTION_BITS)


def grid_of(stddev: float) -> float:
    """The distance between two values that the noisy sum can take: a power of two."""
    return 2.0 ** _exponent_of(stddev)


def cells_of(stddev: float) -> Fraction:
    """How many cells a standard deviation has: 32 to 64."""
    return Fraction(stddev) / Fraction(2) ** _exponent_of(stddev)


def _exponent_of(stddev: float) -> int:
    return math.frexp(stddev)[1] - 1 - GRID_BITS


def in_cells(x: Float[Array, "*shape"], stddev: float) -> tuple[Any, Any]:
    """A float32 or float64 in cells: a whole number, and a fraction in units of 2^-50; int64.

    Both have the sign of `x`. What is below a unit is cut off. From 2^46 cells on a float32, and
    from 2^62 on a float64, the numbers are those of something smaller: see `on_grid`.
    """
    mantissa, power, is_negative, _ = _parts_of(x, stddev)
    zero, most = np.int32(0), np.int32(FRACTION_BITS)
    up, down = jnp.maximum(power, zero), jnp.clip(-power, zero, np.int32(63))
    whole = _shifted(mantissa, up, down)
    left = jnp.clip(most + power, zero, most)
    right = jnp.clip(-most - power, zero, np.int32(63))
    fraction = _shifted(mantissa, left, right) & np.int64(2**FRACTION_BITS - 1)
    return jnp.where(is_negative, -whole, whole), jnp.where(is_negative, -fraction, fraction)


def rounded(units: Any) -> Any:
    """The nearest whole number of cells, the upper one of two."""
    return (units + _HALF) >> _UNITS


def on_grid(cells: Any, x: Float[Array, "*shape"], stddev: float) -> Float[Array, "*shape"]:
    """A whole number of cells, as the nearest number of the dtype of `x`.

    Where the sum `x` was not finite it is returned, and where it is a float32 of at least 2^46
    cells: it is the nearest number then, too, because noise is below 2^16 cells.
    """
    digits = np.int64(24 if x.dtype.itemsize == 4 else 32)
    high = (cells >> digits).astype(jnp.int32).astype(x.dtype)
    low = (cells & ((np.int64(1) << digits) - np.int64(1))).astype(jnp.uint32).astype(x.dtype)
    # Exact products, and one rounding.
    found = (high * x.dtype.type(2.0**digits) + low) * x.dtype.type(grid_of(stddev))
    return jnp.where(_parts_of(x, stddev)[3], x, found)


def _parts_of(x: Float[Array, "*shape"], stddev: float) -> tuple[Any, Any, Any, Any]:
    """Mantissa, power and sign, such that x is mantissa 2^power cells; and whether x is kept."""
    info = jnp.finfo(x.dtype)
    integer, digits = jnp.dtype(f"uint{info.bits}"), info.nmant
    bits = jax.lax.bitcast_convert_type(x, integer)
    field = ((bits >> integer.type(digits)) & integer.type(2**info.nexp - 1)).astype(jnp.int32)
    mantissa = (bits & integer.type(2**digits - 1)).astype(jnp.int64)
    mantissa = mantissa | jnp.where(field == 0, np.int64(0), np.int64(2**digits))
    power = jnp.maximum(field, np.int32(1)) + np.int32(
        int(info.minexp) - 1 - digits - _exponent_of(stddev)
    )
    most = np.int32(22 if digits == 23 else 9)
    is_beyond, is_last = power > most, field == np.int32(2**info.nexp - 1)
    mantissa = jnp.where(is_beyond, np.int64(2 ** (digits + 1) - 1), mantissa)
    is_kept = is_beyond | is_last if digits == 23 else is_last
    return mantissa, jnp.minimum(power, most), bits >> integer.type(info.bits - 1) == 1, is_kept


def _shifted(x: Any, left: Any, right: Any) -> Any:
    return (x << left.astype(jnp.int64)) >> right.astype(jnp.int64)
