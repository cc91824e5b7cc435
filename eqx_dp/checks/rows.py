"""Rows: the entries of an equation's operands that an entry of its results depends on.

All facts about dimensions follow from one table, `layout`. A primitive that is not in it has none.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from jax.extend.core import JaxprEqn

from ..programs import ENTRY_BY_ENTRY, UNCHANGED, named
from .facts import EVEN, Fact, Place, Row, met
from .flow import shape_of

# Layouts.

ALL = -1
"""Along a dimension of the result: each entry is the same function of the whole operand."""

From: TypeAlias = int | None
"""Where a dimension of a result comes from: entry i from entry i of the operand's dimension with
this number, or `ALL`; None: nothing is known."""

Layout: TypeAlias = Sequence[Sequence[From]]
"""For each operand: for each dimension of the result, where it comes from."""

_Shape: TypeAlias = tuple[int, ...]
_Rule: TypeAlias = Callable[[Any, list[_Shape], _Shape], Layout]


def layout(equation: JaxprEqn, shape: _Shape) -> Layout | None:
    """Where the dimensions of an equation's result come from; None if that is not known."""
    rule, shapes = _RULES.get(equation.primitive.name), [shape_of(v) for v in equation.invars]
    if rule is None:
        return None
    found = rule(equation.params, shapes, shape)
    return [*found, *[(ALL,) * len(shape)] * (len(shapes) - len(found))]


def _mixed(param: str) -> _Rule:
    """Entries meet along the dimensions that a parameter names."""
    return lambda params, shapes, shape: _but(_dims(params[param]), shapes, shape)


def _left_out(param: str) -> _Rule:
    """The result lacks the dimensions that a parameter names."""
    return lambda params, shapes, shape: [
        [d for d in range(len(shapes[0])) if d not in _dims(params[param])]
    ]


def _dims(given: Any) -> tuple[int, ...]:
    return tuple(np.ravel(given).tolist())  # one number, of NumPy too, or several


