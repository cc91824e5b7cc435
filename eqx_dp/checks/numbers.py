"""Public arithmetic, as far as keys, whole numbers and bounds of entries are concerned."""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from ..isolation import RULES, Apart, dtype_of, shape_of, size_of
from ..programs import UNCHANGED, named
from . import random_keys
from .terms import (
    UNKNOWN,
    Affine,
    Key,
    Listed,
    Root,
    Span,
    Term,
    number,
    plus,
    varies,
)
from .values import Public

_MOST_LISTED = 4096

ZERO = number(0)

Rule: TypeAlias = Callable[[jex_core.JaxprEqn, list[Public]], Public | None]
"""From an equation and its operands to term and bounds of its result, if these are known."""


def constant(value: Any) -> Public:
    """A constant or a literal."""
    dtype, shape = jnp.result_type(value), np.shape(value)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(value))
        root = Root(("constant", words.tobytes()))
        return Public(random_keys.of_root(root, shape))
    if not math.prod(shape) or not (
        jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    ):
        return Public()
    array = np.asarray(value)
    along = frozenset(
        dim for dim in range(array.ndim) if (array != array.take([0], axis=dim)).any()
    )
    if np.iscomplexobj(array):
        return Public(along=along)
    low, high = float(array.min()), float(array.max())
    term: Term | None = None
    if array.dtype.kind in "iu":
        if array.ndim == 0:
            term = number(int(array))
        elif array.ndim == 1 and array.size <= _MOST_LISTED:
            term = Listed(tuple(map(int, array)))
    if not (math.isfinite(low) and math.isfinite(high)):
        return Public(term, along=along)
    return Public(term, low, high, along=along)


def argument(name: Hashable, shape: tuple[int, ...], is_key: bool, is_new: bool) -> Public:
    """A public argument; `is_new` if another call is given another."""
    root = Root(("argument", name), frozenset({"calls"} if is_new else ()))
    return Public(random_keys.of_root(root, shape) if is_key else root)


