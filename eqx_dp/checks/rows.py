"""How rows of private data stay apart on their way to the engine."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.extend.core as jex_core
from jax.extend.core.primitives import (
    dynamic_slice_p,
    gather_p,
    reshape_p,
    slice_p,
    squeeze_p,
)

from ..isolation import Apart, Dependence, Follow, Mixed, Shared, shape_of
from .terms import is_given, is_of_argument
from .values import Cut, Private, Public, Random, Rows, Sum, Value


def of_argument(shape: Sequence[int]) -> frozenset[Rows]:
    """Those of an argument. Along which dimension the examples are, the engine's call will tell."""
    return frozenset(
        Rows(("axis", dim, length), dim, 1, length) for dim, length in enumerate(shape) if length
    )


class Places(NamedTuple):
    """Where an equation cuts an array, or looks up what is in it, by public indices.

    Attributes:
        indices: what they are: equal for equal indices.
        loops: those in which they change from turn to turn.
        own_turn: from a dimension, the length of what is cut and its own, to the loop whose turns
            cut it into parts, one after the other.
    """

    indices: Hashable
    loops: frozenset[Hashable]
    own_turn: Callable[[int, int, int], Hashable | None]


def moved(
    equation: jex_core.JaxprEqn, inputs: list[Value], places: Places
) -> list[tuple[frozenset[Rows], frozenset[Cut]]]:
    """The rows of each result of an equation that holds no program, and which they are."""
    private = [value for value in inputs if isinstance(value, Private)]
    cuts = frozenset[Cut].intersection(*(value.cuts for value in private))
    found = _cut(equation, inputs, places)
    if found is not None:
        rows, more = found
        return [(rows, cuts | more)] * len(equation.outvars)
    value = inputs[0]
    if equation.primitive.name == "unstack" and isinstance(value, Private):
        return _unstacked(equation, value)
    rules = _reshaped if equation.primitive is reshape_p else _followed
    return [(rows, cuts) for rows in rules(equation, inputs)]


def sliced(rows: frozenset[Rows], loop: Hashable) -> tuple[frozenset[Rows], frozenset[Cut]]:
    """What a turn of a loop sees of an array whose first dimension it goes over."""
    own = [row for row in rows if row.dim == 0]
    cuts = frozenset(Cut(row.axis, loop, None) for row in own)
    return frozenset(row._replace(dim=row.dim - 1) for row in rows if row.dim), cuts


def of_batch(cuts: frozenset[Cut], own: Rows) -> frozenset[Cut]:
    """Cuts as the engine's examples see them, which stand along one axis.

    What cuts another axis chooses a batch, among several that stand side by side.
    """
    return frozenset(
        cut
        if _root(cut.axis) == _root(own.axis)
        else Cut(cut.axis, ("batch", cut.start, cut.stop), None)
        if isinstance(cut.start, int)
        else Cut(cut.axis, ("sample", cut.start), None)
        for cut in cuts
    )


def is_of_examples(own: Rows, cuts: frozenset[Cut]) -> bool:
    """Whether rows stand along the first dimension of arguments, but for those that were cut."""
    root: Any = _root(own.axis)
    if root[0] != "axis":
        return True
    cut: list[Any] = [_root(cut.axis) for cut in cuts]
    return set(range(root[1])) <= {axis[1] for axis in cut if axis[0] == "axis"}


def _root(axis: Any) -> Hashable:
    """The axis of an argument that another one was made from."""
    if axis[0] == "axis":
        return axis
    return tuple(map(_root, axis[1])) if axis[0] == "together" else _root(axis[1])


def _followed(equation: jex_core.JaxprEqn, inputs: list[Value]) -> list[frozenset[Rows]]:
    """By the rules that the engine itself follows examples by, axis by axis."""
    axes = {
        (row.axis, row.num_rows)
        for value in inputs
        if isinstance(value, Private)
        for row in value.rows
    }
    results: list[set[Rows]] = [set() for _ in equation.outvars]
    for axis, count in axes:
        facts = [_dependence(equation, value, axis) for value in inputs]
        follow = Follow(max(count, 2), trusts=False)
        for rows, fact in zip(results, follow.equation(equation, facts), strict=True):
            if isinstance(fact, Apart):
                rows.add(Rows(axis, fact.dim, fact.inner, count))
    return list(map(frozenset, results))


def _dependence(equation: jex_core.JaxprEqn, value: Value, axis: Hashable) -> Dependence:
    if not isinstance(value, Private):
        return Shared()
    own = [row for row in value.rows if row.axis == axis]
    return Apart(own[0].dim, own[0].inner) if len(own) == 1 else Mixed(equation)