def _entries(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    """Operands are scalars, or of the result's shape."""
    return [[d if one else ALL for d in range(len(shape))] for one in shapes]


def _broadcast(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    found: list[From] = [ALL] * len(shape)
    for dim, to in enumerate(params["broadcast_dimensions"]):
        found[to] = dim if shapes[0][dim] == shape[to] else ALL
    return [found]


def _cut(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    lengths = enumerate(zip(shapes[0], shape, strict=True))
    return [[d if n == m else None for d, (n, m) in lengths]]


def _but(over: Sequence[int], shapes: list[_Shape], shape: _Shape) -> Layout:
    return [[None if d in over else d for d in range(len(shape))]] * len(shapes)


def _pad(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    padded = [d for d, edges in enumerate(params["padding_config"]) if any(edges)]
    return _but(padded, shapes[:1], shape)


def _stack(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    axis, dims = params["axis"], range(len(shape))
    return [[None if d == axis else d - (d > axis) for d in dims]] * len(shapes)


def _product(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    """Batch dimensions come first, then those of the left side, then those of the right."""
    contracted, batch = params["dimension_numbers"]
    free = [
        [d for d in range(len(shapes[i])) if d not in (*contracted[i], *batch[i])] for i in (0, 1)
    ]
    left, right = [ALL] * len(free[0]), [ALL] * len(free[1])
    return [[*batch[0], *free[0], *right], [*batch[1], *left, *free[1]]]


def _convolution(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    numbers, is_plain = params["dimension_numbers"], params["batch_group_count"] == 1
    of_image: list[From] = [None] * len(shape)
    of_kernel: list[From] = [None] * len(shape)
    if is_plain:
        of_image[numbers.out_spec[0]], of_kernel[numbers.out_spec[0]] = numbers.lhs_spec[0], ALL
    return [of_image, of_kernel]


def _gather(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    """Windows as large as the operand are kept; other entries are looked up in all of it."""
    numbers = params["dimension_numbers"]
    of_table: list[From] = [ALL] * len(shape)
    of_index: list[From] = [ALL] * len(shape)
    if numbers.operand_batching_dims:
        return [[None] * len(shape)] * 2
    windows = [d for d in range(len(shapes[0])) if d not in numbers.collapsed_slice_dims]
    for to, dim in zip(numbers.offset_dims, windows, strict=True):
        of_table[to] = dim if params["slice_sizes"][dim] == shapes[0][dim] else None
    for dim, to in enumerate(d for d in range(len(shape)) if d not in numbers.offset_dims):
        of_index[to] = dim
    return [of_table, of_index]


_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin"
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ENTRY_BY_ENTRY | UNCHANGED | named("nextafter xor real imag"), _entries),
    "broadcast_in_dim": _broadcast,
    "slice": _cut,
    "dynamic_slice": _cut,
    "gather": _gather,
    "stack": _stack,
    "pad": _pad,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(named("cumsum cumprod cummax cummin cumlogsumexp split"), _mixed("axis")),
    **dict.fromkeys(named("concatenate sort"), _mixed("dimension")),
    "rev": _mixed("dimensions"),
    **dict.fromkeys(named(_REDUCTIONS), _left_out("axes")),
    "squeeze": _left_out("dimensions"),
    "unstack": _left_out("axis"),
    "iota": lambda params, shapes, shape: [],
    "transpose": lambda params, shapes, shape: [params["permutation"]],
}


def places_of(equation: JaxprEqn, variable: Any, inputs: Sequence[Fact]) -> tuple[Place, ...]:
    """What entries of a result depend on."""
    name, shape = equation.primitive.name, shape_of(variable)
    if name == "reshape":
        return _reshaped(inputs[0], shape_of(equation.invars[0]), shape)
    found = layout(equation, shape)
    if found is None:
        return (None,) * len(shape)
    own = equation.params["dimension"] if name == "iota" else None
    return tuple(
        None
        if dim == own
        else met(_place(fact, of[dim]) for fact, of in zip(inputs, found, strict=True))
        for dim in range(len(shape))
    )


def _place(fact: Fact, at: From) -> Place:
    """What an operand brings to entries along a dimension of the result."""
    if at == ALL:
        return EVEN if fact.is_public else None
    return None if at is None else dict(enumerate(fact.places)).get(at)


def _reshaped(fact: Fact, before: _Shape, after: _Shape) -> tuple[Place, ...]:
    """Dimensions of equal length, with equally many entries before them, are the same.

    Rows may be divided in two dimensions.
    """
    places = fact.places
    if fact.is_public and places == (EVEN,) * len(before):
        return (EVEN,) * len(after)
    # By the number of entries before a dimension, and its length.
    known = {
        (math.prod(before[:d]), n): place
        for d, (n, place) in enumerate(zip(before, places, strict=False))
    }
    known = {at: place for at, place in known.items() if at[1] > 1}
    for (start, n), place in [*known.items()]:
        for m in {*after} if isinstance(place, Row) and not place.part else ():
            halves = (start, m), (start * m, n // max(1, m))
            if 1 < m < n and n % m == 0 and not known.keys() & {*halves}:
                for i, half in enumerate(halves):
                    known[half] = cast("Row", place)._replace(part=(m, n // m, i))
    return tuple(
        EVEN if fact.is_public and n == 1 else known.get((math.prod(after[:d]), n))
        for d, n in enumerate(after)
    )


def sliced(places: Sequence[Place], loop: Hashable) -> tuple[Place, ...]:
    """What an entry along the first dimension depends on, in a turn of a loop."""
    first, *others = places or (None,)

    def turned(place: Place) -> Place:
        if not isinstance(place, Row) or not isinstance(first, Row):
            return place
        is_stack = not first.part and (first.dim, place.dim, place.turns) == (0, 1, ())
        is_part = bool(first.part) and place.part != first.part
        is_part = is_part and place._replace(part=()) == first._replace(part=())
        is_part = is_part and place.part[:2] == first.part[:2]
        is_other = first.length == place.length and (is_stack or is_part)
        return place._replace(turns=(*place.turns, loop)) if is_other else None

    return tuple(map(turned, others))
