"""Linear maps that are taken apart: by which numbers they multiply, and what they add up.

The derivative of a value in a parameter, transposed, is such a map; it is the same for all
examples. Its steps are followed on anything that can be multiplied by numbers and added up.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..programs import Call, evaluated, inside, interpret, literal_value, named
from .clip import roundings_in_blocks, sum_in_blocks
from .layouts import shape_of
from .powers import exponent_of, power_of_two

Rule: TypeAlias = Literal["times", "negated", "plus", "summed", "moved"]


class Step(NamedTuple):
    """One step of a linear map.

    Attributes:
        rule: what is done.
        values: the values that it is done to, by their place; that of the map's input is 0.
        fixed: where a value is multiplied, by which array.
        axes: where entries are added up, over which axes; where they only move, the axes of more
            than one entry and where each goes.
        equation: where they move, the equation that moves them.
    """

    rule: Rule
    values: tuple[int, ...]
    fixed: int = 0
    axes: tuple[Any, ...] = ()
    equation: Any = None


@runtime_checkable
class Followed(Protocol):
    """What a map can be followed on. A method may give None: it cannot be followed further."""

    def times(self, fixed: Array) -> Any:
        """Each entry times a number, or all times one."""
        ...

    def negated(self) -> Any:
        """With the other sign."""
        ...

    def plus(self, other: Any) -> Any:
        """Entry by entry."""
        ...

    def summed(self, axes: tuple[int, ...]) -> Any:
        """Without some axes, over which entries are added up."""
        ...

    def moved(self, equation: jex_core.JaxprEqn, axes: dict[int, int]) -> Any:
        """Rearranged by an equation, which brings each axis of several entries to another."""
        ...


class LinearMap(NamedTuple):
    """A linear map, taken apart.

    Attributes:
        steps: one after the other; each makes a value.
        result: the place of the result.
        arrays: what values are multiplied by.
    """

    steps: tuple[Step, ...]
    result: int
    arrays: list[Array]

    def follow(self, start: Followed) -> Any:
        """What becomes of the map's input; None where that cannot be followed."""
        values: list[Any] = [start]
        for rule, places, fixed, axes, equation in self.steps:
            first, *others = (values[place] for place in places)
            match rule:
                case "times":
                    found = first.times(self.arrays[fixed])
                case "negated":
                    found = first.negated()
                case "plus":
                    found = first.plus(*others)
                case "summed":
                    found = first.summed(axes)
                case "moved":
                    found = first.moved(equation, dict(axes))
            if found is None:
                return None
            values.append(found)
        return values[self.result]


class _Place(NamedTuple):
    """A value that depends on the map's input."""

    place: int


def transposed_derivative(
    function: Callable[[Array], Array], at: Array, dtype: np.dtype[Any]
) -> LinearMap | None:
    """From the gradient with respect to a function's result to that of its argument.

    Args:
        function: of one array.
        at: the argument.
        dtype: in which the map is computed.

    Returns:
        The map; None where a step is of no known kind, or of another dtype.
    """
    value, pullback = jax.vjp(function, at)
    program = jax.make_jaxpr(lambda gradient: pullback(gradient)[0])(value)
    if value.dtype != dtype or at.dtype != dtype:
        return None
    return _taken_apart(program, dtype)


def _taken_apart(program: jex_core.ClosedJaxpr, dtype: np.dtype[Any]) -> LinearMap | None:
    steps: list[Step] = []
    arrays: list[Array] = []

    def new(rule: Rule, values: Sequence[_Place], **others: Any) -> _Place:
        steps.append(Step(rule, tuple(value.place for value in values), **others))
        return _Place(len(steps))

    def of_equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        nothing = [None] * len(equation.outvars)
        if any(x is None for x in inputs):
            return nothing
        places = [x for x in inputs if isinstance(x, _Place)]
        if not places:
            return evaluated(equation, inputs)
        match inside(equation):
            case Call("jit", body):
                return interpret(body.jaxpr, body.consts, inputs, of_equation, literal_value)
            case None:
                if len(nothing) > 1:
                    return nothing
                aval: Any = equation.outvars[0].aval
                return nothing if aval.dtype != dtype else [one_step(equation, inputs, places)]
            case _:
                return nothing

    def one_step(
        equation: jex_core.JaxprEqn, inputs: list[Any], places: list[_Place]
    ) -> _Place | None:
        name, count = equation.primitive.name, len(places)
        if name in _UNCHANGED:
            return places[0]
        if name == "neg":
            return new("negated", places)
        if name in _SUMS and count == 2:
            return new("plus", places)
        if name in _PRODUCTS and count == 1:
            index = 0 if isinstance(inputs[0], _Place) else 1
            is_whole = shape_of(equation.invars[index]) == shape_of(equation.outvars[0])
            if not is_whole or (name == "div" and index == 1):
                return None
            fixed = inputs[1 - index]
            arrays.append(jnp.asarray(1 / fixed if name == "div" else fixed, dtype))
            return new("times", places, fixed=len(arrays) - 1)
        if name == "reduce_sum":
            return new("summed", places, axes=tuple(equation.params["axes"]))
        axes = _moved(equation) if name in _MOVES else None
        return None if axes is None else new("moved", places, axes=axes, equation=equation)

    (result,) = interpret(program.jaxpr, program.consts, [_Place(0)], of_equation, literal_value)
    return LinearMap(tuple(steps), result.place, arrays) if isinstance(result, _Place) else None


