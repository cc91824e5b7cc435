"""Which uses of one parameter overlap, and how: what cross terms between them need to know.

|sum_i G_i|^2 = sum_ij <G_i, G_j>. Two uses that bring the same part of a parameter into the form of
a matrix in the same way, or one the other way round (an embedding and the output that is tied to
it), have inner products that never form a gradient; uses of separate parts have none at all.

Where each entry of a use's matrix stands in the parameter is worked out from the view symbolically,
as NumPy keeps track of strides: no array of the parameter's size is made.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from .views import shape_of

Digit: TypeAlias = tuple[int, int]
"""How often, and how far apart: one axis of a strided array."""


class Layout(NamedTuple):
    """An array whose entries are those of a flat one, `offset` + sum of index x stride.

    Attributes:
        axes: size and stride of every axis.
        offset: where the first entry stands.
        sign: 1, or -1 for the entries' negatives.
    """

    axes: tuple[Digit, ...]
    offset: int = 0
    sign: int = 1


class Placement(NamedTuple):
    """Where the matrices of a use stand in the parameter.

    Attributes:
        group, rows, columns: the axes that each dimension of (group, in, out) runs over, outermost
            first, none of length one and none that could be one with the next.
        offset: where the first entry stands.
        sign: 1, or -1 for a use of the parameter's negative.
    """

    group: tuple[Digit, ...]
    rows: tuple[Digit, ...]
    columns: tuple[Digit, ...]
    offset: int
    sign: int


class Member(NamedTuple):
    """A use among those that it overlaps with.

    Attributes:
        use: which use it is.
        turned: whether its rows are the columns of the first.
        sign: 1, or -1 where it takes the parameter's negative.
    """

    use: int
    turned: bool
    sign: int


def overlaps(
    placements: list[Placement | None], shape: tuple[int, ...]
) -> list[list[Member]] | None:
    """Sorts uses: those of the same part of a parameter go together, others share no entry.

    Args:
        placements: of every use; None where it is not known.
        shape: of the parameter.

    Returns:
        The uses, sorted; None where some overlap in another way.
    """
    sets: list[tuple[Placement, list[Member]]] = []
    for index, placement in enumerate(placements):
        if placement is None:
            return None
        for first, members in sets:
            turned = _is_turned(first, placement)
            if turned is not None:
                members.append(Member(index, turned, placement.sign))
                break
            if not _apart(first, placement, shape):
                return None
        else:
            sets.append((placement, [Member(index, False, placement.sign)]))
    return [members for _, members in sets]


def _is_turned(first: Placement, other: Placement) -> bool | None:
    """Whether two uses are of the same matrices, upright or turned; None if they are not."""
    if (first.offset, first.group) != (other.offset, other.group):
        return None
    if (first.rows, first.columns) == (other.rows, other.columns):
        return False
    return True if (first.rows, first.columns) == (other.columns, other.rows) else None


def _apart(one: Placement, other: Placement, shape: tuple[int, ...]) -> bool:
    """Whether two uses are of slices of the parameter that lie apart along one of its axes.

    Entries whose places differ modulo the stride of an axis are different entries.
    """
    for modulus in {math.prod(shape[axis:]) for axis in range(len(shape) + 1)}:
        (low, high), (other_low, other_high) = (
            _remainders(placement, modulus) for placement in (one, other)
        )
        inside = min(low, other_low) >= 0 and max(high, other_high) < modulus
        if inside and (high < other_low or other_high < low):
            return True
    return False


def _remainders(placement: Placement, modulus: int) -> tuple[int, int]:
    """The range that the places of a use's entries span, those of whole moduli left out.

    It counts if it lies within one modulus: then remainders are what it says.
    """
    low = high = placement.offset % modulus
    for size, stride in (*placement.group, *placement.rows, *placement.columns):
        if stride % modulus == 0:
            continue
        if modulus % stride == 0 and size % (modulus // abs(stride)) == 0:
            size = modulus // abs(stride)
        reach = (size - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high


def place(
    image: Callable[[Array], Array],
    shape: tuple[int, ...],
    from_matrices: Callable[[Array], Array],
    matrices: tuple[int, int, int],
) -> Placement | None:
    """Finds where the matrices of a use stand in the parameter; None where that is not regular.

    Args:
        image: makes the use's operand from the parameter.
        shape: of the parameter.
        from_matrices: makes an array like the operand from matrices.
        matrices: shape of the latter: groups, rows, columns.
    """
    in_parameter, in_matrices = _layout(image, shape), _layout(from_matrices, matrices)
    if in_parameter is None or in_matrices is None:
        return None
    if in_matrices.offset != 0 or in_matrices.sign != 1:
        return None
    # For every axis of the operand: its size, its stride in the matrices, and in the parameter.
    axes = [
        (size, stride, there)
        for (size, stride), (_, there) in zip(in_matrices.axes, in_parameter.axes, strict=True)
        if size != 1
    ]
    columns, entries = matrices[2], matrices[1] * matrices[2]
    for boundary in (columns, entries):
        if any(boundary % axis[1] != 0 for axis in axes if axis[1] < boundary):
            return None
        axes = [part for axis in axes for part in _cut(axis, boundary)]
    axes.sort(key=lambda axis: -axis[1])

    def between(low: int, high: int) -> tuple[Digit, ...]:
        return _merged([(size, there) for size, stride, there in axes if low <= stride < high])

    return Placement(
        between(entries, math.prod(matrices)),
        between(columns, entries),
        between(1, columns),
        in_parameter.offset,
        in_parameter.sign,
    )


def _cut(axis: tuple[int, int, int], boundary: int) -> list[tuple[int, int, int]]:
    """Cuts an axis in two where it reaches over the boundary between dimensions."""
    size, stride, there = axis
    if not stride < boundary < size * stride:
        return [axis]
    inner = boundary // stride  # divides the size, as what was reshaped has whole rows
    return [(size // inner, boundary, there * inner), (inner, stride, there)]


def _merged(axes: list[Digit] | tuple[Digit, ...]) -> tuple[Digit, ...]:
    """Leaves out axes of length one, and makes one of neighbours that are one."""
    merged: list[Digit] = []
    for size, stride in axes:
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def _layout(function: Callable[[Array], Array], shape: tuple[int, ...]) -> Layout | None:
    """The layout of what a rearrangement makes of an array; None if it is not regular."""
    traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    given = Layout(tuple(zip(shape, strides, strict=True)))
    results = _through(traced.jaxpr, [given])
    return results[0] if results else None


def _through(jaxpr: jex_core.Jaxpr, inputs: list[Layout]) -> list[Layout] | None:
    """The layouts of a jaxpr's results."""
    layouts: dict[Any, Layout] = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        read = [layouts.get(v) for v in equation.invars if not isinstance(v, jex_core.Literal)]
        if len(read) != 1 or read[0] is None:
            return None
        if equation.primitive.name in ("jit", "pjit"):
            results = _through(equation.params["jaxpr"].jaxpr, [read[0]])
        else:
            rule = _RULES.get(equation.primitive.name)
            results = None if rule is None else rule(read[0], equation)
        if results is None:
            return None
        layouts.update(zip(equation.outvars, results, strict=True))
    return [layouts[v] for v in jaxpr.outvars]