def result(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    """Term and bounds of an equation's results; what it is made of is added by the caller."""
    rule = _RULES.get(equation.primitive.name)
    found = (None if rule is None else rule(equation, inputs)) or Public()
    dtype = dtype_of(equation.outvars[0])
    if jnp.issubdtype(dtype, jnp.integer):  # which goes round at its ends
        info = jnp.iinfo(dtype)
        if info.bits < 32:  # soon
            found = replace(found, term=None)
        if not info.min <= found.low <= found.high <= info.max:
            return Public(found.term)
    return found


def unstacked(equation: jex_core.JaxprEqn, value: Public) -> list[Public]:
    """The entries of an array along a dimension, each a result of its own."""
    axis, found = equation.params["axis"], list[Public]()
    for i in range(len(equation.outvars)):
        term = None if value.term is None else _part(value.term, axis, 1, number(i))
        if isinstance(term, Key):
            term = term._replace(along=term.along[:axis] + term.along[axis + 1 :])
        along = frozenset(dim - (dim > axis) for dim in value.along if dim != axis)
        found.append(replace(value, term=term, along=along))
    return found


def varies_along(equation: jex_core.JaxprEqn, inputs: list[Public]) -> frozenset[int]:
    """The dimensions along which a result varies by constants of the program."""
    name, after = equation.primitive.name, shape_of(equation.outvars[0])
    every = frozenset(dim for dim, length in enumerate(after) if length > 1)
    if name == "iota":
        return every & {equation.params["dimension"]}
    found = {equation.params["axis"]} if name.startswith("cum") else set[int]()
    rule = RULES.get(name)
    for operand, value in enumerate(inputs):
        for dim in value.along:
            length = shape_of(equation.invars[operand])[dim]
            moved = rule and rule(equation, operand, Apart(dim), length)
            if moved is not None:
                found.add(moved.dim)
            elif name != "dot_general":
                return every
    return frozenset(found)


def _bounds(low: float, high: float, term: Term | None = None) -> Public | None:
    if math.isnan(low) or math.isnan(high):
        return None if term is None else Public(term)
    return Public(term, low, high)


def _same(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    return inputs[0]


def _bounds_alone(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    value = inputs[0]
    if equation.primitive.name == "abs":
        return _bounds(value.least, value.largest)
    return _bounds(value.low, value.high)


def _converted(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    value, before, dtype = inputs[0], dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
    if dtype == jnp.bool_:
        return Public(None, float(value.least > 0), float(value.largest > 0))
    if not jnp.issubdtype(dtype, jnp.integer):
        return replace(value, term=None)
    if not jnp.issubdtype(before, jnp.integer):  # towards zero
        if not (math.isfinite(value.low) and math.isfinite(value.high)):
            return Public()
        return Public(None, float(math.floor(value.low)), float(math.ceil(value.high)))
    is_wider = jnp.iinfo(dtype).bits >= min(32, jnp.iinfo(before).bits)
    return value if is_wider else replace(value, term=None)


def _laid_out(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    """A reshape, squeeze or broadcast: dimensions of length one come and go."""
    value = inputs[0]
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    term = value.term
    if isinstance(term, Key):
        term = random_keys.laid_out(equation, term, before, after)
    elif size_of(equation.invars[0]) != size_of(equation.outvars[0]) or (
        isinstance(term, Span | Listed) and sum(length > 1 for length in after) > 1
    ):
        term = None
    elif isinstance(term, Root) and before != after and math.prod(before) > 1:
        term = Root(("laid out", term.name, after), term.varies)
    return replace(value, term=term)


def _cut(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    value, params = inputs[0], equation.params
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    starts: list[Any] = []
    if "start_indices" in params:
        if set(params["strides"] or ()) - {1}:
            return replace(value, term=None)
        starts = [number(int(start)) for start in params["start_indices"]]
    else:
        starts = [one.term for one in inputs[1:]]
    term = value.term
    for dim, (length, taken, start) in enumerate(zip(before, after, starts, strict=True)):
        if length != taken and term is not None:
            if len(inputs) > 1 and not 0 <= inputs[1 + dim].low <= inputs[1 + dim].high <= (
                length - taken
            ):
                start = UNKNOWN  # it may be moved to where there are entries
            term = _part(term, dim, taken, start)
    return replace(value, term=term)


def _part(term: Term, dim: int, taken: int, start: Any) -> Term | None:
    """So many entries along a dimension."""
    is_known = isinstance(start, Span) and start.stop == start.start + 1
    if isinstance(term, Key):
        if dim >= len(term.along):
            return None
        if is_known:
            return term.part(dim, start.start, start.start + taken)
        path = list(term.path)
        for at in term.along[dim]:  # the key of a number that is a term itself
            step = path[at]
            chosen = plus(start, 1, step.start) if isinstance(step, Span) and taken == 1 else None
            path[at] = UNKNOWN if chosen is None else chosen
        return term._replace(path=tuple(path))
    if isinstance(term, Span) and is_known:
        return Span(term.start + start.start, term.start + start.start + taken)
    if isinstance(term, Listed) and is_known:
        part = Listed(term.values[start.start : start.start + taken])
        return number(part.values[0]) if taken == 1 else part
    if isinstance(term, Root) and start not in (None, UNKNOWN) and not isinstance(start, Key):
        return Root(("part", term.name, dim, taken, start), term.varies | varies(start))
    return None


def _iota(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    shape, dim = equation.params["shape"], equation.params["dimension"]
    term = Span(0, shape[0]) if len(shape) == 1 else None
    return Public(term, 0.0, float(shape[dim] - 1))


def _scaled_term(a: Public, b: Public, slope: int) -> Term | None:
    """`a + slope * b`, where one of them is a known number."""
    one, other = a.term, b.term
    if isinstance(one, Key) or isinstance(other, Key):
        return None
    if isinstance(other, Span) and other.stop == other.start + 1:
        return plus(one, 1, slope * other.start)
    if isinstance(one, Span) and one.stop == one.start + 1:
        return plus(other, slope, one.start)
    return None


def _sum(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    a, b = inputs
    if equation.primitive.name == "sub":
        return _bounds(a.low - b.high, a.high - b.low, _scaled_term(a, b, -1))
    return _bounds(a.low + b.low, a.high + b.high, _scaled_term(a, b, 1))


def _product(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    a, b = inputs
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    term: Term | None = None
    for one, other in ((a.term, b.term), (b.term, a.term)):
        if isinstance(one, Span) and one.stop == one.start + 1 and not isinstance(other, Key):
            term = plus(other, one.start, 0)
    if any(map(math.isnan, ends)):
        return None if term is None else Public(term)
    return _bounds(min(ends), max(ends), term)


def _quotient(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    a, b = inputs
    if b.least == 0 or not jnp.issubdtype(dtype_of(equation.outvars[0]), jnp.floating):
        return None
    ends = [x / y for x in (a.low, a.high) for y in (b.low, b.high)]
    return None if any(map(math.isnan, ends)) else _bounds(min(ends), max(ends))


def _negative(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    term = inputs[0].term
    term = None if isinstance(term, Key) else plus(term, -1, 0)
    return _bounds(-inputs[0].high, -inputs[0].low, term)


def _extreme(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    take = max if equation.primitive.name == "max" else min
    return _bounds(take(x.low for x in inputs), take(x.high for x in inputs))


def _root(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    value = inputs[0]
    return _bounds(math.sqrt(value.low), math.sqrt(value.high)) if value.low >= 0 else None


def _power(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    value, y = inputs[0], equation.params.get("y", 2)
    if value.low < 0 or y < 0 or value.high > 1e100:
        return None
    return _bounds(value.low**y, value.high**y)


def _compared(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    a, b = inputs
    if jnp.issubdtype(dtype_of(equation.invars[0]), jnp.inexact):
        return None  # bounds are not rounded as the program rounds
    is_certain = {
        "lt": (a.high < b.low, a.low >= b.high),
        "le": (a.high <= b.low, a.low > b.high),
        "gt": (a.low > b.high, a.high <= b.low),
        "ge": (a.low >= b.high, a.high < b.low),
        "eq": (a.low == a.high == b.low == b.high, a.high < b.low or b.high < a.low),
        "ne": (a.high < b.low or b.high < a.low, a.low == a.high == b.low == b.high),
    }
    yes, no = is_certain[equation.primitive.name]
    if yes or no:
        return _bounds(float(yes), float(yes))
    dtype = dtype_of(equation.invars[0])
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if equation.primitive.name != "lt" or not is_integer or a.term is None:
        return None
    is_last = b.low == b.high == float(jnp.iinfo(dtype).max)
    return Public(Root(("below the largest", a.term), varies(a.term))) if is_last else None


def _joined_bits(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    """Unsigned numbers with a known bit set are not zero."""
    dtype = dtype_of(equation.outvars[0])
    if not jnp.issubdtype(dtype, jnp.unsignedinteger):
        return None
    least = max(1.0 if x.low == x.high > 0 else 0.0 for x in inputs)
    return _bounds(least, float(jnp.iinfo(dtype).max))


def _selected(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public | None:
    which, *cases = inputs
    if which.low == which.high and 0 <= which.low < len(cases):
        return cases[int(which.low)]
    match which.term:  # a counter that stops at the largest number is a counter
        case Root(("below the largest", (Root() | Affine()) as count), _):
            if cases[-1].term == plus(count, 1, 1):
                return Public(cases[-1].term)
        case _:
            pass
    low, high = min(case.low for case in cases), max(case.high for case in cases)
    terms = {case.term for case in cases}
    return _bounds(low, high, terms.pop() if len(terms) == 1 else None)


_BY_RULE: tuple[tuple[Rule, frozenset[str]], ...] = (
    (_same, UNCHANGED | named("random_clone")),
    (_bounds_alone, named("rev transpose abs reduce_max reduce_min")),
    (_converted, named("convert_element_type")),
    (_laid_out, named("reshape squeeze broadcast_in_dim")),
    (_cut, named("slice dynamic_slice")),
    (_iota, named("iota")),
    (_sum, named("add sub")),
    (_product, named("mul")),
    (_quotient, named("div")),
    (_negative, named("neg")),
    (_extreme, named("max min")),
    (_root, named("sqrt")),
    (_power, named("integer_pow square")),
    (_compared, named("lt le gt ge eq ne")),
    (_joined_bits, named("or")),
    (_selected, named("select_n")),
)

_RULES: dict[str, Rule] = {
    **{name: rule for rule, names in _BY_RULE for name in names},
    **random_keys.RULES,
}
