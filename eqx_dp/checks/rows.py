"""Dimensions: the entries of an equation's operands that an entry of its results depends on.

All facts about dimensions follow from one table, `layout`. A primitive that is not in it has none.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..programs import ENTRY_BY_ENTRY, UNCHANGED, named
from .facts import Fact, Ref
from .flow import shape_of

ALL = -1
"""Along a dimension of the result: each entry is the same function of the whole operand."""

From: TypeAlias = int | None
"""Where a dimension of a result comes from: entry i from entry i of the operand's dimension with
this number, or `ALL`; None: nothing is known."""

Layout: TypeAlias = list[tuple[From, ...]]
"""For each operand: for each dimension of the result, where it comes from."""

_Shape: TypeAlias = tuple[int, ...]
_ENTRIES = ENTRY_BY_ENTRY | UNCHANGED | named("bitcast_convert_type nextafter xor real imag")
_REDUCED = named("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin")


def layout(equation: JaxprEqn) -> Layout | None:
    """Where the dimensions of an equation's results come from; None if that is not known."""
    name = equation.primitive.name
    shapes, shape = [shape_of(v) for v in equation.invars], shape_of(equation.outvars[0])
    all_alike = (ALL,) * len(shape)
    if name in _ENTRIES:
        if any(len(one) not in (0, len(shape)) for one in shapes):
            return None
        same = tuple(range(len(shape)))
        return [same if len(one) == len(shape) else all_alike for one in shapes]
    rule = _RULES.get(name)
    if rule is None:
        return None
    found = rule(equation.params, shapes, shape)
    return [*found, *[all_alike] * (len(shapes) - len(found))]