def _reshaped(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout] | None:
    """Axes may be cut, and joined where they are one; the order of entries stays."""
    shape = shape_of(equation.outvars[0])
    if math.prod(shape) != math.prod(size for size, _ in layout.axes):
        return None
    left = list(_merged(layout.axes))
    axes: list[Digit] = []
    for size in reversed(shape):
        if size == 1:
            axes.append((1, 0))
            continue
        have, stride = left.pop()
        if have % size != 0:
            return None
        axes.append((size, stride))
        if have != size:
            left.append((have // size, stride * size))
    return [layout._replace(axes=tuple(reversed(axes)))]


def _transposed(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout]:
    order = equation.params["permutation"]
    return [layout._replace(axes=tuple(layout.axes[axis] for axis in order))]


def _reversed(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout]:
    axes, offset = list(layout.axes), layout.offset
    for axis in equation.params["dimensions"]:
        size, stride = axes[axis]
        axes[axis], offset = (size, -stride), offset + (size - 1) * stride
    return [Layout(tuple(axes), offset, layout.sign)]


def _sliced(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout]:
    starts = equation.params["start_indices"]
    steps = equation.params["strides"] or [1] * len(starts)
    shape = shape_of(equation.outvars[0])
    strides = [stride for _, stride in layout.axes]
    axes = tuple((n, d * step) for n, d, step in zip(shape, strides, steps, strict=True))
    offset = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return [Layout(axes, layout.offset + offset, layout.sign)]


def _split(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout]:
    axis, sizes = equation.params["axis"], [int(size) for size in equation.params["sizes"]]
    _, stride = layout.axes[axis]
    starts = itertools.accumulate(sizes, initial=0)
    return [
        Layout(
            (*layout.axes[:axis], (size, stride), *layout.axes[axis + 1 :]),
            layout.offset + start * stride,
            layout.sign,
        )
        for size, start in zip(sizes, starts, strict=False)
    ]


_Rule: TypeAlias = Callable[[Layout, jex_core.JaxprEqn], list[Layout] | None]

_RULES: dict[str, _Rule] = {
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "broadcast_in_dim": _reshaped,
    "transpose": _transposed,
    "rev": _reversed,
    "slice": _sliced,
    "split": _split,
    "neg": lambda layout, _: [layout._replace(sign=-layout.sign)],
    "copy": lambda layout, _: [layout],
    "copy_p": lambda layout, _: [layout],
}
