"""Views: what becomes of a parameter on its way to the equations that use it.

A view is kept as the steps that made it. Its gradient comes back by `jax.linear_transpose`; which
entries it holds is read off the strides of a NumPy array whose data is never read.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_Array = TypeVar("_Array", Array, np.ndarray)

Digits: TypeAlias = tuple[tuple[int, int], ...]
"""How many entries, and how far apart they stand in the parameter, outermost first."""


class Step(NamedTuple):
    """A rearrangement of an array, which repeats no entry.

    Attributes:
        name: which one.
        args: what it is told.
        lead: how many axes in front it leaves alone: those of the scans over slices around it.
    """

    name: Literal["reshape", "transpose", "rev", "slice"]
    args: tuple[Any, ...]
    lead: int

    def __call__(self, x: _Array) -> _Array:
        """The array rearranged; of NumPy a view of it.

        Raises:
            ValueError: NumPy has no such view.
        """
        front, args = x.shape[: self.lead], self.args
        match self.name:
            case "reshape":
                shape = (*front, *args)
                return (
                    x.reshape(shape, copy=False) if isinstance(x, np.ndarray) else x.reshape(shape)
                )
            case "transpose":
                return x.transpose(*range(self.lead), *(self.lead + i for i in args))
            case "rev":
                axes = tuple(self.lead + i for i in args)
                return np.flip(x, axes) if isinstance(x, np.ndarray) else jax.lax.rev(x, axes)
            case "slice":
                cuts = [*((0, n, 1) for n in front), *args]
                if isinstance(x, np.ndarray):
                    return x[tuple(slice(*cut) for cut in cuts)]
                return jax.lax.slice(x, *zip(*cuts, strict=True))

    def inside(self, scans: int) -> "Step":
        """This step as one iteration of the outermost scans sees it."""
        return self._replace(lead=self.lead - scans)


Steps: TypeAlias = tuple[Step, ...]


class Place(NamedTuple):
    """Which entries of a parameter an array of matrices holds.

    Attributes:
        offset: where the first one stands, in the parameter taken as flat.
        groups, rows, columns: how the entries along each dimension follow.
    """

    offset: int
    groups: Digits
    rows: Digits
    columns: Digits

    def reach(self, digits: Digits) -> tuple[int, int]:
        """The smallest and the largest position that some digits, with the offset, lead to."""
        ends = [(n - 1) * stride for n, stride in digits]
        low, high = sum(min(x, 0) for x in ends), sum(max(x, 0) for x in ends)
        return self.offset + low, self.offset + high

    @property
    def gap(self) -> float:
        """How far apart the same entry of two groups is at least; infinite for one group.

        Let k be the digit of the largest stride in which the groups differ. It takes them |s_k|
        apart, and the digits of smaller strides bring them at most their sum of (n - 1) |s| closer.
        """
        gap, closer = math.inf, 0
        for n, stride in sorted(self.groups, key=lambda digit: abs(digit[1])):
            gap = min(gap, abs(stride) - closer)
            closer += (n - 1) * abs(stride)
        return gap

    def is_apart(self, other: "Place") -> bool:
        """Whether two hold no entry in common, as slices along a dimension that is cut do.

        Proof: an entry stands at i + p, where the digits of groups lead to i, and offset, rows and
        columns to p. (If the two have other groups, these count as rows, and i is 0.) The ranges of
        p, one of each place, do not meet. So for an entry i + p = j + q in common, i and j are of
        different groups, and |i - j| = |p - q|. But |i - j| is at least `gap`, and |p - q| at most
        the extent of both ranges together.
        """
        digits, others = self.rows + self.columns, other.rows + other.columns
        gap = self.gap
        if self.groups != other.groups:
            digits, others, gap = self.groups + digits, other.groups + others, math.inf
        (low, high), (other_low, other_high) = self.reach(digits), other.reach(others)
        extent = max(high, other_high) - min(low, other_low)
        return gap > extent and (high < other_low or other_high < low)


def taken(steps: Steps, parameter: _Array) -> _Array:
    """The view of a parameter."""
    return functools.reduce(lambda x, step: step(x), steps, parameter)


def pulled_back(function: Callable[[Array], Array], gradient: Array, shape: tuple[int, ...]) -> Any:
    """The gradient with respect to a parameter, from that with respect to a view of it."""
    there = jax.ShapeDtypeStruct(shape, gradient.dtype)
    (of_parameter,) = jax.linear_transpose(function, there)(gradient)
    return of_parameter


@functools.lru_cache(maxsize=4096)
def place_of(
    steps: Steps, shape: tuple[int, ...], split: Step, parts: tuple[tuple[int, ...], ...]
) -> Place | None:
    """Where the entries of matrices stand; None where strides do not tell.

    Args:
        steps: from the parameter to the array.
        shape: of the parameter.
        split: from the array to one whose axes are parts of dimensions.
        parts: the axes that make up groups, rows and columns.
    """
    x = _strided((*steps, split), shape)
    if x is None:
        return None
    offset = _address(x) - _address(_BYTE)
    digits = [_merged((x.shape[i], x.strides[i]) for i in axes) for axes in parts]
    return Place(offset, *digits)


_BYTE = np.zeros(1, np.int8)


def _strided(steps: Steps, shape: tuple[int, ...]) -> Any:
    """The view of an array that is not there: one byte an entry, none of which is read."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    x = np.lib.stride_tricks.as_strided(_BYTE, shape, strides, writeable=False)
    try:
        return taken(steps, x)
    except ValueError:
        return None


def _address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


def _merged(digits: Any) -> Digits:
    """Leaves out digits of one entry, and makes one of neighbours that are one."""
    merged: list[tuple[int, int]] = []
    for n, stride in digits:
        if merged and n > 1 and merged[-1][1] == stride * n:
            merged[-1] = (merged[-1][0] * n, stride)
        elif n > 1:
            merged.append((n, stride))
    return tuple(merged)


def steps_of(equation: jex_core.JaxprEqn, lead: int) -> list[Steps] | None:
    """The step that an equation takes to each of its results; None if it is no rearrangement.

    A cast to another float is no step: the gradient has the accumulate dtype all the way.
    """
    params = equation.params
    avals: list[Any] = [equation.invars[0].aval, equation.outvars[0].aval]
    before, after = (tuple(aval.shape) for aval in avals)
    match equation.primitive.name:
        case "copy" | "copy_p" | "name" | "sharding_constraint":
            return [()]
        case "convert_element_type" if jnp.issubdtype(params["new_dtype"], jnp.floating):
            return [()]
        case "reshape" | "squeeze" | "broadcast_in_dim":
            is_moved = params.get("dimensions") is not None and equation.primitive.name == "reshape"
            if is_moved or math.prod(before) != math.prod(after):
                return None
            return [(Step("reshape", after, lead),)]
        case "transpose":
            return [(Step("transpose", tuple(params["permutation"]), lead),)]
        case "rev":
            return [(Step("rev", tuple(params["dimensions"]), lead),)]
        case "slice":
            steps = params["strides"] or [1] * len(before)
            cuts = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
            return [(Step("slice", tuple(cuts), lead),)]
        case "split":
            ends = [int(n) for n in np.cumsum(params["sizes"])]
            return [
                (Step("slice", _cut(before, params["axis"], start, end), lead),)
                for start, end in zip([0, *ends[:-1]], ends, strict=True)
            ]
        case _:
            return None


def _cut(shape: tuple[int, ...], axis: int, start: int, end: int) -> tuple[Any, ...]:
    return tuple((start, end, 1) if i == axis else (0, n, 1) for i, n in enumerate(shape))
