"""Rows: the entries of an equation's operands that an entry of its results depends on.

All facts about dimensions follow from one table. A primitive that is not in it has none.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn

from ..programs import ENTRY_BY_ENTRY, UNCHANGED, named
from .facts import EVEN, Fact, Place, Row, met
from .variables import shape_of

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


_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin"
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ENTRY_BY_ENTRY | UNCHANGED | named("nextafter xor real imag"), _entries),
    "broadcast_in_dim": _broadcast,
    "slice": _cut,
    "dynamic_slice": _cut,
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
    "transpose": lambda params, shapes, shape: [params["permutation"]],
}


def places_of(equation: JaxprEqn, variable: Any, inputs: Sequence[Fact]) -> tuple[Place, ...]:
    """What entries of a result depend on."""
    name, shape = equation.primitive.name, shape_of(variable)
    shapes = [shape_of(operand) for operand in equation.invars]
    if name == "reshape":
        return _reshaped(inputs[0], shapes[0], shape)
    if name not in _RULES:
        is_public = all(fact.is_public for fact in inputs)
        return tuple(EVEN if n == 1 and is_public else None for n in shape)
    found = [*_RULES[name](equation.params, shapes, shape)]
    found += [(ALL,) * len(shape)] * (len(shapes) - len(found))  # indices, and what pads
    pairs = [*zip(inputs, found, strict=True)]
    return tuple(met(_place(fact, of[dim]) for fact, of in pairs) for dim in range(len(shape)))


def _place(fact: Fact, at: From) -> Place:
    """What an operand brings to entries along a dimension of the result."""
    if at == ALL:
        return EVEN if fact.is_public else None
    return None if at is None else dict(enumerate(fact.places)).get(at)


def _reshaped(fact: Fact, before: _Shape, after: _Shape) -> tuple[Place, ...]:
    """Dimensions in front stay what they are, and the first that differs may be divided in two.

    Only what follows rows as a whole may be anything: entries are in their order.
    """
    if fact.is_public and fact.places == (EVEN,) * len(before):
        return (EVEN,) * len(after)
    pairs = enumerate(zip(before, after, strict=False))
    kept = next((d for d, (n, m) in pairs if n != m), min(len(before), len(after)))
    found = [*fact.places[:kept], *[None] * (len(after) - kept)]
    row, halves = dict(enumerate(fact.places)).get(kept), after[kept : kept + 2]
    if isinstance(row, Row) and not row.part and math.prod(halves) == before[kept]:
        found[kept : kept + 2] = [row._replace(part=(*halves, i)) for i in range(len(halves))]
    return tuple(found)


def sliced(places: Sequence[Place], loop: Hashable) -> tuple[Place, ...]:
    """What an entry along the first dimension depends on, in a turn of a loop."""
    first, *others = places or (None,)

    def turned(place: Place) -> Place:
        if not isinstance(place, Row) or not isinstance(first, Row):
            return place
        is_whole = not place.part and not place.turns
        is_stack = is_whole and place.dim == 1 and first == place._replace(dim=0)
        is_part = bool(first.part) and place.part[:2] == first.part[:2] and place != first
        is_part = is_part and first == place._replace(part=first.part)
        return place._replace(turns=(*place.turns, loop)) if is_stack or is_part else None

    return tuple(map(turned, others))
