"""What arithmetic does to the sensitivity of a clipped sum."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.extend.core as jex_core
import jax.numpy as jnp

from ..isolation import dtype_of, shape_of, size_of
from ..programs import UNCHANGED, named
from .values import Public, Sum, Value, added, either, side_by_side
from .widths import width_of

Rule: TypeAlias = Callable[[jex_core.JaxprEqn, list[Value]], Sum | None]
"""From an equation and its operands to what is known of its results; None for nothing."""

UNKNOWN_SCALE = "it is multiplied by a value that is no constant of the program"

# An entry moves by no more than that of the operand, and each entry of the result has its own.
_KEEPS = UNCHANGED | named(
    """reshape squeeze transpose rev slice dynamic_slice neg abs split unstack real
    convert_element_type optimization_barrier"""
)


def _of_first(rule: Callable[[jex_core.JaxprEqn, Sum], Sum | None]) -> Rule:
    """A rule of the first operand; nothing is known if that is no sum."""

    def of(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
        return rule(equation, inputs[0]) if isinstance(inputs[0], Sum) else None

    return of


@_of_first
def _kept(equation: jex_core.JaxprEqn, value: Sum) -> Sum | None:
    return None if _narrows(equation) else value


def _narrows(equation: jex_core.JaxprEqn) -> bool:
    before, after = (width_of(dtype_of(v)) for v in (equation.invars[0], equation.outvars[0]))
    return before is not None and (after is None or after.narrower(before))


def _multiplied(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    match inputs:
        case [Sum() as value, Public() as factor] | [Public() as factor, Sum() as value]:
            grown = _growth(equation, equation.invars[inputs.index(value)])
            return value.scaled(factor.largest * grown, UNKNOWN_SCALE)
        case _:
            return None


def _divided(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    match inputs:
        case [Sum() as value, Public() as divisor]:
            grown = _growth(equation, equation.invars[0])
            scale = grown / divisor.least if divisor.least else math.inf
            return value.scaled(scale, UNKNOWN_SCALE)
        case _:
            return None


def _summed(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    return added(
        value.scaled(_growth(equation, variable))
        for value, variable in zip(inputs, equation.invars, strict=True)
        if isinstance(value, Sum)
    )


def _bounded(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    """Maximum, minimum: no entry moves further than that of the operand."""
    sums = [value for value in inputs if isinstance(value, Sum)]
    if len(sums) != 1:
        return None
    grown = _growth(equation, equation.invars[inputs.index(sums[0])])
    return sums[0].scaled(grown, is_tight=False)


def _selected(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    if not isinstance(inputs[0], Public):
        return None
    sums = [value for value in inputs[1:] if isinstance(value, Sum)]
    # Entries of several may be of the same numbers, at other places.
    return either(sums) if not shape_of(equation.invars[0]) else side_by_side(sums)


def _joined(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    return side_by_side(value for value in inputs if isinstance(value, Sum))


def _updated(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    if not all(isinstance(value, Public) for value in inputs[2:]):
        return None
    return side_by_side(value for value in inputs[:2] if isinstance(value, Sum))


def _scattered(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    """Each entry is that of the operand or of an update; or they are added up."""
    if not isinstance(inputs[1], Public):
        return None
    sums = [value for value in (inputs[0], inputs[2]) if isinstance(value, Sum)]
    if equation.primitive.name == "scatter":
        return side_by_side(sums)
    often = 1 if equation.params["unique_indices"] else _rows(equation.invars[1])
    return added(
        value.scaled(math.sqrt(often), is_tight=often == 1) if value is inputs[2] else value
        for value in sums
    )


def _looked_up(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    """An entry may be taken as often as there are indices."""
    value, index = inputs
    if not isinstance(value, Sum) or not isinstance(index, Public):
        return None
    often = _rows(equation.invars[1])
    return value.scaled(math.sqrt(often), is_tight=often == 1)


def _rows(indices: Any) -> int:
    *rows, _ = shape_of(indices)
    return math.prod(rows)


@_of_first
def _repeated(equation: jex_core.JaxprEqn, value: Sum) -> Sum:
    return value.scaled(_growth(equation, equation.invars[0]))


@_of_first
def _reduced(equation: jex_core.JaxprEqn, value: Sum) -> Sum:
    """A sum of n entries moves by at most sqrt(n) times the norm (Cauchy and Schwarz)."""
    along = value.apart_along
    if along is not None and value.is_even and tuple(equation.params["axes"]) == (along,):
        length = shape_of(equation.invars[0])[along]
        return value.scaled(1 / (2 * math.sqrt(length)))  # an example is in one entry alone
    n = size_of(equation.invars[0]) / max(1, size_of(equation.outvars[0]))
    return value.scaled(math.sqrt(n), is_tight=n == 1)


@_of_first
def _accumulated(equation: jex_core.JaxprEqn, value: Sum) -> Sum:
    n = shape_of(equation.invars[0])[equation.params["axis"]]
    return value.scaled(float(n), is_tight=n == 1)


@_of_first
def _extreme(equation: jex_core.JaxprEqn, value: Sum) -> Sum:
    return value.scaled(1.0, is_tight=False)


def _product(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    """By a matrix whose norm is at most that of all its entries together (Frobenius)."""
    match inputs:
        case [Sum() as value, Public() as matrix, *_] | [Public() as matrix, Sum() as value, *_]:
            entries = size_of(equation.invars[inputs.index(matrix)])
            norm = matrix.largest * math.sqrt(entries)
            return value.scaled(norm, UNKNOWN_SCALE, is_tight=False)
        case _:
            return None


def _padded(equation: jex_core.JaxprEqn, inputs: list[Value]) -> Sum | None:
    value, filling = inputs
    return value if isinstance(value, Sum) and isinstance(filling, Public) else None


@_of_first
def _power(equation: jex_core.JaxprEqn, value: Sum) -> Sum | None:
    return value if equation.params["y"] == 1 else None


_BY_RULE: tuple[tuple[Rule, frozenset[str]], ...] = (
    (_kept, _KEEPS),
    (_multiplied, named("mul")),
    (_divided, named("div")),
    (_summed, named("add sub add_any")),
    (_bounded, named("max min clamp")),
    (_selected, named("select_n")),
    (_joined, named("concatenate stack")),
    (_updated, named("dynamic_update_slice")),
    (_scattered, named("scatter scatter-add")),
    (_looked_up, named("gather")),
    (_repeated, named("broadcast_in_dim tile")),
    (_reduced, named("reduce_sum")),
    (_accumulated, named("cumsum")),
    (_extreme, named("reduce_max reduce_min")),
    (_product, named("dot_general")),
    (_padded, named("pad")),
    (_power, named("integer_pow")),
)

RULES: dict[str, Rule] = {name: rule for rule, names in _BY_RULE for name in names}
"""What is known of the results of a primitive, by its name; of others nothing is."""


_ENTRY_BY_ENTRY = named("convert_element_type neg mul div copy sharding_constraint")


_EVEN = UNCHANGED | named(
    """reshape squeeze convert_element_type optimization_barrier add add_any broadcast_in_dim
    concatenate reduce_sum transpose slice"""
)


LAY_OUT = named("concatenate transpose slice broadcast_in_dim reduce_sum reshape squeeze")
"""These may move entries to other places."""


def is_entry_by_entry(equation: jex_core.JaxprEqn) -> bool:
    """Whether entries of a sum stay where they are."""
    shapes = {shape_of(v) for v in (equation.invars[0], equation.outvars[0])}
    return equation.primitive.name in _ENTRY_BY_ENTRY and len(shapes) == 1


def is_even(equation: jex_core.JaxprEqn, inputs: list[Value]) -> bool:
    """Whether an equation does the same, by a positive factor, to all parts of a sum."""
    if equation.primitive.name in _EVEN:
        return True
    factors = [value for value in inputs if isinstance(value, Public)]
    is_scaled = equation.primitive.name in ("mul", "div") and len(factors) == 1
    return is_scaled and 0 < factors[0].low == factors[0].high


UNBOUNDED = named(
    """mul div dot_general square integer_pow sqrt rsqrt pow sign round floor ceil exp exp2 expm1
    log cbrt eq ne lt le gt ge argmax argmin"""
)
"""No distance bounds how far the results of these move with a sum, where no rule speaks of them."""


def is_rounded(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation only rounds its operand to fewer digits."""
    name = equation.primitive.name
    return name == "reduce_precision" or (name == "convert_element_type" and _narrows(equation))


def _growth(equation: jex_core.JaxprEqn, variable: Any) -> float:
    """How much longer an array gets by being repeated, as arithmetic does it."""
    return math.sqrt(size_of(equation.outvars[0]) / max(1, size_of(variable)))


def is_float(variable: Any) -> bool:
    """Whether a variable holds real floating-point numbers."""
    return jnp.issubdtype(dtype_of(variable), jnp.floating)
