"""Which uses of one parameter overlap, and how: what cross terms between them need to know.

|sum_i G_i|^2 = sum_ij <G_i, G_j>. Two uses that bring the same part of a parameter into the form of
a matrix in the same way, or one the other way round (an embedding and the output that is tied to
it), have inner products that never form a gradient; uses of separate parts have none at all.
"""

import functools
import math
from typing import NamedTuple

from .layouts import Layout
from .uses import ParamUse


class Member(NamedTuple):
    """A use among those that it overlaps with.

    Attributes:
        use: which use it is.
        transposed: whether its rows are the columns of the first.
        sign: 1, or -1 where it takes the parameter's negative.
    """

    use: int
    transposed: bool
    sign: int


@functools.lru_cache(maxsize=1024)
def overlaps(
    uses: tuple[ParamUse, ...], shape: tuple[int, ...]
) -> tuple[tuple[Member, ...], ...] | None:
    """Sorts uses: those of the same part of a parameter go together, others share no entry.

    Args:
        uses: all uses of a parameter.
        shape: of the parameter.

    Returns:
        The uses, sorted; None where the norm of their sum cannot be had without the gradient: some
        is no matrix, stands for entries several times, or overlaps with another in no known way.
    """
    sets: list[tuple[Layout, list[Member]]] = []
    for index, use in enumerate(uses):
        layout = use.matrices
        if layout is None or not layout.is_isometric:
            return None
        for first, members in sets:
            transposed = _is_transposed(first, layout)
            if transposed is not None:
                members.append(Member(index, transposed, layout.sign))
                break
            if not _apart(first, layout, shape):
                return None
        else:
            sets.append((layout, [Member(index, False, layout.sign)]))
    return tuple(tuple(members) for _, members in sets) or None


def _is_transposed(first: Layout, other: Layout) -> bool | None:
    """Whether two uses are of the same matrices, upright or transposed; None if they are not."""
    groups, rows, columns = other.axes
    if (first.offset, first.axes[0]) != (other.offset, groups):
        return None
    if first.axes[1:] == (rows, columns):
        return False
    return True if first.axes[1:] == (columns, rows) else None


def _apart(one: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    """Whether two uses are of slices of the parameter that lie apart along one of its axes.

    Entries whose places differ modulo the stride of an axis are different entries.
    """
    for modulus in {math.prod(shape[axis:]) for axis in range(len(shape) + 1)}:
        (low, high), (other_low, other_high) = (
            _remainders(layout, modulus) for layout in (one, other)
        )
        inside = min(low, other_low) >= 0 and max(high, other_high) < modulus
        if inside and (high < other_low or other_high < low):
            return True
    return False


def _remainders(layout: Layout, modulus: int) -> tuple[int, int]:
    """The range that the places of a use's entries span, those of whole moduli left out.

    It counts if it lies within one modulus: then remainders are what it says.
    """
    low = high = layout.offset % modulus
    for size, stride in (digit for axis in layout.axes for digit in axis):
        if stride % modulus == 0:
            continue
        if modulus % stride == 0 and size % (modulus // abs(stride)) == 0:
            size = modulus // abs(stride)
        reach = (size - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high
