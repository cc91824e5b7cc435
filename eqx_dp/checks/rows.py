"""Dimensions: which entries of an equation's operands an entry of its results is made of.

Everything that is known of dimensions follows from one table, `layout`. Of a primitive that is not
in it nothing is known.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.extend.core as jex_core
import jax.numpy as jnp

from ..programs import COLLECTIVES, ENTRY_BY_ENTRY, UNCHANGED, named
from .facts import Alike, Cut, Fact, Kind, Ref, union
from .flow import shape_of
from .keys import Number


class Some(NamedTuple):
    """Along a dimension of the result: entries of a dimension of the operand, at other places."""

    dim: int


ALL = -1
"""Along a dimension of the result: each entry is made of all of the operand in the same way."""

From: TypeAlias = int | Some | None
"""Where a dimension of a result comes from: entry i from entry i of the operand's dimension with
this number; or one of the above; None: nothing is known."""

Layout: TypeAlias = list[tuple[From, ...]]
"""For each operand: for each dimension of the result, where it comes from."""

ENTRIES = (
    ENTRY_BY_ENTRY
    | UNCHANGED
    | named(
        """bitcast_convert_type imag nextafter real shift_left shift_right_arithmetic
        shift_right_logical xor"""
    )
)
_REDUCTIONS = named(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
)
_SCANS = named("cumsum cumprod cummax cummin cumlogsumexp rev")


def layout(equation: jex_core.JaxprEqn) -> Layout | None:
    """Where the dimensions of an equation's results come from; None if that is not known."""
    name = equation.primitive.name
    if not equation.outvars:
        return None
    shapes, shape = [shape_of(v) for v in equation.invars], shape_of(equation.outvars[0])
    if name in ENTRIES or name in COLLECTIVES - {"all_to_all", "all_gather", "reduce_scatter"}:
        if any(len(one) not in (0, len(shape)) for one in shapes):
            return None
        return [_same(one) if len(one) == len(shape) else (ALL,) * len(shape) for one in shapes]
    rule = _RULES.get(name)
    return None if rule is None else rule(equation.params, shapes, shape)


def _same(shape: Sequence[int]) -> tuple[From, ...]:
    return tuple(range(len(shape)))


_Shape: TypeAlias = tuple[int, ...]