def _cut(
    equation: jex_core.JaxprEqn, inputs: list[Value], places: Places
) -> tuple[frozenset[Rows], frozenset[Cut]] | None:
    """What is left where an equation takes some rows; None where it takes all, or combines them."""
    value, primitive = inputs[0], equation.primitive
    if primitive is gather_p and isinstance(value, Private):
        return _looked_up(equation, value, inputs[1], places)
    if not isinstance(value, Private) or not all(isinstance(x, Public) for x in inputs[1:]):
        return None
    before = shape_of(equation.invars[0])
    if primitive is squeeze_p:
        gone = [dim % len(before) for dim in equation.params["dimensions"]]
        rows = (
            row._replace(dim=row.dim - sum(dim < row.dim for dim in gone))
            for row in value.rows
            if row.dim not in gone
        )
        return frozenset(rows), frozenset()
    if primitive is slice_p or primitive is dynamic_slice_p:
        return _sliced(equation, value, places)
    return None


def _sliced(
    equation: jex_core.JaxprEqn, value: Private, places: Places
) -> tuple[frozenset[Rows], frozenset[Cut]] | None:
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    strides = equation.params.get("strides")
    strides = None if strides is None or set(strides) <= {1} else strides
    starts = equation.params.get("start_indices")
    rows, cuts = set[Rows](), set[Cut]()
    for row in value.rows:
        if before[row.dim] == after[row.dim]:
            rows.add(row)
            continue
        if row.inner != 1 or row.num_rows != before[row.dim]:
            continue
        length = after[row.dim]
        if starts is None or strides is not None:  # somewhere
            at = places.indices[row.dim] if isinstance(places.indices, tuple) else places.indices
            where = (starts[row.dim], strides[row.dim]) if starts and strides else at
            axis: Hashable = ("taken", row.axis, where, length)
            loop = places.own_turn(row.dim, length, row.num_rows) if starts is None else None
            windows = ("windows", row.axis, length)
            cuts |= _samples(row.axis, places) if loop is None else {Cut(windows, loop, None)}
        else:
            start = int(starts[row.dim])
            axis = ("cut", row.axis, start, start + length)
            cuts.add(Cut(row.axis, start, start + length))
        rows.add(Rows(axis, row.dim, 1, length))
    return frozenset(rows), frozenset(cuts)


def _unstacked(
    equation: jex_core.JaxprEqn, value: Private
) -> list[tuple[frozenset[Rows], frozenset[Cut]]]:
    """Entries along a dimension, each by itself."""
    axis = equation.params["axis"]
    own = [row.axis for row in value.rows if row.dim == axis]
    rows = frozenset(
        row._replace(dim=row.dim - (row.dim > axis)) for row in value.rows if row.dim != axis
    )
    return [
        (rows, value.cuts | {Cut(name, i, i + 1) for name in own})
        for i in range(len(equation.outvars))
    ]


def _samples(axis: Hashable, places: Places) -> set[Cut]:
    """What is taken in each turn of a loop is another sample of the rows."""
    return {Cut(axis, ("sample", loop), None) for loop in places.loops} or {Cut(axis, 0, 0)}


def _looked_up(
    equation: jex_core.JaxprEqn, value: Private, index: Value, places: Places
) -> tuple[frozenset[Rows], frozenset[Cut]] | None:
    """Whole rows, by their indices in the first dimension."""
    numbers = equation.params["dimension_numbers"]
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    sizes = equation.params["slice_sizes"]
    is_of_rows = (
        tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(sizes) == (1, *before[1:])
    )
    if not is_of_rows:
        return None
    if may_repeat(equation, [value, index]):
        return frozenset(), frozenset()  # a row that is taken twice counts twice
    looked_up = [dim for dim in range(len(after)) if dim not in numbers.offset_dims]
    rows = {
        row._replace(dim=int(numbers.offset_dims[row.dim - 1])) for row in value.rows if row.dim
    }
    cuts = set[Cut]()
    for row in value.rows:
        if row.dim == 0:
            if not isinstance(index, Public) or not is_of_argument(index.term) or places.loops:
                cuts |= _samples(row.axis, places)
            for dim, at in enumerate(looked_up):
                axis: Hashable = ("taken", row.axis, places.indices, dim)
                if isinstance(index, Private):  # what belongs to an index belongs to its row
                    own = [row for row in index.rows if row.dim == dim]
                    if len(own) != 1:
                        continue
                    axis, cuts = own[0].axis, cuts | index.cuts
                rows.add(Rows(axis, at, 1, after[at]))
    return frozenset(rows), frozenset(cuts)


