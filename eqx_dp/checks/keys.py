"""Random keys: where they come from, and when two are proven to be different.

A key is a root, followed by the numbers that were folded in. `jax.random.split(key, n)[i]` is
`fold_in(key, i)`, for keys of threefry. Keys of different roots are independent. So are keys of one
root whose paths differ at some place and agree before it. A key that is a prefix of another one
reveals it. A key may be carried from call to call, if each call folds the same numbers into it. A
key that a loop within a call carries and changes is unknown.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from .flow import Context

CALLS = "calls"
"""The loop of a step's calls, which encloses everything."""

FIRST = "first dimension"


class Along(NamedTuple):
    """How a number grows: along the first dimension of an array, or in each turn of a loop.

    Attributes:
        where: `FIRST`, or the loop.
        stride: the increment.
        length: how many numbers there are; None if that is not known.
    """

    where: Hashable
    stride: int
    length: int | None


class Number(NamedTuple):
    """An integer: an unknown root, plus an offset, plus its growth.

    Attributes:
        root: `("argument", index)`, another name of an unknown number, or None for zero.
        offset: the constant that is added.
        along: the dimensions and loops along which it grows.
    """

    root: Hashable
    offset: int = 0
    along: tuple[Along, ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether it is the offset alone."""
        return self.root is None and not self.along

    @property
    def is_one(self) -> bool:
        """Whether it is the same along the first dimension."""
        return all(one.where != FIRST for one in self.along)

    def plus(self, more: int) -> "Number":
        """The sum with a constant."""
        return self._replace(offset=self.offset + more)

    def cut(self, start: int, step: int, length: int) -> "Number":
        """Every `step`-th of the numbers along the first dimension, from `start` on."""
        found = self._replace(along=tuple(one for one in self.along if one.where != FIRST))
        for one in self.along:
            if one.where == FIRST:
                stride = one.stride * step
                more = (Along(FIRST, stride, length),) if length > 1 else ()
                found = Number(self.root, self.offset + one.stride * start, found.along + more)
        return found

    def turned(self, loop: Hashable, length: int | None) -> "Number":
        """The numbers along the first dimension, one in each turn of a loop."""
        turn = Along(loop, 1, length)
        along = [turn._replace(stride=x.stride) if x.where == FIRST else x for x in self.along]
        return self._replace(along=tuple(along))

    @property
    def span(self) -> tuple[int, int] | None:
        """The least and the largest number that is added to the root; None if unknown."""
        low = high = self.offset
        for one in self.along:
            if one.length is None:
                return None
            reach = one.stride * (one.length - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high


class Key(NamedTuple):
    """A key of random numbers.

    Attributes:
        root: `("argument", index)` or `("constant", words)`; None if it is not known.
        path: the numbers that were folded in; None if unknown.
        is_words: whether it is given as words, along a last dimension.
    """

    root: Hashable
    path: tuple[Number | None, ...] = ()
    is_words: bool = False

    def folded(self, *elements: Number | None) -> "Key":
        """The key with more numbers folded in."""
        return self._replace(path=(*self.path, *elements))

    @property
    def is_one(self) -> bool:
        """Whether it is the same along the first dimension."""
        return all(one is None or one.is_one for one in self.path)

    def each(self, change: Callable[[Number], Number]) -> "Key":
        """The key with its numbers changed."""
        return self._replace(path=tuple(one and change(one) for one in self.path))


class Use(NamedTuple):
    """A use of random numbers.

    Attributes:
        what: `"noise"`, `"draw"`, `"slots"` and `"loss"` (in the engine: another one for each slot,
            or one for all), `"returned"` or `"door"`.
        key: the key.
        context: where.
    """

    what: str
    key: Key
    context: Context


class Calls(NamedTuple):
    """The keys and counters among the arguments of the next call.

    Attributes:
        steps: by how much a counter grows from call to call.
        paths: the numbers that a call folds into a returned key; empty if it returns it unchanged.
        given: arguments that no result becomes: the caller passes new ones in each call.
        same: arguments that hold one key, by the name of the first.
    """

    steps: dict[Hashable, int]
    paths: dict[Hashable, tuple[Number | None, ...]]
    given: frozenset[Hashable]
    same: dict[Hashable, Hashable]


def numbers_part(a: Number, b: Number, calls: Calls) -> bool:
    """Whether two numbers are certainly different, in all turns and calls.

    A number that a counter reaches in one call may appear in another call as well, unless the
    counter steps over both.
    """
    one, other = a.span, b.span
    if a.root != b.root or one is None or other is None:
        return False
    (low, high), (least, most) = one, other
    if max(high, most) - min(low, least) >= 2**32:
        return False
    step = 0 if a.root is None else calls.steps.get(a.root)
    is_new = step is not None and (not step or max(high, most) - min(low, least) < abs(step))
    return is_new and (high < least or most < low)


def parted(a: Key, b: Key, calls: Calls) -> bool:
    """Whether two keys are proven to be independent, in any two calls."""
    if a.root is None or b.root is None:
        return False
    if a.root != b.root:
        return calls.same.get(a.root, a.root) != calls.same.get(b.root, b.root)
    carried = calls.paths.get(a.root, ())
    # No later call begins with a key that a call draws from.
    is_apart = all(not carried or _paths_part(carried, key.path, calls) for key in (a, b))
    return is_apart and _paths_part(a.path, b.path, calls)


def _paths_part(a: tuple[Number | None, ...], b: tuple[Number | None, ...], calls: Calls) -> bool:
    """Whether two paths from one root are proven to lead to independent keys."""
    for one, other in zip(a, b, strict=False):
        if one is None or other is None:
            return False
        if one != other:  # otherwise it is the same number in the same turn and call
            return numbers_part(one, other, calls)
    return False


def is_new(key: Key, loop: Hashable, calls: Calls) -> bool | None:
    """Whether a key differs in each turn of a loop; None if undecided."""
    if key.root is None or None in key.path:
        return None
    numbers = [one for one in key.path if one is not None]
    if loop == CALLS and key.root in calls.given:
        is_given = all(not one.along for one in numbers if one.root in calls.given)
        return True if is_given else None
    carried = calls.paths.get(key.root)
    if carried and loop == CALLS:
        return True if _paths_part(carried, key.path, calls) else None
    if any(_grows(one, loop, calls) for one in numbers):
        return True
    fixed = {None, *(root for root, step in calls.steps.items() if not step)}
    of_argument = isinstance(key.root, tuple) and key.root[0] == "argument"
    is_known = carried == () or not of_argument or loop != CALLS
    return False if is_known and all(one.root in fixed for one in numbers) else None


def _grows(number: Number, loop: Hashable, calls: Calls) -> bool:
    """Whether a number differs in each turn of a loop, whatever other loops do."""
    if loop == CALLS:
        step, span = calls.steps.get(number.root, 0), number.span
        is_wide = span is not None and span[1] - span[0] < abs(step) < 2**16
        return is_wide or (number.root in calls.given and not number.along)
    reach = 0
    for stride, length in sorted((abs(one.stride), one.length or 2**31) for one in number.along):
        if not reach < stride < 2**16:
            return False
        reach += stride * (length - 1)
    return reach < 2**32 and loop in (one.where for one in number.along)