def _broadcast(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    found: list[From] = [ALL] * len(shape)
    for dim, to in enumerate(params["broadcast_dimensions"]):
        found[to] = dim if shapes[0][dim] == shape[to] else ALL
    return [tuple(found)]


def _reshape(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    """Dimensions of equal length, with equally many entries before them, are the same."""
    before = {(math.prod(shapes[0][:d]), n): d for d, n in enumerate(shapes[0]) if n > 1}
    found = (ALL if n == 1 else before.get((math.prod(shape[:d]), n)) for d, n in enumerate(shape))
    return [(None,) * len(shape) if params.get("dimensions") is not None else tuple(found)]


def _left_out(dims: Any, shapes: list[_Shape]) -> Layout:
    return [tuple(d for d in range(len(shapes[0])) if d not in dims)]


def _cut(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    lengths = enumerate(zip(shapes[0], shape, strict=True))
    return [tuple(d if n == m else None for d, (n, m) in lengths)]


def _but(over: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    return [tuple(None if d in over else d for d in range(len(shape)))] * len(shapes)


def _gather(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    """Batching dimensions are kept, and so are windows as large as the operand."""
    numbers = params["dimension_numbers"]
    found: list[From] = [None] * len(shape)
    of_index: list[From] = [ALL] * len(shape)
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(len(shapes[0])) if d not in dropped]
    for to, dim in zip(numbers.offset_dims, windows, strict=True):
        found[to] = dim if params["slice_sizes"][dim] == shapes[0][dim] else None
    for dim, to in enumerate(d for d in range(len(shape)) if d not in numbers.offset_dims):
        of_index[to], found[to] = dim, ALL
        if dim in numbers.start_indices_batching_dims:
            at = numbers.start_indices_batching_dims.index(dim)
            found[to] = numbers.operand_batching_dims[at]
    return [tuple(found), tuple(of_index)]


_RULES: dict[str, Callable[[Any, list[_Shape], _Shape], Layout]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _cut,
    "dynamic_slice": _cut,
    "gather": _gather,
    "iota": lambda params, shapes, shape: [],
    "transpose": lambda params, shapes, shape: [tuple(params["permutation"])],
    "squeeze": lambda params, shapes, shape: _left_out(params["dimensions"], shapes),
    "unstack": lambda params, shapes, shape: _left_out([params["axis"]], shapes),
    "rev": lambda params, shapes, shape: _but(params["dimensions"], shapes, shape),
    "concatenate": lambda params, shapes, shape: _but([params["dimension"]], shapes, shape),
    **dict.fromkeys(_REDUCED, lambda params, shapes, shape: _left_out(params["axes"], shapes)),
}


def dimensions(equation: JaxprEqn, inputs: list[Fact]) -> dict[str, Any]:
    """The facts about the dimensions of a result: fields of its fact."""
    found = layout(equation)
    if found is None:
        return {}
    own = equation.params["dimension"] if equation.primitive.name == "iota" else None
    count = len(shape_of(equation.outvars[0]))
    places = [
        [_place(fact, one[dim]) for fact, one in zip(inputs, found, strict=True)]
        for dim in range(count)
    ]
    even = (d for d in range(count) if d != own and all(one is _EVEN for one in places[d]))
    return {"even": frozenset(even), "refs": tuple(map(_ref, places))}


_EVEN = "even"


def _place(fact: Fact, place: From) -> Any:
    """What an entry of a result depends on: a row, the same as all others, or unknown (None)."""
    if fact.is_public:
        return _EVEN if place == ALL or place in fact.even else None
    return None if place in (ALL, None) else dict(enumerate(fact.refs)).get(place)


def _ref(places: list[Any]) -> Ref | None:
    """The dimension whose entry i an entry i depends on."""
    refs = {place for place in places if place is not _EVEN}
    return refs.pop() if len(refs) == 1 else None


# Rows taken at indices that are arguments.


def index_of(equation: JaxprEqn, inputs: list[Fact]) -> tuple[Any, ...]:
    """How integers of private arguments can serve as indices: unchanged, or from the end.

    `x[index]` looks up `where(index < 0, index + len(x), index)`.
    """
    name, first = equation.primitive.name, inputs[0] if inputs else Fact()
    number = inputs[1].number if len(inputs) > 1 else None
    by = number.offset if number is not None and number.is_constant else None
    match name, first.indexes:
        case "lt", ("as it is", who) if by == 0:
            return "is negative", who
        case "add", ("as it is", who) if by is not None:
            return "from behind", who, by
        case "select_n", ("is negative", who):
            plain, behind = (fact.indexes for fact in inputs[1:])
            is_so = plain == ("as it is", who) and behind[:2] == ("from behind", who)
            return ("wrapped", who, behind[2]) if is_so else ()
        case (("broadcast_in_dim" | "reshape" | "squeeze" | "copy"), _):
            return first.indexes
        case "convert_element_type", _ if equation.params["new_dtype"] in (jnp.int32, jnp.int64):
            return first.indexes
        case _:
            return ()


def gathered(equation: JaxprEqn, inputs: list[Fact]) -> tuple[Ref | None, ...] | None:
    """Rows at private indices: a row belongs to the example of its index. Indices do not repeat.

    The numbers of indices and rows differ: otherwise entry i of the indices would belong to row i.
    """
    values, index = inputs[0], inputs[1]
    numbers, shape = equation.params["dimension_numbers"], shape_of(equation.outvars[0])
    rows = shape_of(equation.invars[0])[0] if shape_of(equation.invars[0]) else 0
    is_row = tuple(numbers.start_index_map) == (0,) and equation.params["slice_sizes"][0] == 1
    is_known = index.indexes[:1] == ("as it is",)
    is_known |= index.indexes[:1] == ("wrapped",) and index.indexes[2] == rows
    is_whole = values.refs[:1] == (Ref(rows, 0),) and Ref(rows, 0) not in index.refs
    if not (is_row and is_known and is_whole and not numbers.operand_batching_dims):
        return None
    refs: list[Ref | None] = [None] * len(shape)
    for dim, to in enumerate(d for d in range(len(shape)) if d not in numbers.offset_dims):
        refs[to] = index.refs[dim]
    return tuple(refs)
