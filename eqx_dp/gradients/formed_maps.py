"""Linear maps of gradients that are formed, example by example, in the order in which they come.

A product of matrices leaves the parameter's axes in another order than the parameter has them. The
map is followed in that order, since to rearrange all gradients takes longer than the map itself.
"""

import math
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array, Float

from .layouts import Layout, layout_of, merged, shape_of
from .linear_maps import LinearMap


def formed_order(matrices: Layout | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of an array in the order of its matrices (group, in, out).

    None where these are not all of its entries, axis by axis.
    """
    if matrices is None or matrices.sign < 0:
        return None
    digits = merged(digit for axis in matrices.axes for digit in axis)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def place(axis: int) -> tuple[int, int]:
        within = [i for i, (n, step) in enumerate(digits) if step <= strides[axis] < n * step]
        return min(within, default=-1), -strides[axis]

    order = tuple(sorted(range(len(shape)), key=place))
    axes = layout_of(shape).axes
    is_all = merged(digit for axis in order for digit in axes[axis]) == digits
    return order if is_all and matrices.offset == 0 and 0 not in shape else None


def follow_formed(
    linear: LinearMap,
    grads: Float[Array, "batch ..."],
    shape: tuple[int, ...],
    order: tuple[int, ...],
) -> Float[Array, "batch ..."]:
    """What a map makes of each example's gradient.

    Args:
        linear: the map.
        grads: of all examples, axes in the given order.
        shape: of one, axes in their own order.
        order: of axes; also of the result's where it has as many, else they are in their own.
    """
    several = tuple(axis for axis in order if shape[axis] != 1)
    start = _Formed(grads.reshape(len(grads), *(shape[x] for x in several)), several, shape, order)
    found: _Formed = linear.follow(start)
    return found.whole()


class _Formed(NamedTuple):
    """An array of each example, in which the axes that it does not depend on are left out.

    Attributes:
        array: examples in front.
        axes: the axes that are there, one a dimension.
        shape: of one example's array as it is.
        order: of axes, where it has so many.
    """

    array: Float[Array, "batch ..."]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def whole(self) -> Array:
        """The array with all axes, in order."""
        axes = self._sorted(range(len(self.shape)))
        return jnp.broadcast_to(
            self._spread(self.array, self.axes, axes),
            (len(self.array), *(self.shape[axis] for axis in axes)),
        )

    def times(self, fixed: Array) -> "_Formed":
        """Each entry times a number, or all times one."""
        if fixed.ndim == 0:
            return self._replace(array=self.array * fixed)
        there = [axis for axis, size in enumerate(fixed.shape) if size != 1]
        axes = self._sorted({*self.axes, *there})
        flat = fixed.reshape(1, *(fixed.shape[axis] for axis in there))
        product = self._spread(self.array, self.axes, axes) * self._spread(flat, there, axes)
        return self._replace(array=product, axes=axes)

    def negated(self) -> "_Formed":
        """With the other sign."""
        return self._replace(array=-self.array)

    def plus(self, other: "_Formed") -> "_Formed":
        """Entry by entry."""
        axes = self._sorted({*self.axes, *other.axes})
        arrays = [self._spread(x.array, x.axes, axes) for x in (self, other)]
        return self._replace(array=arrays[0] + arrays[1], axes=axes)

    def summed(self, axes: tuple[int, ...]) -> "_Formed":
        """Without some axes, over which entries are added up."""
        total = _sum(self.array, [1 + i for i, axis in enumerate(self.axes) if axis in axes])
        repeats = math.prod(self.shape[axis] for axis in axes if axis not in self.axes)
        total = total if repeats == 1 else total * repeats
        left = [axis for axis in range(len(self.shape)) if axis not in axes]
        kept = tuple(left.index(axis) for axis in self.axes if axis in left)
        return _Formed(total, kept, tuple(self.shape[axis] for axis in left), self.order)

    def moved(self, equation: jex_core.JaxprEqn, axes: dict[int, int]) -> "_Formed":
        """Rearranged by an equation, which brings each axis of several entries to another."""
        kept = tuple(axes[axis] for axis in self.axes)
        return self._replace(axes=kept, shape=shape_of(equation.outvars[0]))

    def _sorted(self, axes: Any) -> tuple[int, ...]:
        is_in_order = len(self.shape) == len(self.order)
        return tuple(sorted(axes, key=self.order.index if is_in_order else None))

    def _spread(self, x: Array, there: Any, axes: tuple[int, ...]) -> Array:
        """An array with the axes that are there, with others beside them."""
        dims = [there.index(axis) for axis in axes if axis in there]
        x = jnp.transpose(x, (0, *(1 + dim for dim in dims)))
        return jnp.expand_dims(x, [1 + i for i, axis in enumerate(axes) if axis not in there])


def _sum(x: Array, dims: list[int]) -> Array:
    """A sum, in two steps where entries are far apart: the compiler's loops are faster then."""
    if not dims or dims[-1] == x.ndim - 1 or dims != list(range(dims[0], dims[-1] + 1)):
        return jnp.sum(x, dims)
    shape, size = x.shape, math.prod(x.shape[dim] for dim in dims)
    inner = max(n for n in range(1, 9) if size % n == 0)
    x = x.reshape(*shape[: dims[0]], size // inner, inner, *shape[dims[-1] + 1 :])
    return jnp.sum(jnp.sum(x, dims[0] + 1), dims[0])
