"""Integers that count, and keys of random numbers, through the equations of a program."""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from ..programs import UNCHANGED
from .facts import Fact
from .flow import dtype_of, shape_of
from .keys import Along, Key, Number
from .rows import Some, layout


def counted(equation: jex_core.JaxprEqn, inputs: list[Fact]) -> Number | None:
    """What an integer counts, behind one equation; of other dtypes and rules, nothing."""
    dtype, name = dtype_of(equation.outvars[0]), equation.primitive.name
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize < 4:
        return None
    known = [fact.number for fact in inputs]
    if name == "iota":
        shape, dim = equation.params["shape"], equation.params["dimension"]
        return Number(None, 0, (Along(dim, 1, shape[dim]),))
    if not all(known):
        return None
    numbers = [number for number in known if number is not None]
    match name, numbers:
        case "add", [a, b]:
            return a.plus(b)
        case "sub", [a, b]:
            return a.plus(b, -1)
        case "mul", [a, b]:
            if b == (None, b.offset, ()):
                return a.times(b.offset)
            return b.times(a.offset) if a == (None, a.offset, ()) else None
        case _:
            move = moved(equation, inputs)
            return None if move is None else move(numbers[0])


def key_of(equation: jex_core.JaxprEqn, inputs: list[Fact]) -> Key | None:
    """The key that a result is; None if it is none, or follows from keys in another way."""
    name, first = equation.primitive.name, inputs[0] if inputs else None
    if first is None:
        return None
    match name:
        case "random_seed" | "random_wrap":
            return _from_words(equation, first)
        case "random_unwrap":
            return first.key and first.key._replace(is_words=True)
        case "random_fold_in":
            return first.key and first.key.folded(inputs[1].number)
        case "random_split":
            return first.key and first.key.folded(_split(equation))
        case _ if first.key is not None:
            move = moved(equation, inputs)
            if move is None or (first.key.is_words and not _keeps_words(equation)):
                return None
            path = [move(one) if isinstance(one, Number) else one for one in first.key.path]
            return first.key._replace(path=tuple(path))
        case _:
            return None


def _from_words(equation: jex_core.JaxprEqn, words: Fact) -> Key | None:
    """A key from its words or from a seed; constants of one value are one root."""
    if words.key is not None:
        return words.key._replace(is_words=False)
    value = None if words.constant is None else words.constant.value
    if value is None or np.ndim(value) > 1:
        return Key(None)
    try:
        with jax.ensure_compile_time_eval():
            made = equation.primitive.bind(value, **equation.params)
            return Key(("constant", np.asarray(jax.random.key_data(made)).tobytes()))
    except Exception:  # whatever it is, the key is not known then
        return Key(None)


def _split(equation: jex_core.JaxprEqn) -> Number:
    first = len(shape_of(equation.invars[0]))
    lengths = shape_of(equation.outvars[0])[first:]
    along = [
        Along(first + i, math.prod(lengths[i + 1 :]), length) for i, length in enumerate(lengths)
    ]
    return Number(None, 0, tuple(along))


def _keeps_words(equation: jex_core.JaxprEqn) -> bool:
    """Whether words, along the last dimension, stay together."""
    found = layout(equation)
    return bool(found and found[0] and found[0][-1] == len(shape_of(equation.invars[0])) - 1)


def moved(
    equation: jex_core.JaxprEqn, inputs: list[Fact]
) -> Callable[[Number], Number | None] | None:
    """What an equation that only moves entries makes of numbers; None of another equation."""
    name, params = equation.primitive.name, equation.params
    if name not in _MOVES:
        return None
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    (found, *_), starts, steps = layout(equation) or [()], (0,) * len(before), (1,) * len(before)
    if name == "slice":
        starts, steps = params["start_indices"], params["strides"] or steps
    elif name == "dynamic_slice":
        known = [fact.constant and fact.constant.value for fact in inputs[1:]]
        starts = tuple(-1 if value is None else int(value) for value in known)
    lost = {d for d, n in enumerate(before) if n > 1} - {
        place.dim if isinstance(place, Some) else place for place in found
    }

    def move(number: Number) -> Number | None:
        offset, along = number.offset, list[Along]()
        for one in number.along:
            if not isinstance(one.where, int):
                along.append(one)
                continue
            if one.where in lost:
                return None
            for to, place in enumerate(found):
                if place == one.where:
                    along.append(one._replace(where=to))
                elif isinstance(place, Some) and place.dim == one.where:
                    start = starts[place.dim]
                    if not 0 <= start <= before[place.dim] - after[to]:
                        return None
                    offset += one.stride * start
                    if after[to] > 1:
                        stride = one.stride * steps[place.dim]
                        along.append(Along(to, stride, after[to]))
        return Number(number.root, offset, tuple(along))

    return move


_MOVES = UNCHANGED | {
    "broadcast_in_dim", "reshape", "squeeze", "slice", "dynamic_slice", "transpose",
    "convert_element_type",
}  # fmt: skip


def sliced(number: Number, loop: Any, length: int | None) -> Number:
    """The numbers along the first dimension, from turn to turn of a loop; others move up."""
    along = [
        one
        if not isinstance(one.where, int)
        else (one._replace(where=one.where - 1) if one.where else Along(loop, one.stride, length))
        for one in number.along
    ]
    return number._replace(along=tuple(along))


def unstacked(equation: jex_core.JaxprEqn) -> list[list[jex_core.JaxprEqn]]:
    """For each result of `unstack` the slice and the squeeze that are the same."""
    axis, operand = equation.params["axis"], cast(Any, equation.invars[0]).aval
    shape = jax.ShapeDtypeStruct(operand.shape, operand.dtype)

    def at(place: int) -> list[jex_core.JaxprEqn]:
        def take(x: Any) -> Any:
            return jax.lax.squeeze(jax.lax.slice_in_dim(x, place, place + 1, axis=axis), [axis])

        return list(jax.make_jaxpr(take)(shape).jaxpr.eqns)

    return [at(place) for place in range(len(equation.outvars))]