def may_repeat(equation: jex_core.JaxprEqn, inputs: list[Value]) -> bool:
    """Whether an equation takes rows by public indices, of which some may be equal."""
    index = inputs[1] if len(inputs) > 1 else None
    if equation.primitive is not gather_p or not isinstance(index, Public):
        return False
    # Behind the last row is the last, as often as one asks.
    is_inside = 0 <= index.low <= index.high < shape_of(equation.invars[0])[0]
    return not (is_given(index.term) and (is_inside or is_of_argument(index.term)))


def by_slot(equation: jex_core.JaxprEqn, inputs: list[Value], kept: frozenset[Rows]) -> bool:
    """Whether rows are combined with constants that differ from slot to slot."""
    if equation.primitive in (gather_p, dynamic_slice_p):
        return False
    after = shape_of(equation.outvars[0])
    return any(
        isinstance(value, Public)
        and len(shape_of(variable)) == len(after)
        and any(row.dim in value.along for row in kept if row.dim == 0)
        for value, variable in zip(inputs, equation.invars, strict=True)
    )


def _reshaped(equation: jex_core.JaxprEqn, inputs: list[Value]) -> list[frozenset[Rows]]:
    """Dimensions are put together, or one is taken apart; else as the engine follows them."""
    value = inputs[0]
    if not isinstance(value, Private) or equation.params["dimensions"] is not None:
        return _followed(equation, inputs)
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    rows = set[Rows]()
    for olds, news in _groups(before, after):
        own = {
            row.dim: row
            for row in value.rows
            if row.dim in olds and row.inner == 1 and row.num_rows == before[row.dim]
        }
        if not olds or set(own) < {dim for dim in olds if before[dim] > 1}:
            continue
        if len(olds) == 1 and len(news) == 1:
            rows.add(own[olds[0]]._replace(dim=news[0]))
        elif len(olds) == 1:
            sizes = tuple(after[dim] for dim in news)
            for i, dim in enumerate(news):
                axis = ("split", own[olds[0]].axis, sizes, i)
                rows.add(Rows(axis, dim, 1, after[dim]))
        elif len(news) == 1:
            rows.add(
                Rows(_together([own[d] for d in olds if d in own]), news[0], 1, after[news[0]])
            )
    return [frozenset(rows) or _followed(equation, inputs)[0]]


def _together(rows: list[Rows]) -> Hashable:
    """The axis of rows along several dimensions; of one that was taken apart, as it was."""
    axes: list[Any] = [row.axis for row in rows]
    first = axes[0]
    if first[0] == "split" and axes == [(*first[:3], i) for i in range(len(first[2]))]:
        return first[1]
    return axes[0] if len(axes) == 1 else ("together", tuple(axes))


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The fewest dimensions of two shapes that hold the same entries, in order."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        olds, news = [i] * (i < len(before)), [j] * (j < len(after))
        i, j = i + len(olds), j + len(news)
        while math.prod(before[d] for d in olds) != math.prod(after[d] for d in news):
            is_behind = math.prod(before[d] for d in olds) < math.prod(after[d] for d in news)
            if is_behind and i < len(before):
                olds.append(i)
                i += 1
            elif j < len(after):
                news.append(j)
                j += 1
            else:
                return []
        groups.append((olds, news))
    return groups


def on_devices(value: Value, spec: Any, lengths: Mapping[str, int]) -> Value:
    """What a device sees of an array, in a `shard_map`."""
    if not isinstance(value, Private):
        return value
    found, cuts = set[Rows](), set(value.cuts)
    for row in value.rows:
        axes = _axes(spec, row.dim)
        if axes:
            cuts.add(Cut(row.axis, ("devices", axes), None))
            count = row.num_rows // math.prod(lengths[axis] for axis in axes)
            found.add(row._replace(axis=("devices", row.axis, axes), num_rows=count))
        else:
            found.add(row)
    return replace(value, rows=frozenset(found), cuts=frozenset(cuts))


def off_devices(value: Value, spec: Any, lengths: Mapping[str, int]) -> Value:
    """What the parts of devices are, put together: of what is not cut, as many copies."""
    along = {axis for dim in range(len(spec)) for axis in _axes(spec, dim)}
    if isinstance(value, Random) and along:
        return Public(noise=value.draws)
    if isinstance(value, Sum):
        return value.scaled(math.sqrt(math.prod(lengths[axis] for axis in along - value.spread)))
    if not isinstance(value, Private):
        return value
    found = set[Rows]()
    for row in value.rows:
        axes, axis = _axes(spec, row.dim), row.axis
        if not axes:
            found.add(row)
        elif isinstance(axis, tuple) and axis[0] == "devices" and axis[2] == axes:
            count = row.num_rows * math.prod(lengths[axis] for axis in axes)
            found.add(row._replace(axis=axis[1], num_rows=count))
    return replace(value, rows=frozenset(found))


def _axes(spec: Any, dim: int) -> tuple[str, ...]:
    entry = spec[dim] if dim < len(spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
