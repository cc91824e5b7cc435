"""Keys of random numbers: where they come from, and when two are proven to be different.

A key is a root, and what was folded in one after another. `jax.random.split(key, n)[i]` is
`fold_in(key, i)`, for keys of threefry. Keys of different roots are independent. So are keys of one
root whose paths part: at some place other numbers were folded in, and before it the same. A key
that is the beginning of another one tells it.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

from .flow import Context

CALLS = "calls"
"""The loop of a step's calls, which is around everything."""

FIRST = "first dimension"


class Along(NamedTuple):
    """How a number grows: along the first dimension of an array, or from turn to turn of a loop.

    Attributes:
        where: `FIRST`, or the loop.
        stride: by how much.
        length: how many numbers there are; None if that is not known.
    """

    where: Hashable
    stride: int
    length: int | None


class Number(NamedTuple):
    """An integer: a root, which is unknown, plus an offset, plus what it grows by.

    Attributes:
        root: `("argument", index)`, another name of what is not known, or None for zero.
        offset: what is added.
        along: what it grows along.
    """

    root: Hashable
    offset: int = 0
    along: tuple[Along, ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether the offset is all."""
        return self.root is None and not self.along

    @property
    def is_one(self) -> bool:
        """Whether it is the same along the first dimension."""
        return all(one.where != FIRST for one in self.along)

    def plus(self, more: int) -> "Number":
        """The sum with a constant."""
        return self._replace(offset=self.offset + more)

    def cut(self, start: int, step: int, length: int) -> "Number":
        """Some of the numbers along the first dimension: from `start` on, every `step`-th."""
        found = self._replace(along=tuple(one for one in self.along if one.where != FIRST))
        for one in self.along:
            if one.where == FIRST:
                stride = one.stride * step
                more = (Along(FIRST, stride, length),) if length > 1 else ()
                found = Number(self.root, self.offset + one.stride * start, found.along + more)
        return found

    def turned(self, loop: Hashable, length: int | None) -> "Number":
        """The numbers along the first dimension, one in each turn of a loop."""
        along = (
            Along(loop, one.stride, length) if one.where == FIRST else one for one in self.along
        )
        return self._replace(along=tuple(along))

    @property
    def span(self) -> tuple[int, int] | None:
        """The least and the largest of what is added to the root; None if that is not known."""
        low = high = self.offset
        for one in self.along:
            if one.length is None:
                return None
            reach = one.stride * (one.length - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high


class Again(NamedTuple):
    """What was folded in turn by turn into a key that a loop carries: the same path each time.

    Attributes:
        loop: the loop; `CALLS` for a key in the state.
        path: what a turn folds in.
        is_after: whether all turns are over.
    """

    loop: Hashable
    path: tuple[Any, ...]
    is_after: bool = False


Element: TypeAlias = Number | Again | None
"""What was folded in; None where that is not known."""


class Key(NamedTuple):
    """A key of random numbers.

    Attributes:
        root: `("argument", index)` or `("constant", words)`; None if it is not known.
        path: what was folded in.
        is_words: whether it is given as words, along a last dimension.
    """

    root: Hashable
    path: tuple[Element, ...] = ()
    is_words: bool = False

    def folded(self, *elements: Element) -> "Key":
        """The key with more folded in."""
        return self._replace(path=(*self.path, *elements))

    @property
    def is_one(self) -> bool:
        """Whether it is the same along the first dimension."""
        return all(one.is_one for one in self.path if isinstance(one, Number))

    def each(self, change: Callable[[Number], Number]) -> "Key":
        """The key with its numbers changed."""
        path = [change(one) if isinstance(one, Number) else one for one in self.path]
        return self._replace(path=tuple(path))


class Use(NamedTuple):
    """Something that random numbers were drawn for.

    Attributes:
        what: `"noise"`, `"draw"`, `"loss"`, `"returned"` or `"door"`.
        key: the key.
        context: where.
    """

    what: str
    key: Key
    context: Context


class Calls(NamedTuple):
    """What arguments are in the next call, as far as random numbers depend on them.

    Attributes:
        steps: by how much a counter grows from call to call.
        paths: what a call folds into a key that comes back; empty if it comes back unchanged.
        given: arguments that nothing comes back as: the caller gives others in each call.
        same: arguments that hold one key, by the name of the first.
    """

    steps: dict[Hashable, int]
    paths: dict[Hashable, tuple[Element, ...]]
    given: frozenset[Hashable]
    same: dict[Hashable, Hashable]


def numbers_part(a: Number, b: Number, calls: Calls) -> bool:
    """Whether two numbers are different for certain, in all turns and calls.

    A counter of a root grows from call to call: what the next call reaches counts as well.
    """
    one, other = a.span, b.span
    if a.root != b.root or one is None or other is None:
        return False
    (low, high), (least, most) = one, other
    if max(high, most) - min(low, least) >= 2**32:
        return False
    step = 0 if a.root is None else calls.steps.get(a.root)
    if step is None:
        return False
    if step == 0:
        return high < least or most < low
    # Modulo the step, ranges must not meet.
    start = (least - low) % abs(step)
    return high - low < start and start + most - least < abs(step)


def parted(a: Key, b: Key, calls: Calls) -> bool:
    """Whether two keys are proven to be independent: neither tells the other, in any two calls."""
    if a.root is None or b.root is None:
        return False
    if a.root != b.root:
        return calls.same.get(a.root, a.root) != calls.same.get(b.root, b.root)
    return paths_part(_whole(a, calls), _whole(b, calls), calls)


def _whole(key: Key, calls: Calls) -> tuple[Element, ...]:
    """The path of a key, with what earlier calls have folded into its root."""
    path = calls.paths.get(key.root, ())
    return (*((Again(CALLS, path),) if path else ()), *key.path)


def paths_part(a: tuple[Element, ...], b: tuple[Element, ...], calls: Calls) -> bool:
    """Whether two paths from one root are proven to lead to independent keys."""
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        rest, others = a[i + 1 :], b[i + 1 :]
        if one is None or other is None:
            return False
        if isinstance(one, Again) and isinstance(other, Again):
            if (one.loop, one.path) != (other.loop, other.path):
                return False
            # What a turn draws, no later turn begins with.
            inside = [r for again, r in ((one, rest), (other, others)) if not again.is_after]
            if not all(paths_part(one.path, r, calls) for r in inside):
                return False
            if one.is_after != other.is_after:
                return True
        elif isinstance(one, Again):
            # No turn, or one and more.
            is_apart = one.is_after or paths_part(rest, b[i:], calls)
            return is_apart and paths_part((*one.path, *a[i:]), b[i:], calls)
        elif isinstance(other, Again):
            return paths_part(b[i:], a[i:], calls)
        elif one != other:  # else it is the same number in the same turn and call
            return numbers_part(one, other, calls)
    return False


def is_new(key: Key, loop: Hashable, calls: Calls) -> bool | None:
    """Whether a key is another one in each turn of a loop; None if that is not decided."""
    if key.root is None:
        return None
    path = _whole(key, calls)
    if loop == CALLS and key.root in calls.given:
        numbers = [one for one in path if isinstance(one, Number) and one.root in calls.given]
        return True if all(one.span == (one.offset,) * 2 for one in numbers) else None
    for i, element in enumerate(path):
        if element is None:
            return None
        if isinstance(element, Again) and element.loop == loop:
            is_apart = not element.is_after and paths_part(element.path, path[i + 1 :], calls)
            return True if is_apart else None
        if isinstance(element, Number) and _grows(element, loop, calls):
            return True
    fixed = {None, *(root for root, step in calls.steps.items() if not step)}
    is_known = all(isinstance(one, Number) and one.root in fixed for one in path)
    of_argument = isinstance(key.root, tuple) and key.root[0] == "argument"
    return False if is_known and (key.root in calls.paths or not of_argument) else None


def _grows(number: Number, loop: Hashable, calls: Calls) -> bool:
    """Whether a number is another one in each turn of a loop, however other loops turn."""
    if loop == CALLS:
        step, span = calls.steps.get(number.root, 0), number.span
        is_wide = span is not None and span[1] - span[0] < abs(step) < 2**16
        return is_wide or (number.root in calls.given and span == (number.offset,) * 2)
    own = [one for one in number.along if one.where == loop]
    if not own or not own[0].stride or abs(own[0].stride) >= 2**16:
        return False
    reach = 0
    for stride, length in sorted((abs(one.stride), one.length or 2**31) for one in number.along):
        if stride <= reach:
            return False
        reach += stride * (length - 1)
    return reach < 2**32
