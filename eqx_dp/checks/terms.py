"""Public whole numbers and random keys as terms: what a step computes of its arguments.

A key is a root and a path: what was folded in, or which key of a split was taken. Splitting a
threefry key is folding in 0, 1, 2, ..., so both are one kind of step.
"""

from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeAlias


class Root(NamedTuple):
    """A value of which nothing is known but that it is itself.

    Attributes:
        name: what tells it apart: an argument, a constant, what a loop carries; None of nothing.
        varies: the loops in whose turns it may be another.
    """

    name: Hashable
    varies: frozenset[Hashable] = frozenset()


UNKNOWN = Root(None)

SEEDS = Root("seeds")
"""The root of keys that a step makes of numbers; each number is a step from there."""


class Span(NamedTuple):
    """Any of the whole numbers from `start` up to `stop`; as an array, all of them in order."""

    start: int
    stop: int


class Listed(NamedTuple):
    """Any of several whole numbers; as an array, all of them in order."""

    values: tuple[int, ...]


class Affine(NamedTuple):
    """`slope * base + offset`."""

    base: "Root | Each"
    slope: int
    offset: int


class Each(NamedTuple):
    """The entry of an array that a loop is at. No two entries are equal."""

    loop: Hashable
    entries: "Span | Listed | Root"


class Again(NamedTuple):
    """The steps that a loop's key takes from turn to turn, as often as it has done.

    Attributes:
        loop: the loop.
        steps: those of one turn.
        is_done: whether the loop has ended.
    """

    loop: Hashable
    steps: "tuple[Step, ...]"
    is_done: bool


Number: TypeAlias = Root | Span | Listed | Affine | Each
"""A term for a whole number, or for an array of them."""

Step: TypeAlias = Number | Again


class Key(NamedTuple):
    """A key, or an array of keys.

    Attributes:
        root: what it was made from: an argument, a constant, or what is not known.
        path: the steps from there.
        along: for each dimension of an array, the steps that differ along it.
        is_words: whether it is given as words, which stand along a last dimension.
    """

    root: Root
    path: tuple[Step, ...] = ()
    along: tuple[tuple[int, ...], ...] = ()
    is_words: bool = False

    def part(self, dim: int, start: int, stop: int) -> "Key":
        """Some of an array's keys."""
        path = list(self.path)
        for at in self.along[dim]:
            path[at] = entries(path[at], start, stop)
        return self._replace(path=tuple(path))

    def at_turn(self, loop: Hashable) -> "Key":
        """The key, or the array of keys, that a loop over the first dimension is at."""
        path = list(self.path)
        for at in self.along[0]:
            step = path[at]
            path[at] = UNKNOWN
            if isinstance(step, Span | Listed | Root) and step != UNKNOWN:
                path[at] = Each(loop, step)
        return self._replace(path=tuple(path), along=self.along[1:])


Term: TypeAlias = Number | Key


class Turns(NamedTuple):
    """What is known of a number that changes from turn to turn of a loop, or from call to call.

    Attributes:
        loop: the loop.
        start: its first value.
        change: what a turn adds.
        length: how many turns there are; None if that is not known.
    """

    loop: Hashable
    start: Number | None
    change: int
    length: int | None


Counters: TypeAlias = Mapping[Hashable, Turns]
"""By the name of a root."""


def number(value: int) -> Span:
    """A constant."""
    return Span(value, value + 1)


def entries(step: Step, start: int, stop: int) -> Step:
    """Some of the numbers of an array."""
    match step:
        case Span(first, _):
            return Span(first + start, first + stop)
        case Listed(values) if stop - start == 1:
            return number(values[start])
        case Listed(values):
            return Listed(values[start:stop])
        case Root(name, _):
            return Root((name, start, stop), step.varies)
        case _:
            return UNKNOWN


def plus(term: Number | None, slope: int, offset: int) -> Number | None:
    """`slope * term + offset`."""
    match term:
        case Span(start, stop) if slope == 1:
            return Span(start + offset, stop + offset)
        case Span(start, stop) if stop == start + 1:
            return number(slope * start + offset)
        case Span(start, stop):
            return Listed(tuple(slope * value + offset for value in range(start, stop)))
        case Listed(values):
            return Listed(tuple(slope * value + offset for value in values))
        case Affine(base, its_slope, its_offset):
            return _affine(base, slope * its_slope, slope * its_offset + offset)
        case Root() | Each():
            return _affine(term, slope, offset)
        case None:
            return None


def _affine(base: Root | Each, slope: int, offset: int) -> Number:
    if slope == 0:
        return number(offset)
    return base if (slope, offset) == (1, 0) else Affine(base, slope, offset)


def parts_of(term: Number) -> tuple[Root | Each, int, int] | None:
    """What is not known of a number, its factor and what is added; None of a known number."""
    if isinstance(term, Affine):
        return term
    return (term, 1, 0) if isinstance(term, Root | Each) else None


def is_given(term: Term | Step | None) -> bool:
    """Whether whole numbers are those of an argument, or surely differ from each other."""
    match term:
        case Span():
            return True
        case Listed(values):
            return len(set(values)) == len(values)
        case Affine():  # behind the last is the last, as often as one asks
            return False
        case Each(_, inner):
            return is_given(inner)
        case _:
            return is_of_argument(term)


def is_of_argument(term: Term | Step | None) -> bool:
    """Whether whole numbers are those of an argument."""
    match term:
        case Root((("laid out" | "part" | "rows"), inner, *_), _):
            return is_of_argument(Root(inner))
        case Root(("argument", *_), _):
            return True
        case Affine(base):
            return is_of_argument(base)
        case Each(_, inner):
            return is_of_argument(inner)
        case _:
            return False


def differs(step: Step, length: int) -> bool:
    """Whether so many whole numbers are those of an argument, or surely differ."""
    match step:
        case Span(start, stop):
            return stop - start == length
        case Listed(values):
            return len(set(values)) == len(values) == length
        case _:
            return is_of_argument(step)


def varies(term: Term | Step | None) -> frozenset[Hashable]:
    """The loops in whose turns a term may change."""
    match term:
        case Root(_, loops):
            return loops
        case Affine(base):
            return varies(base)
        case Each(loop, inner):
            return varies(inner) | {loop}
        case Again(loop, steps, _):
            return frozenset({loop}).union(*map(varies, steps))
        case Key():
            return varies(term.root).union(*map(varies, term.path))
        case _:
            return frozenset()
