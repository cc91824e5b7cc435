"""Layouts: where each entry of a rearranged parameter stands in the parameter.

A parameter reaches the equations that use it reshaped, transposed, sliced, reversed, broadcast.
What became of it is kept as data, in the way in which NumPy keeps strides. The way back of a
gradient, and which uses overlap, follow from it by arithmetic: nothing is traced.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core import primitives
from jaxtyping import Array

Digit: TypeAlias = tuple[int, int]
"""How many entries, and how far apart they stand in the parameter, which is taken as flat."""

Axis: TypeAlias = tuple[Digit, ...]
"""The digits that the index along an axis is made of, outermost first; none for length one."""


class Layout(NamedTuple):
    """An array whose entries are those of a flat one at `offset` + sum of index x stride.

    Attributes:
        axes: of every axis its digits.
        offset: where the first entry stands.
        sign: 1, or -1 for the entries' negatives.
    """

    axes: tuple[Axis, ...]
    offset: int = 0
    sign: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of every axis."""
        return tuple(math.prod(size for size, _ in axis) for axis in self.axes)

    @property
    def is_isometric(self) -> bool:
        """Whether no entry stands for several: a gradient keeps its norm on the way back."""
        return all(stride != 0 for axis in self.axes for _, stride in axis)

    @property
    def outputs_first(self) -> "Layout":
        """Of matrices `(group, in, out)`: the layout of `(group, out, in)`."""
        groups, rows, columns = self.axes
        return self._replace(axes=(groups, columns, rows))

    def without_repeats(self, over: int) -> tuple["Layout", "Layout"]:
        """This layout in two: of an array that repeats nothing, and that of this array in it.

        Args:
            over: how many of the first axes are beside it: the latter does not know them, and in
                the former they are as they are here.
        """
        outer, axes = self.axes[:over], self.axes[over:]
        once = tuple(tuple(digit for digit in axis if digit[1] != 0) for axis in axes)
        lengths = [n for axis in once for n, _ in axis]
        strides = iter([math.prod(lengths[i + 1 :]) for i in range(len(lengths))])
        inner = tuple(
            tuple((n, 0 if stride == 0 else next(strides)) for n, stride in axis) for axis in axes
        )
        return self._replace(axes=(*outer, *once)), Layout(inner)

    def is_regular(self, size: int) -> bool:
        """Whether each digit runs along an axis of its own in a parameter of so many entries."""
        return all(
            outer % inner == 0 and start + n <= outer // inner
            for n, start, inner, outer in self._radix(size)
        )

    def pulled_back(self, gradient: Array, shape: tuple[int, ...]) -> Array:
        """The gradient with respect to the parameter, from the one with respect to this array.

        Args:
            gradient: of this array's shape.
            shape: of the parameter; the layout is regular in it.
        """
        digits = self._digits
        gradient = gradient.reshape([n for n, _ in digits])
        repeats = tuple(i for i, (_, stride) in enumerate(digits) if stride == 0)
        backwards = [i for i, (_, stride) in enumerate(digits) if stride < 0]
        if backwards:
            gradient = jax.lax.rev(gradient, backwards)
        if self.sign < 0:
            gradient = -gradient
        order = sorted(set(range(len(digits))) - {*repeats}, key=lambda i: -abs(digits[i][1]))
        gradient = jax.lax.transpose(gradient, (*repeats, *order))
        if repeats:
            gradient = jnp.sum(gradient, range(len(repeats)))
        radix = self._radix(math.prod(shape))
        padding = [(start, outer // inner - start - n, 0) for n, start, inner, outer in radix]
        if any(low or high for low, high, _ in padding):
            zero = jnp.zeros((), gradient.dtype)
            gradient = jax.lax.pad(gradient.reshape([n for n, *_ in radix]), zero, padding)
        return gradient.reshape(shape)

    def taken(self, parameter: Array) -> Array:
        """This array, from the parameter; the layout is regular in it."""
        there = jax.ShapeDtypeStruct(self.shape, parameter.dtype)
        (array,) = jax.linear_transpose(lambda x: self.pulled_back(x, parameter.shape), there)(
            parameter
        )
        return array

    @property
    def _digits(self) -> list[Digit]:
        return [digit for axis in self.axes for digit in axis]

    def _radix(self, size: int) -> list[tuple[int, int, int, int]]:
        """The parameter's index in digits that fit: how many entries each takes, from where on.

        Beside them the strides of each and of the next larger one.
        """
        digits = merged(
            sorted(
                ((n, abs(stride)) for n, stride in self._digits if stride != 0),
                key=lambda digit: -digit[1],
            )
        )
        offset = self.offset + sum((n - 1) * min(stride, 0) for n, stride in self._digits)
        found: list[tuple[int, int, int, int]] = []
        outer = size
        for n, stride in [*digits, (1, 1)]:
            start, offset = divmod(offset, stride)
            found.append((n, start, stride, outer))
            outer = stride
        return found


def layout_of(shape: tuple[int, ...]) -> Layout:
    """The layout of a parameter as it is."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Layout(
        tuple(((n, stride),) if n != 1 else () for n, stride in zip(shape, strides, strict=True))
    )


def through(equation: jex_core.JaxprEqn, layout: Layout, over: int) -> list[Layout] | None:
    """The layouts of an equation's results; None if it is no rearrangement, or no regular one.

    Args:
        equation: takes the array alone.
        layout: of the array.
        over: how many of its first axes the equation does not see.
    """
    rule = _RULES.get(equation.primitive) or _NAMED.get(equation.primitive.name)
    if rule is None:
        return None
    seen = Layout(layout.axes[over:], layout.offset, layout.sign)
    results = rule(seen, equation)
    if results is None:
        return None
    return [result._replace(axes=(*layout.axes[:over], *result.axes)) for result in results]


def reshaped(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Axis, ...] | None:
    """The axes of a reshaped array; None where an index is no sum of digits."""
    if 0 in shape:
        return tuple(((n, 0),) if n != 1 else () for n in shape)
    left = list(merged(digit for axis in axes for digit in axis))
    found: list[Axis] = []
    for size in reversed(shape):
        axis: list[Digit] = []
        while size != 1:
            n, stride = left.pop()
            part = min(n, size)
            if n % part != 0 or size % part != 0:
                return None
            axis.insert(0, (part, stride))
            size //= part
            if part != n:
                left.append((n // part, stride * part))
        found.insert(0, tuple(axis))
    return tuple(found)


def merged(digits: Any) -> Axis:
    """Leaves out digits of one entry, and makes one of neighbours that are one."""
    found: list[Digit] = []
    for n, stride in digits:
        if n == 1:
            continue
        if found and found[-1][1] == stride * n:
            found[-1] = (found[-1][0] * n, stride)
        else:
            found.append((n, stride))
    return tuple(found)


def _reshape(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout] | None:
    axes = reshaped(layout.axes, shape_of(equation.outvars[0]))
    return None if axes is None else [layout._replace(axes=axes)]


def _broadcast(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout]:
    axes: list[Axis] = [((n, 0),) if n != 1 else () for n in equation.params["shape"]]
    for n, axis, at in zip(
        layout.shape, layout.axes, equation.params["broadcast_dimensions"], strict=True
    ):
        if n != 1:
            axes[at] = axis
    return [layout._replace(axes=tuple(axes))]


def _transpose(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout]:
    return [layout._replace(axes=tuple(layout.axes[i] for i in equation.params["permutation"]))]


def _reverse(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout]:
    axes, offset = list(layout.axes), layout.offset
    for at in equation.params["dimensions"]:
        offset += sum((n - 1) * stride for n, stride in axes[at])
        axes[at] = tuple((n, -stride) for n, stride in axes[at])
    return [Layout(tuple(axes), offset, layout.sign)]


def _slice(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout] | None:
    starts = equation.params["start_indices"]
    steps = equation.params["strides"] or [1] * len(starts)
    for at, cut in enumerate(zip(starts, shape_of(equation.outvars[0]), steps, strict=True)):
        found = _cut(layout, at, *cut)
        if found is None:
            return None
        layout = found
    return [layout]


def _split(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout] | None:
    axis, sizes = equation.params["axis"], [int(size) for size in equation.params["sizes"]]
    starts = itertools.accumulate(sizes, initial=0)
    parts = [_cut(layout, axis, start, size, 1) for size, start in zip(sizes, starts, strict=False)]
    whole = [part for part in parts if part is not None]
    return whole if len(whole) == len(parts) else None


def _cut(layout: Layout, at: int, start: int, size: int, step: int) -> Layout | None:
    """Takes `size` entries along one axis."""
    axis, have = layout.axes[at], layout.shape[at]
    if (start, size) == (0, have):
        return layout
    if not axis:  # none of one
        axis = ((1, 0),)
    (n, stride), *inner = axis
    width = have // n if n else 1
    if start % width != 0 or size % width != 0 or (inner and step != 1):
        return None
    cut = merged([(size // width, stride * step), *inner]) if size else ((0, 0),)
    axes = (*layout.axes[:at], cut, *layout.axes[at + 1 :])
    return Layout(axes, layout.offset + start // width * stride, layout.sign)


def _cast(layout: Layout, equation: jex_core.JaxprEqn) -> list[Layout] | None:
    """What is cast to another float keeps its gradient's dtype, the accumulate dtype."""
    return [layout] if jnp.issubdtype(equation.params["new_dtype"], jnp.floating) else None


_Rule: TypeAlias = Callable[[Layout, jex_core.JaxprEqn], list[Layout] | None]

_RULES: dict[jex_core.Primitive, _Rule] = {
    primitives.reshape_p: _reshape,
    primitives.squeeze_p: _reshape,
    primitives.broadcast_in_dim_p: _broadcast,
    primitives.transpose_p: _transpose,
    primitives.rev_p: _reverse,
    primitives.slice_p: _slice,
    primitives.neg_p: lambda layout, _: [layout._replace(sign=-layout.sign)],
    primitives.copy_p: lambda layout, _: [layout],
    primitives.name_p: lambda layout, _: [layout],
    primitives.convert_element_type_p: _cast,
}

# JAX gives no object for these.
_NAMED: dict[str, _Rule] = {"split": _split, "copy_p": lambda layout, _: [layout]}


def shape_of(variable: jex_core.Var | jex_core.Literal) -> tuple[int, ...]:
    """The shape of what a variable of a jaxpr holds."""
    aval: Any = variable.aval
    return tuple(aval.shape)
