"""From random bits to normal numbers: which distribution arithmetic makes of them.

JAX makes a normal number of random bits so: as many as the mantissa has digits become that of a
number between 1 and 2; an affine map takes it to between -1 and 1; the inverse of the error
function makes it normal with variance 1/2. Each step is told here by what it computes, and not by
the name of a function.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from ..isolation import dtype_of, shape_of, size_of
from ..programs import UNCHANGED, named
from .values import SOME, Public, Random, Value

Rule: TypeAlias = Callable[[jex_core.JaxprEqn, list[Value]], Random | None]

# Entries stay entries, and each stays independent of the others.
_KEEPS = UNCHANGED | named("reshape squeeze")
_MOVES = named("transpose rev slice split dynamic_slice unstack")


def _of_first(rule: Callable[[jex_core.JaxprEqn, Random], Random | None]) -> Rule:
    """A rule of the first operand; nothing is known if that is not random."""

    def of(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Random | None:
        return rule(equation, inputs[0]) if isinstance(inputs[0], Random) else None

    return of


@_of_first
def _kept(equation: jex_core.JaxprEqn, value: Random) -> Random:
    return value


@_of_first
def _moved(equation: jex_core.JaxprEqn, value: Random) -> Random:
    """Some of the numbers, or all in another order; of slices of a vector it is known which."""
    before = shape_of(equation.invars[0])
    is_slice = equation.primitive.name == "slice" and len(before) == 1
    if not is_slice or value.part == SOME or set(equation.params["strides"] or ()) - {1}:
        return replace(value, part=SOME)
    start = (value.part or (0, before[0]))[0] + int(equation.params["start_indices"][0])
    return replace(value, part=(start, start + shape_of(equation.outvars[0])[0]))


def parts(equation: jex_core.JaxprEqn, before: Random) -> list[Random]:
    """The results of an equation that cuts a vector into several."""
    is_vector = len(shape_of(equation.invars[0])) == 1 and equation.primitive.name == "split"
    if not is_vector or before.part == SOME:
        return [replace(before, part=SOME)] * len(equation.outvars)
    first, found = (before.part or (0, 0))[0], list[Random]()
    for variable in equation.outvars:
        (length,) = shape_of(variable)
        found.append(replace(before, part=(first, first + length)))
        first += length
    return found


@_of_first
def _converted(equation: jex_core.JaxprEqn, value: Random) -> Random | None:
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in _dtypes(equation))
    return value if floats else None


def _shifted(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Random | None:
    match inputs:
        case [Random(kind="bits") as value, Public(low=low, high=high)] if low == high:
            return replace(value, kind="mantissa", low=value.low - low)
        case _:
            return None


def _with_exponent(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Random | None:
    match inputs:
        case [Random(kind="mantissa") as value, Public(low=low, high=high)] if low == high:
            return replace(value, kind="one to two", high=low)
        case [Public(), Random()]:
            return _with_exponent(equation, inputs[::-1])
        case _:
            return None


@_of_first
def _as_float(equation: jex_core.JaxprEqn, value: Random) -> Random | None:
    dtype = _dtypes(equation)[1]
    if value.kind != "one to two":
        return None
    if not jnp.issubdtype(dtype, jnp.floating) or value.low != jnp.finfo(dtype).nmant:
        return None
    one = np.ones((), dtype).view(np.dtype(f"uint{8 * np.dtype(dtype).itemsize}"))
    if value.high != float(one):
        return None
    return replace(value, kind="uniform", low=1.0, high=2.0)


def _added(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Random | None:
    sign = -1 if equation.primitive.name == "sub" else 1
    match inputs:
        case [Random(kind="uniform") as value, Public(low=low, high=high)] if low == high:
            return replace(value, low=value.low + sign * low, high=value.high + sign * low)
        case [Random(kind="normal") as value, Public()] | [
            Public(),
            Random(kind="normal") as value,
        ]:
            return None if _grows(equation, inputs.index(value)) else value
        case [Public(), Random(kind="uniform")] if sign == 1:
            return _added(equation, inputs[::-1])
        case [Random(kind="normal") as one, Random(kind="normal") as other]:
            if one.draws & other.draws:
                return None
            stddev = math.hypot(one.high, other.high)
            part = None if one.part is other.part is None else SOME
            return Random(one.draws | other.draws, "normal", 0.0, stddev, part)
        case _:
            return None


def _multiplied(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Random | None:
    match inputs:
        case [Random() as value, Public() as factor] | [Public() as factor, Random() as value]:
            pass
        case _:
            return None
    if _grows(equation, inputs.index(value)):
        return replace(value, kind="repeated") if value.kind == "normal" else None
    if value.kind in ("normal", "repeated"):
        return replace(value, high=value.high * factor.least)
    if value.kind == "uniform" and factor.low == factor.high >= 0:
        return replace(value, low=value.low * factor.low, high=value.high * factor.low)
    return None


def _divided(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Random | None:
    match inputs:
        case [Random(kind="normal") as value, Public() as divisor] if divisor.largest > 0:
            return (
                None if _grows(equation, 0) else replace(value, high=value.high / divisor.largest)
            )
        case _:
            return None


@_of_first
def _negated(equation: jex_core.JaxprEqn, value: Random) -> Random | None:
    return value if value.kind == "normal" else None


def _at_least(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Random | None:
    match inputs:
        case [Random(kind="uniform") as value, Public(high=high)] if high <= value.low:
            return value
        case [Public(), Random()]:
            return _at_least(equation, inputs[::-1])
        case _:
            return None


@_of_first
def _erf_inv(equation: jex_core.JaxprEqn, value: Random) -> Random | None:
    if value.kind != "uniform":
        return None
    # The least number above -1 is excluded or not: by some 1e-3 in half precision.
    error = 4 * float(jnp.finfo(_dtypes(equation)[0]).eps)
    if abs(value.low + 1) > error or abs(value.high - 1) > error:
        return None
    return Random(value.draws, "normal", 0.0, math.sqrt(0.5))


def _joined(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Random | None:
    found = [value for value in inputs if isinstance(value, Random) and value.kind == "normal"]
    draws = [draw for value in found for draw in value.draws]
    if len(found) < len(inputs) or len(set(draws)) < len(draws):
        return None
    return Random(frozenset(draws), "normal", 0.0, min(value.high for value in found), SOME)


@_of_first
def _repeated(equation: jex_core.JaxprEqn, value: Random) -> Random | None:
    if _grows(equation, 0):
        return replace(value, kind="repeated") if value.kind == "normal" else None
    return value


_BY_RULE: tuple[tuple[Rule, frozenset[str]], ...] = (
    (_kept, _KEEPS),
    (_moved, _MOVES),
    (_converted, named("convert_element_type")),
    (_shifted, named("shift_right_logical")),
    (_with_exponent, named("or")),
    (_as_float, named("bitcast_convert_type")),
    (_added, named("add sub add_any")),
    (_multiplied, named("mul")),
    (_divided, named("div")),
    (_negated, named("neg")),
    (_at_least, named("max")),
    (_erf_inv, named("erf_inv")),
    (_joined, named("concatenate stack")),
    (_repeated, named("broadcast_in_dim")),
)

RULES: dict[str, Rule] = {name: rule for rule, names in _BY_RULE for name in names}
"""The distribution of a primitive's result, by its name; of others nothing is known."""


def _grows(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """Whether one number stands at several places of the result."""
    return size_of(equation.invars[operand]) != size_of(equation.outvars[0])


def _dtypes(equation: jex_core.JaxprEqn) -> list[Any]:
    return list(map(dtype_of, (equation.invars[0], equation.outvars[0])))
