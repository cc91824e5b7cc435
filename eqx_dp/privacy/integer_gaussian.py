"""Pairs of normal numbers in fixed point, from the words of a cipher, by integers alone.

Box and Muller (1958): with radius sqrt(-2 log p) and a uniform angle, p uniform, the coordinates of
a point are two independent normal numbers. Numbers are whole numbers of 64 bits, and a product is
the upper half of the exact one, so all bits are the same on every machine. `finite_precision.md`
bounds the error of each function.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Fixed: TypeAlias = Any
"""An array of uint64: a number in [0, 1) in units of 2^-64, unless something else is said."""

WORDS = 13
"""How many words of the cipher a pair takes."""

FRACTION_BITS = 50
"""Noise is a whole number of units of 2^-50 cells."""

_PIECES = 16
_PI = Fraction("3.14159265358979323846264338327950288419716939937511")


def _log(number: Fraction) -> Fraction:
    with localcontext(prec=50):
        return Fraction((Decimal(number.numerator) / number.denominator).ln())


def _fixed(numbers: Sequence[Fraction], bits: int) -> list[Any]:
    """The nearest whole numbers of units of 2^-bits."""
    return [np.uint64(round(number * 2**bits)) for number in numbers]


# For each piece j of an octave of p: 16 / (32 - j), and log(32 / (32 - j)) in units of 2^-56,
# where j = 16, for log 2, is a whole octave.
_BORDERS = [Fraction(2 * _PIECES, 2 * _PIECES - j) for j in range(_PIECES)]
_SLOPES = _fixed([border / 2 for border in _BORDERS], 64)
_LOGS = _fixed([_log(border) for border in (*_BORDERS, Fraction(2))], 56)
# Taylor series: some terms in units of 2^-64, the others in larger units, for short products.
_LOG_TERMS = [Fraction(1, (i + 1) * _PIECES**i) for i in range(1, 12)]
_COS_TERMS = [(_PI / 4) ** i / math.factorial(i) for i in range(2, 18, 2)]
_SIN_TERMS = [(_PI / 4) ** i / math.factorial(i) for i in range(1, 17, 2)]
_LOG = _fixed(_LOG_TERMS[:4], 64) + _fixed(_LOG_TERMS[4:], 64 + 21)
_COS = _fixed(_COS_TERMS[:4], 64) + _fixed(_COS_TERMS[4:], 64 + 25)
_SIN = _fixed(_SIN_TERMS[:4], 64) + _fixed(_SIN_TERMS[4:], 64 + 21)
# 1 / sqrt(x) within 0.8 % for x from 1/4 to 1, in units of 2^-30 and with falling signs.
_ROOT_TERMS = _fixed([*map(Fraction, ("3.1123", "5.9108", "6.2299", "2.4384"))], 30)
_ROOT_OF_2 = Fraction("1.41421356237309504880168872420969807856967187537694")
_32 = np.uint64(32)


def pair_of_normals(words: Sequence[Any], cells: Fraction) -> tuple[Any, Any]:
    """Two independent normal numbers, as int64 in units of 2^-50 cells.

    Args:
        words: 13 words of the cipher, uint32.
        cells: how many cells a standard deviation has, at most 64.
    """
    angle, fraction = _joined(*words[:2]), _joined(*words[2:4])
    choices, zeros = words[4], leading_zeros(words[5:WORDS])
    radius = radius_of(zeros, choices >> 28, fraction, cells)
    short = product(radius, sine(angle))
    long = radius - product(radius, versine(angle))
    is_swapped = _is_set(choices, 0)
    first, second = (jnp.where(is_swapped, *pair) for pair in ((short, long), (long, short)))
    return _signed(first, _is_set(choices, 1)), _signed(second, _is_set(choices, 2))


def leading_zeros(words: Sequence[Any]) -> Any:
    """How many zero bits come before the first that is 1; uint32."""
    found = jax.lax.clz(words[-1])
    for word in reversed(words[:-1]):
        found = jnp.where(word == 0, found + np.uint32(32), jax.lax.clz(word))
    return found


def radius_of(zeros: Any, piece: Any, fraction: Fixed, cells: Fraction) -> Fixed:
    """`cells` sqrt(-2 log p) in units of 2^-50, with p = 2^-zeros (1 - (piece + fraction) / 32).

    Args:
        zeros: at most 256; uint32.
        piece: below 16; uint32.
        fraction: within the piece.
        cells: at most 64.
    """
    base, tail = minus_log(zeros, piece, fraction)
    # Where p is near 1 the logarithm is small, and its units are smaller, too.
    is_small = base == 0
    number = jnp.where(is_small, tail, base + (tail >> np.uint64(8))) | np.uint64(1)
    shift = jax.lax.clz(number) & np.uint64(62)
    scale = _fixed([_ROOT_OF_2 * cells / 128], 64)[0]
    scaled = product(square_root(number << shift), scale)
    return scaled >> (jnp.where(is_small, np.uint64(7), np.uint64(3)) + (shift >> np.uint64(1)))


def minus_log(zeros: Any, piece: Any, fraction: Fixed) -> tuple[Fixed, Fixed]:
    """-log(p) as two numbers to add, the first in units of 2^-56; p as for `radius_of`.

    With y = fraction / (32 - piece) it is zeros log 2 - log(1 - piece / 32) - log(1 - y).
    """
    numbers = _constants([*_SLOPES, *_LOGS, *_LOG])
    y = product(fraction, _selected(numbers[:_PIECES], piece))  # 16 times as large
    series = _series(numbers[2 * _PIECES + 1 :], 21, y, jnp.add)
    of_octaves = zeros.astype(jnp.uint64) * numbers[2 * _PIECES]
    base = of_octaves + _selected(numbers[_PIECES : 2 * _PIECES], piece)
    return base, (y + product(product(series, y), y)) >> np.uint64(4)


def square_root(x: Fixed) -> Fixed:
    """The square root of a number that is at least 1/4."""
    *terms, y = _constants(_ROOT_TERMS)
    high = x >> _32
    for term in reversed(terms):
        y = term - (high * y >> _32)
    y = y << np.uint64(1)  # 1 / sqrt(x), in units of 2^-31
    for _ in range(2):  # Newton's method: from below
        y = y * (np.uint64(3 << 30) - (high * (y * y >> _32) >> _32)) >> np.uint64(31)
    root = (high * y >> np.uint64(31)) - np.uint64(8)  # too small
    rest = x - root * root
    return (root << _32) + ((rest >> np.uint64(8)) * y >> np.uint64(24))


def sine(u: Fixed) -> Fixed:
    """sin(pi/4 u)."""
    x = product(u, u)
    return product(_series(_constants(_SIN), 21, x, jnp.subtract), u)


def versine(u: Fixed) -> Fixed:
    """1 - cos(pi/4 u)."""
    x = product(u, u)
    return product(_series(_constants(_COS), 25, x, jnp.subtract), x)


def _series(terms: list[Any], bits: int, x: Fixed, plus: Callable[[Any, Any], Any]) -> Fixed:
    """A polynomial; from the fifth on terms are in units of 2^-(64 + bits), and products short.

    Terms fall so fast that nothing is below 0 or above 1, also where `plus` subtracts.
    """
    found = terms[-1]
    for term in reversed(terms[4:-1]):
        found = plus(term, (found >> _32) * (x >> _32))
    found = found >> np.uint64(bits)
    for term in reversed(terms[:4]):
        found = plus(term, product(found, x))
    return found


def product(a: Fixed, b: Fixed) -> Fixed:
    """The product, at most 3 units too small."""
    low = np.uint64(2**32 - 1)
    a_high, b_high = a >> _32, b >> _32
    mixed = (a_high * (b & low) >> _32) + ((a & low) * b_high >> _32)
    return a_high * b_high + mixed


def held(x: Any) -> Any:
    """`x`; on a GPU an array in memory, between the kernels that make it and that read it.

    Kernels have at most 96 operands there, and XLA counts every constant. It cuts what has more
    into several kernels, with as much as 40 bytes an entry between them.
    """
    hold = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(x, cuda=hold, rocm=hold, default=lambda x: x)


def _constants(numbers: Sequence[Any]) -> list[Any]:
    return [*held(jnp.array(numbers))]


def _joined(high: Any, low: Any) -> Fixed:
    return (high.astype(jnp.uint64) << _32) | low.astype(jnp.uint64)


def _selected(table: Sequence[Any], index: Any) -> Fixed:
    """The entry of a table, chosen by the bits of the index: no table in memory is read."""
    found, bit = list(table), 0
    while len(found) > 1:
        is_odd = _is_set(index, bit)
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [jnp.where(is_odd, odd, even) for even, odd in pairs]
        bit += 1
    return found[0]


def _is_set(word: Any, bit: int) -> Any:
    return (word >> np.uint32(bit)) & np.uint32(1) == 1


def _signed(size: Fixed, is_negative: Any) -> Any:
    number = size.astype(jnp.int64)
    return jnp.where(is_negative, -number, number)