def _broadcast(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    found: list[From] = [ALL] * len(shape)
    for dim, to in enumerate(params["broadcast_dimensions"]):
        found[to] = dim if shapes[0][dim] == shape[to] else ALL
    return [tuple(found), *[(ALL,) * len(shape)] * (len(shapes) - 1)]


def _reduce(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    kept = [d for d in range(len(shapes[0])) if d not in params["axes"]]
    return [tuple(kept)] * len(shapes)


def _scan(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    over = params["dimensions"] if "dimensions" in params else (params["axis"],)
    # What is turned round has its entries at other places.
    moved = Some if "dimensions" in params else _nowhere
    return [tuple(moved(d) if d in over else d for d in range(len(shape)))]


def _nowhere(dim: int) -> None:
    del dim


def _reshape(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout | None:
    """Dimensions that are as long, with as many entries before them, are the same ones."""
    if params.get("dimensions") is not None:
        return None
    before = {(math.prod(shapes[0][:d]), n): d for d, n in enumerate(shapes[0]) if n > 1}
    return [
        tuple(ALL if n == 1 else before.get((math.prod(shape[:d]), n)) for d, n in enumerate(shape))
    ]


def _squeeze(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    return [tuple(d for d in range(len(shapes[0])) if d not in params["dimensions"])]


def _slice(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    found = tuple(
        d if n == m else Some(d) for d, (n, m) in enumerate(zip(shapes[0], shape, strict=True))
    )
    return [found, *[(ALL,) * len(shape)] * (len(shapes) - 1)]


def _update(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    sizes = zip(shapes[1], shape, strict=True)
    found = tuple(d if n == m else None for d, (n, m) in enumerate(sizes))
    return [found, found, *[(ALL,) * len(shape)] * (len(shapes) - 2)]


def _join(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    found = tuple(None if d == params["dimension"] else d for d in range(len(shape)))
    return [found] * len(shapes)


def _stack(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    axis = params["axis"]
    found = tuple(None if d == axis else d - (d > axis) for d in range(len(shape)))
    return [found] * len(shapes)


def _unstack(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    return [tuple(d + (d >= params["axis"]) for d in range(len(shape)))]


def _split(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    return [tuple(Some(d) if d == params["axis"] else d for d in range(len(shape)))]


def _pad(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    padded = enumerate(params["padding_config"])
    return [tuple(d if lows == (0, 0, 0) else None for d, lows in padded), (ALL,) * len(shape)]


def _sort(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    found = tuple(None if d == params["dimension"] else d for d in range(len(shape)))
    return [found] * len(shapes)


def _top_k(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    axis = params.get("axis", len(shape) - 1) % len(shape)
    return [tuple(None if d == axis else d for d in range(len(shape)))]


def _contraction(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    (over, over_other), (batch, batch_other) = params["dimension_numbers"]
    free = [d for d in range(len(shapes[0])) if d not in (*over, *batch)]
    others = [d for d in range(len(shapes[1])) if d not in (*over_other, *batch_other)]
    left = (*batch, *free, *[ALL] * len(others))
    return [left, (*batch_other, *[ALL] * len(free), *others)]


def _convolution(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    numbers = params["dimension_numbers"]
    found: list[From] = [None] * len(shape)
    kernel: list[From] = [None] * len(shape)
    if params["batch_group_count"] == 1:
        found[numbers.out_spec[0]] = numbers.lhs_spec[0]
        kernel[numbers.out_spec[0]] = ALL
    return [tuple(found), tuple(kernel)]


def _window(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    is_one = zip(params["window_dimensions"], shapes[0], shape, strict=True)
    return [tuple(d if w == 1 and n == m else None for d, (w, n, m) in enumerate(is_one))]


def _gather(params: Any, shapes: list[_Shape], shape: _Shape) -> Layout:
    """Batching dimensions go along; windows as large as the operand stay as they are."""
    numbers = params["dimension_numbers"]
    found: list[From] = [None] * len(shape)
    of_index: list[From] = [ALL] * len(shape)
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(len(shapes[0])) if d not in dropped]
    for to, dim in zip(numbers.offset_dims, windows, strict=True):
        found[to] = dim if params["slice_sizes"][dim] == shapes[0][dim] else Some(dim)
    batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    for dim, to in enumerate(batch):
        of_index[to] = dim
        found[to] = ALL
        if dim in numbers.start_indices_batching_dims:
            at = numbers.start_indices_batching_dims.index(dim)
            found[to] = numbers.operand_batching_dims[at]
    return [tuple(found), tuple(of_index)]


_RULES: dict[str, Callable[[Any, list[_Shape], _Shape], Layout | None]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": lambda params, shapes, shape: [tuple(params["permutation"])],
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _slice,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _update,
    "concatenate": _join,
    "stack": _stack,
    "unstack": _unstack,
    "split": _split,
    "pad": _pad,
    "sort": _sort,
    "top_k": _top_k,
    "dot_general": _contraction,
    "conv_general_dilated": _convolution,
    "reduce_window_sum": _window,
    "reduce_window_max": _window,
    "gather": _gather,
    "iota": lambda params, shapes, shape: [],
    "random_wrap": lambda params, shapes, shape: [_same(shape)],
    "random_unwrap": lambda params, shapes, shape: [_same(shape)],
    "random_fold_in": lambda params, shapes, shape: [_same(shape), _same(shape)],
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_SCANS, _scan),
}


def dimensions(equation: jex_core.JaxprEqn, found: Layout, inputs: list[Fact]) -> dict[str, Any]:
    """What is known of the dimensions of a result: fields of its fact."""
    even, alike, refs = set[int](), set[Alike](), list[Ref | None]()
    is_apart = all(fact.kind is not Kind.SUM for fact in inputs)
    for dim in range(len(shape_of(equation.outvars[0]))):
        places = [(fact, one[dim]) for fact, one in zip(inputs, found, strict=True)]
        of_iota = equation.primitive.name == "iota" and dim == equation.params["dimension"]
        if all(_is_even(*place) for place in places) and not of_iota:
            even.add(dim)
        drawn = _drawn_alike(dim, places)
        known = [_is_even(*p) or bool(_alike(*p)) for p in places if p[0].is_public]
        if drawn is not None and all(known):
            alike |= drawn
        is_ref = is_apart and drawn is not None and all(known)
        refs.append(_ref(places) if is_ref else None)
    return {
        "even": frozenset(even),
        "alike": frozenset(alike),
        "refs": tuple(refs),
        "cuts": union(fact.cuts for fact in inputs),
    }


def _is_even(fact: Fact, place: From) -> bool:
    return fact.is_public and (
        place == ALL or (place.dim if isinstance(place, Some) else place) in fact.even
    )


def _alike(fact: Fact, place: From) -> frozenset[Alike]:
    return frozenset(one for one in fact.alike if one.dim == place)


def _drawn_alike(dim: int, places: list[tuple[Fact, From]]) -> set[Alike] | None:
    """Draws of which an entry has its own; None if their entries meet in another way, too."""
    own = {(one.draw, one.of) for place in places for one in _alike(*place)}
    draws = {draw for draw, _ in own}
    others = union(f.draws - {one.draw for one in _alike(f, place)} for f, place in places)
    if len(draws) < len(own) or draws & others:
        return None
    return {Alike(dim, draw, of) for draw, of in own}


def _ref(places: list[tuple[Fact, From]]) -> Ref | None:
    """Whose entry i an entry i is made of."""
    refs = set[Any]()
    for fact, place in places:
        if not fact.is_public:
            at = place if isinstance(place, int) else ALL
            ref = fact.refs[at] if 0 <= at < len(fact.refs) else None
            refs.add(None if ref is None else (ref, outer(fact.cuts, ref)))
    known = refs.pop() if len(refs) == 1 else None
    return known and known[0]


def outer(cuts: frozenset[Cut], ref: Ref) -> frozenset[Cut]:
    """Which part of the arguments an entry along a dimension belongs to."""
    return frozenset(
        cut for cut in cuts if cut.ref.group == ref.group and (*cut.ref[1:],) <= (*ref[1:],)
    )


def taken_once(
    fact: Fact, before: _Shape, after: _Shape, starts: Sequence[int | None]
) -> frozenset[Cut]:
    """The parts that a slice is made of: along some dimensions one entry."""
    return fact.cuts | {
        Cut(ref, "at", start)
        for ref, n, m, start in zip(fact.refs, before, after, starts, strict=False)
        if n > m == 1 and ref is not None and start is not None
    }


# Rows taken at indices that are arguments.


def index_of(equation: jex_core.JaxprEqn, inputs: list[Fact]) -> tuple[Any, ...]:
    """How integers of private arguments can serve as indices: as they are, or counted from behind.

    `x[index]` looks up `where(index < 0, index + len(x), index)`.
    """
    name, first = equation.primitive.name, inputs[0] if inputs else Fact()
    number = inputs[1].number if len(inputs) > 1 else None
    match name, first.indexes:
        case "lt", ("as it is", who) if number == Number(None, 0):
            return "is negative", who
        case "add", ("as it is", who) if number is not None and number == (None, number[1], ()):
            return "from behind", who, number.offset
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


def gathered(equation: jex_core.JaxprEqn, inputs: list[Fact], found: Fact) -> Fact:
    """Rows that private indices say: whose index it is, whose row. Indices do not repeat."""
    values, index = inputs[0], inputs[1]
    numbers = equation.params["dimension_numbers"]
    rows = shape_of(equation.invars[0])[0] if shape_of(equation.invars[0]) else 0
    is_row = tuple(numbers.start_index_map) == (0,) and equation.params["slice_sizes"][0] == 1
    is_known = index.indexes[:1] == ("wrapped",) and index.indexes[2] == rows
    is_known |= index.indexes[:1] == ("as it is",)
    is_whole = values.refs[:1] == (Ref(rows, 0),) and not values.cuts
    if not (is_row and is_known and is_whole and not numbers.operand_batching_dims):
        return found
    batch = [d for d in range(len(shape_of(equation.outvars[0]))) if d not in numbers.offset_dims]
    refs: list[Ref | None] = [None] * len(shape_of(equation.outvars[0]))
    for dim, to in enumerate(batch):
        refs[to] = index.refs[dim]
    return found._replace(refs=tuple(refs), cuts=index.cuts)