def _moved(equation: jex_core.JaxprEqn) -> tuple[tuple[int, int], ...] | None:
    """Where the axes of several entries go; None where one is cut, or two become one."""
    before, after = (shape_of(x) for x in (equation.invars[0], equation.outvars[0]))
    match equation.primitive.name:
        case "broadcast_in_dim":
            to = equation.params["broadcast_dimensions"]
        case "transpose":
            permutation = equation.params["permutation"]
            to = [permutation.index(axis) for axis in range(len(before))]
        case _:
            several = [axis for axis, size in enumerate(after) if size != 1]
            if [size for size in before if size != 1] != [after[axis] for axis in several]:
                return None
            places = iter(several)
            to = [-1 if size == 1 else next(places) for size in before]
    return tuple((axis, int(to[axis])) for axis, size in enumerate(before) if size != 1)


_UNCHANGED = named("copy convert_element_type") | {"copy_p"}  # JAX gives no object for the last
_SUMS = named("add add_any")
_PRODUCTS = named("mul div")
_MOVES = named("broadcast_in_dim reshape squeeze transpose")


def sum_over(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """The sum over some axes, in blocks."""
    left = [axis for axis in range(x.ndim) if axis not in axes]
    shape = [x.shape[axis] for axis in left]
    flat = jnp.transpose(x, (*left, *axes)).reshape(math.prod(shape), -1)
    return sum_in_blocks(flat).reshape(shape)


def roundings_over(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """How many roundings an entry goes through in `sum_over`."""
    return roundings_in_blocks(math.prod(shape[axis] for axis in axes))


class _Applied(NamedTuple):
    """An array."""

    array: Float[Array, "..."]

    def times(self, fixed: Array) -> "_Applied":
        return _Applied(self.array * jnp.where(jnp.isfinite(fixed), fixed, 0))

    def negated(self) -> "_Applied":
        return _Applied(-self.array)

    def plus(self, other: "_Applied") -> "_Applied":
        return _Applied(self.array + other.array)

    def summed(self, axes: tuple[int, ...]) -> "_Applied":
        return _Applied(sum_over(self.array, axes))

    def moved(self, equation: jex_core.JaxprEqn, axes: dict[int, int]) -> "_Applied":
        del axes
        return _Applied(evaluated(equation, [self.array])[0])


def applied(linear: LinearMap, array: Float[Array, "..."]) -> Float[Array, "..."]:
    """The map as it is. Where it multiplies by what is not finite, it multiplies by zero."""
    return linear.follow(_Applied(array)).array


class _Sizes(NamedTuple):
    """Upper bounds on the entries of arrays, and on what rounding makes of them.

    Attributes:
        array: on the sum of absolute values that an entry is the sum of.
        vanished: on what underflow adds to it.
        peak: on all entries of all values before.
        roundings: how many roundings each of these goes through.
    """

    array: Float[Array, "..."]
    vanished: Float[Array, "..."]
    peak: Float[Array, ""]
    roundings: int = 0

    def times(self, fixed: Array) -> "_Sizes":
        size = jnp.abs(fixed)
        return self._next(self.array * size, self.vanished * size, self.roundings + 1)

    def negated(self) -> "_Sizes":
        return self

    def plus(self, other: "_Sizes") -> "_Sizes":
        both = self._replace(peak=jnp.maximum(self.peak, other.peak))
        roundings = max(self.roundings, other.roundings) + 1
        return both._next(self.array + other.array, self.vanished + other.vanished, roundings)

    def summed(self, axes: tuple[int, ...]) -> "_Sizes":
        array, vanished = (sum_over(x, axes) for x in (self.array, self.vanished))
        roundings = self.roundings + roundings_over(self.array.shape, axes)
        return self._next(array, vanished, roundings, self.array.size // max(1, array.size))

    def moved(self, equation: jex_core.JaxprEqn, axes: dict[int, int]) -> "_Sizes":
        del axes
        array, vanished = (evaluated(equation, [x])[0] for x in (self.array, self.vanished))
        return self._replace(array=array, vanished=vanished)

    def _next(self, array: Array, vanished: Array, roundings: int, count: int = 1) -> "_Sizes":
        """What comes of it, an entry from so many."""
        peak = jnp.maximum(self.peak, jnp.max(array, initial=0))
        tiny = float(jnp.finfo(array.dtype).tiny)
        return _Sizes(array, vanished + 64 * count * tiny * (1 + peak), peak, roundings)


class MapSize(NamedTuple):
    """How large a linear map is.

    Attributes:
        exponent: of a power of two near the largest sum of a row's absolute values.
        peak: an upper bound on entries of what is made of entries up to 4 on the way.
        vanished: on what underflow adds to an entry of the result, divided by that power.
        roundings: how many roundings a product goes through.
    """

    exponent: Int[Array, ""]
    peak: Float[Array, ""]
    vanished: Float[Array, ""]
    roundings: int


def size_of(linear: LinearMap, shape: tuple[int, ...], dtype: np.dtype[Any]) -> MapSize:
    """How large a linear map of arrays of a shape is."""
    most = jnp.full(shape, 4, dtype)
    found: _Sizes = linear.follow(_Sizes(most, jnp.zeros_like(most), jnp.asarray(4, dtype)))
    scale, inverse = power_of_two(jnp.max(found.array, initial=0) / 4)
    vanished = jnp.max(found.vanished, initial=0) * inverse
    return MapSize(exponent_of(scale), found.peak, vanished, found.roundings)
