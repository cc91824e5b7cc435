"""Linear functions of clipped sums, also in loops, and how far one example moves them."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from ..programs import ENTRY_BY_ENTRY, UNCHANGED, named
from .facts import Cut, Fact, Kind, Row, Term, column_norms, either, larger, made_of
from .flow import Context, dtype_of, size_of
from .keys import Again, Along, Key, Number

_MOVED = named("reshape transpose squeeze rev slice split unstack real")
_BESIDE = named("concatenate stack dynamic_update_slice pad")
_PLAIN = UNCHANGED | {"convert_element_type", "neg"}


class Source(NamedTuple):
    """A clipped sum.

    Attributes:
        bound: the L2 norm by which one example moves it at most.
        samples: which of several batches it is of; empty for the only one.
    """

    bound: float
    samples: frozenset[Cut]


class Release(NamedTuple):
    """Noise on clipped sums.

    Attributes:
        rows: what the noise was added to, leaf by leaf.
        stddev: of the noise.
        context: where.
    """

    rows: tuple[Row, ...]
    stddev: float
    context: Context


def scaled(rows: tuple[Row, ...], factor: float, is_plain: bool, is_fixed: bool) -> tuple[Row, ...]:
    """Rows behind a linear function whose norm is at most `factor`."""
    return tuple(
        frozenset(
            Term(
                term.leaf,
                term.gain * factor,
                term.is_plain and is_plain,
                term.is_fixed and is_fixed,
            )
            for term in row
        )
        for row in rows
    )


def added(a: tuple[Row, ...], b: tuple[Row, ...]) -> tuple[Row, ...]:
    """A bound on the sum of two; it is exact where both have one row."""
    if not a or not b:
        return a or b
    terms: dict[Hashable, Term] = {}
    for rows in (a, b):
        row = rows[0] if len(rows) == 1 else _collapsed(rows)
        for term in row:
            other = terms.get(term.leaf)
            terms[term.leaf] = term if other is None else _sum_of(term, other)
    return (frozenset(terms.values()),)


def _sum_of(a: Term, b: Term) -> Term:
    if a.is_plain and b.is_plain:
        return a._replace(gain=a.gain + b.gain)
    return Term(a.leaf, abs(a.gain) + abs(b.gain), False, a.is_fixed and b.is_fixed)


def _collapsed(rows: tuple[Row, ...]) -> Row:
    is_fixed = all(term.is_fixed for row in rows for term in row)
    norms = column_norms(rows)
    return frozenset(Term(leaf, gain, False, is_fixed) for leaf, gain in norms.items())


def linear(context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact]) -> Fact:
    """What an equation makes of clipped sums and public values."""
    name, line = equation.primitive.name, context.line
    sums = [fact for fact in inputs if fact.kind is Kind.SUM]
    found = made_of(inputs, "linear", line)
    if len({fact.over for fact in sums}) > 1:
        return found._replace(reason="devices")
    first, result = inputs[0], equation.outvars[0]
    ratio = size_of(result) / max(1, size_of(equation.invars[0]))
    rows: tuple[Row, ...] | None = None
    if name in _PLAIN:
        if _is_narrower(equation):
            return found._replace(reason="rounded")
        rows = scaled(first.rows, -1.0 if name == "neg" else 1.0, True, True)
    elif name in _MOVED or (name == "dynamic_slice" and first.kind is Kind.SUM):
        is_fixed = name != "dynamic_slice" or all(fact.constant for fact in inputs[1:])
        rows = scaled(first.rows, 1.0, False, is_fixed)
    elif name == "broadcast_in_dim" and ratio:
        rows = scaled(first.rows, math.sqrt(ratio), ratio == 1, True)
    elif name == "reduce_sum" and ratio:
        rows = scaled(first.rows, math.sqrt(1 / ratio), False, True)
    elif name in ("add", "add_any", "sub"):
        second = scaled(inputs[1].rows, -1.0 if name == "sub" else 1.0, True, True)
        rows = added(first.rows, second)
        is_drawn = any(fact.is_public and fact.draws for fact in inputs)
        found = found._replace(is_noised=found.is_noised or is_drawn)
    elif name in _BESIDE:
        if all(fact.is_public or fact.rows for fact in inputs):
            is_fixed = name != "dynamic_update_slice"
            both = tuple(row for fact in inputs for row in fact.rows)
            rows = scaled(both, 1.0, False, is_fixed)
    elif name == "select_n":
        if not first.is_public:
            return found._replace(reason="nonlinear")
        both = tuple(row for fact in inputs[1:] for row in fact.rows)
        rows = scaled(both, 1.0, False, False)
    elif name in ("mul", "div") and len(sums) == 1:
        factor = _factor(inputs, name)
        if factor is None:
            is_public = first.kind is Kind.SUM or name == "mul"
            return found._replace(reason="factor" if is_public else "nonlinear")
        rows = scaled(sums[0].rows, *factor, True)
    elif name in ENTRY_BY_ENTRY or (name == "mul"):
        return found._replace(reason="nonlinear")
    if rows is None:
        return found
    return found._replace(kind=Kind.SUM, rows=rows, over=sums[0].over, reason="", where="")


def _is_narrower(equation: jex_core.JaxprEqn) -> bool:
    before, after = dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
    return before != after and jnp.promote_types(before, after) != after


def _factor(inputs: list[Fact], name: str) -> tuple[float, bool] | None:
    """The number that a sum is multiplied by, and whether it is one number."""
    at = 0 if inputs[1].kind is Kind.SUM else 1
    other = inputs[at]
    if (name == "div" and at == 0) or other.constant is None or other.constant.value is None:
        return None
    values = np.asarray(other.constant.value, np.float64)
    if name == "div":
        with np.errstate(divide="ignore"):
            values = 1 / values
    if not values.size or not np.isfinite(values).all():
        return None
    if values.min() == values.max():
        return float(values.flat[0]), True
    return float(np.abs(values).max()), False


def sum_over_devices(fact: Fact, axes: frozenset[Any], line: str) -> Fact:
    """The sum over devices of what each has: only of their parts of one sum."""
    is_same = all(term.is_fixed for row in fact.rows for term in row)
    if fact.over != axes or not is_same:
        return made_of([fact], "devices", line)
    return fact._replace(over=frozenset[str](), varies=fact.varies - axes)


def grown(
    before: Fact, after: Fact, own: Hashable, length: int | None, line: str
) -> tuple[Fact, Fact]:
    """What turns of a loop begin with, and what it ends with: it stays, or grows by the same.

    `after` is made of what a turn begins with (the leaf `own`) and of what the turn adds.
    """
    unknown = made_of([before, after], "loop", line)
    as_sum = unknown._replace(kind=Kind.SUM, over=after.over or before.over, reason="", where="")
    kept = [term for row in after.rows for term in row if term.leaf == own]
    rest = [frozenset(term for term in row if term.leaf != own) for row in after.rows]
    turn = tuple(row for row in rest if row)
    is_carried = any(term.leaf[0] == "carry" for row in turn for term in row)
    if is_carried or len(kept) > 1 or any(abs(term.gain) > 1 for term in kept):
        return unknown, unknown
    if not kept:  # set anew in each turn
        first = as_sum._replace(rows=larger(before.rows, turn))
        return first, after if length else first
    if turn and length is None:
        return unknown, unknown
    is_same = kept[0].is_plain and kept[0].gain == 1.0
    start = before.rows if is_same else scaled(before.rows, 1.0, False, False)
    total = scaled(turn, float(length or 1), False, False)
    found = as_sum._replace(rows=added(start, total) if turn else start)
    return found, found


def symbol(fact: Fact, name: Hashable) -> Fact:
    """What a turn begins with, of what changes from turn to turn."""
    loop = name[1] if isinstance(name, tuple) else None
    return fact._replace(
        constant=None,
        number=fact.number and (Number(name) if not fact.number.along else None),
        key=fact.key and Key(name, is_words=fact.key.is_words),
        rows=(frozenset({Term(name, 1.0)}),) if fact.kind is Kind.SUM else (),
        varies=fact.varies | {loop},
        indexes=(),
    )


def widened(start: Fact, end: Fact, name: Hashable) -> Fact:
    """What a turn begins with, if it may end so."""
    number, key = start.number, start.key
    if number is not None and (end.number is None or end.number[0] != name or end.number.along):
        number = None
    if key is not None and (end.key is None or end.key.root != name):
        key = Key(None, is_words=key.is_words)
    found = either([start, end._replace(number=None, key=None)])
    if found.kind is Kind.SUM:
        over = end.over if end.kind is Kind.SUM else start.over
        found = found._replace(rows=(frozenset({Term(name, 1.0)}),), over=over)
    found = found._replace(constant=None, number=number, key=key)
    return without_turn(found, name[1] if isinstance(name, tuple) else None)


def without_turn(fact: Fact, loop: Hashable) -> Fact:
    """A value behind its turn of a loop: rows of one turn are not those of another."""
    is_of_turn = any(cut.where == loop for cut in fact.cuts)
    return fact._replace(refs=(), indexes=()) if is_of_turn else fact


def counter(
    fact: Fact, start: Fact, end: Fact, name: Hashable, context: Context
) -> tuple[Fact, Fact]:
    """What a turn begins with and what the loop ends with, of numbers and keys."""
    path, length = context.loops[-1]
    first = start._replace(number=None)
    last = end._replace(number=None, constant=None) if length else first  # of no turn as well
    if start.number is not None and end.number is not None and fact.number is not None:
        stride = end.number.offset
        along = (*fact.number.along, *([Along(path, stride, length)] if stride else []))
        first = first._replace(number=fact.number._replace(along=along))
        if length is not None:
            offset = fact.number.offset + stride * length
            last = last._replace(number=fact.number._replace(offset=offset))
    if start.key is not None:
        unknown = Key(None, is_words=start.key.is_words)
        first, last = first._replace(key=unknown), last._replace(key=unknown)
        if start.key.root == name and end.key is not None and fact.key is not None:
            turn = end.key.path
            if not turn:
                first, last = first._replace(key=fact.key), last._replace(key=fact.key)
            else:
                first = first._replace(key=fact.key.folded(Again(path, turn)))
                if length:
                    last = last._replace(key=fact.key.folded(Again(path, turn, True)))
    return first, last


def as_total(total: Fact, found: Fact) -> Fact:
    """A carried sum in all turns."""
    return found._replace(
        kind=total.kind,
        rows=total.rows if total.kind is Kind.SUM else (),
        over=total.over,
        reason=total.reason,
        where=total.where,
    )


# How far releases move.


def noise_multiplier(releases: Sequence[Release], sources: Mapping[Hashable, Source]) -> float:
    """The noise multiplier of several releases together; infinite without any.

    With M the matrix of what one example does to all numbers released, each by the standard
    deviation of its noise, it is 1 / max |M x|. Rows of M that are of the same clipped sums go
    together, and others add up by squares. By Minkowski, |M x| is at most the sum over clipped sums
    of the norm of their columns times their bound.
    """
    of_sums: defaultdict[frozenset[Hashable], list[_Entry]] = defaultdict(list)
    for i, release in enumerate(releases):
        times = math.sqrt(_repetitions(release, sources)) / release.stddev
        for j, row in enumerate(release.rows):
            names = frozenset(term.leaf[0] for term in row)
            of_sums[names] += [((i, j), term.leaf, times * abs(term.gain)) for term in row]
    total = 0.0
    for names, entries in of_sums.items():
        norms = (
            _norm([entry for entry in entries if entry[1][0] == name]) * sources[name].bound
            for name in names
        )
        total += sum(norms) ** 2
    return math.inf if total == 0 else 1 / math.sqrt(total)


_Entry: TypeAlias = tuple[Hashable, Any, float]  # row, column, value


def _norm(entries: list[_Entry]) -> float:
    """The spectral norm of a matrix, by its entries."""
    if any(math.isinf(value) for _, _, value in entries):
        return math.inf
    rows = Counter(row for row, _, _ in entries)
    if max(rows.values()) == 1:  # columns are orthogonal
        squares: defaultdict[Hashable, float] = defaultdict(float)
        for _, column, value in entries:
            squares[column] += value**2
        return math.sqrt(max(squares.values()))
    at = {row: i for i, row in enumerate(rows)}
    columns = {column: i for i, column in enumerate(dict.fromkeys(c for _, c, _ in entries))}
    if len(at) == 1:
        return math.sqrt(sum(value**2 for _, _, value in entries))
    matrix = np.zeros((len(at), len(columns)))
    for row, column, value in entries:
        matrix[at[row], columns[column]] += value
    return float(np.linalg.norm(matrix, 2))


def names_of(release: Release) -> set[Hashable]:
    """The clipped sums of a release."""
    terms = [term for row in release.rows for term in row]
    return {term.leaf[0] for term in terms}


def samples_of(release: Release, sources: Mapping[Hashable, Source]) -> frozenset[Cut]:
    """Which of several batches a release is of; empty if it is of several of them, or of all."""
    found = {sources[name].samples for name in names_of(release)}
    return found.pop() if len(found) == 1 else frozenset()


def turns(release: Release, sources: Mapping[Hashable, Source]) -> tuple[int, int]:
    """How often a release is made: on other batches, and on the same one again."""
    loops = {cut.where for cut in samples_of(release, sources) if cut.how == "loop"}
    others, again = 1, 1
    for loop in release.context.loops:
        length = loop.length or 0
        others, again = (others * length, again) if loop.path in loops else (others, again * length)
    return others, again


def _repetitions(release: Release, sources: Mapping[Hashable, Source]) -> float:
    again = turns(release, sources)[1]
    return math.inf if again == 0 else float(again)
