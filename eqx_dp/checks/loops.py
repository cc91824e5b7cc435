"""What is known of what a loop carries, after all of its turns."""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from .releases import Source
from .terms import UNKNOWN, Affine, Again, Each, Key, Listed, Root, Span, Turns, differs, plus
from .values import (
    Linear,
    Nothing,
    Private,
    Public,
    Random,
    Sum,
    Value,
    as_public,
    either,
    made_of,
)

Scales: TypeAlias = dict[tuple[Hashable, frozenset[int]], float]

_MOST_TURNS = 1000


class Carried(NamedTuple):
    """What a loop carries at one place.

    Attributes:
        name: the name of its symbol.
        start: the value before the first turn.
        symbol: what stands for it in any turn.
        stays: whether the body hands it on as it is.
    """

    name: Hashable
    start: Value
    symbol: Value
    stays: bool

    def seen(self, after: Value) -> "Carried":
        """With a symbol that stands for the value after a turn as well."""
        if self.stays:
            return self._replace(symbol=self.start)
        return self._replace(symbol=_symbol(self.name, [self.symbol, after]))


def carried(loop: Hashable, index: int, start: Value, stays: bool) -> Carried:
    """What a loop carries at a place, before it is known what a turn makes of it."""
    name = ("carried", loop, index)
    symbol = start if stays else _symbol(name, [start])
    return Carried(name, start, symbol, stays)


def _symbol(name: Hashable, values: Sequence[Value]) -> Value:
    """What stands for any of several values, whatever turn it is."""
    private = [value for value in values if isinstance(value, Private)]
    if private:
        arguments = frozenset[int]().union(*(value.arguments for value in private))
        return Private(reason=private[0].reason, where=private[0].where, arguments=arguments)
    sums = [value for value in values if isinstance(value, Sum)]
    if sums:
        noisy = [value for value in values if isinstance(value, Public) and value.noise]
        if noisy or any(isinstance(value, Random) for value in values):
            return Private(reason="nonlinear")
        public = made_of([value for value in values if isinstance(value, Public)])
        whole = either(sums)
        return Sum(
            frozenset({Linear(name, frozenset({0}), 1.0)}),
            spread=whole.spread,
            releases=whole.releases | public.releases,
        )
    loop: Hashable = name[1] if isinstance(name, tuple) else name
    root = Root(name, frozenset({loop}))
    public = [as_public(value) for value in values if isinstance(value, Public | Random)]
    first = public[0].term
    is_key = isinstance(first, Key)
    term = Key(root, (), ((),) * len(first.along), first.is_words) if is_key else root
    return Public(
        term,
        releases=Nothing.union(*(value.releases for value in public)),
        noise=Nothing.union(*(value.noise for value in public)),
        words=frozenset[Key]().union(*(value.words for value in public)),
        along=public[0].along,
        changes=made_of(public).changes | {loop},
    )


class Ways(NamedTuple):
    """What a loop carries at a place, in any of its turns and after the last."""

    inside: Value
    after: Value | None


def counted(
    place: Carried, after: Value, loop: Hashable, length: int | None
) -> tuple[Ways | None, Turns | None]:
    """Keys that go on and numbers that count; None for what is neither."""
    if place.stays:
        return Ways(place.start, place.start), None
    start, symbol = place.start, place.symbol
    if not isinstance(symbol, Public) or not isinstance(after, Public):
        return None, None
    if not isinstance(start, Public):
        return None, None
    known, whole = start.term, replace(symbol, low=-math.inf, high=math.inf)
    match symbol.term, after.term:
        case Key() as old, Key() as new if isinstance(known, Key):
            if new.root != old.root or new.is_words != old.is_words:
                return None, None
            if not new.path:
                return Ways(start, start), None
            its_own = Again(loop, new.path, False)
            inside = known._replace(path=(*known.path, its_own))
            done = known._replace(path=(*known.path, its_own._replace(is_done=True)))
            return Ways(replace(whole, term=inside), replace(whole, term=done)), None
        case Root() as old, Root() as new if new == old:
            return Ways(start, start), None
        case Root() as old, Affine(base, 1, change) if base == old:
            number = None if isinstance(known, Key) else known
            inside, done = replace(whole, term=old), whole
            if length is not None:
                done = replace(whole, term=plus(number, 1, change * length))
                if start.low == start.high:
                    ends = sorted([start.low, start.low + change * max(0, length - 1)])
                    inside = replace(inside, low=ends[0], high=ends[1])
            return Ways(inside, done), Turns(loop, number, change, length)
        case _:
            return None, None


def sums_of_turns(
    places: Sequence[Carried],
    after: Sequence[Value],
    sources: dict[Hashable, Source],
    loop: Hashable,
    length: int | None,
) -> tuple[dict[Hashable, Sum], dict[Hashable, Sum]]:
    """The sums that a loop carries: in any turn, and after the last.

    A turn makes of carried sums `c` and its own clipped sums `d` the sums `A c + d`. Where turns
    go over the parts of one batch, an example is in one turn alone.
    """
    names = {place.name: place for place in places if isinstance(place.symbol, Sum)}
    now = {name: _scales(place.start) for name, place in names.items()}
    steps = {
        place.name: value
        for place, value in zip(places, after, strict=True)
        if place.name in names and isinstance(value, Sum)
    }
    most, before = {name: dict(scales) for name, scales in now.items()}, now
    turns = 0
    while length is None or turns < length:
        later = {name: _turned(name, step, now, sources, loop) for name, step in steps.items()}
        turns += 1
        if later == now:
            break
        if turns >= _MOST_TURNS:
            left = None if length is None else length - turns
            later = _extrapolated([before, now, later], left)
            now, most = later, most | {name: _most(most[name], later[name]) for name in later}
            break
        before, now = now, later
        most = most | {name: _most(most[name], later[name]) for name in later}
    inside = {
        name: replace(
            _as_sum(names[name], most.get(name, {})),
            kept_in=frozenset() if names[name].stays else frozenset({loop}),
        )
        for name in names
    }
    last = most if length is None or turns >= _MOST_TURNS else now
    done = {name: _as_sum(names[name], last.get(name, {})) for name in names}
    return inside, done


def _scales(value: Value) -> Scales:
    return {term[:2]: term.scale for term in value.terms} if isinstance(value, Sum) else {}


def _turned(
    name: Hashable,
    step: Sum,
    now: dict[Hashable, Scales],
    sources: dict[Hashable, Source],
    loop: Hashable,
) -> Scales:
    own, before = Scales(), Scales()
    is_alone = not any(term.source in now and term.source != name for term in step.terms)
    for term in step.terms:
        if term.source in now:
            for key, scale in now[term.source].items():
                before[key] = before.get(key, 0.0) + scale * term.scale
        else:
            own[term[:2]] = own.get(term[:2], 0.0) + term.scale
    for key, scale in own.items():
        source = sources.get(key[0])
        is_part = source is not None and any(cut.start == loop for cut in source.cuts)
        old = before.get(key, 0.0)
        is_even = step.is_even and is_alone
        if is_part and is_even and (old == 0 or math.isclose(old, scale, rel_tol=1e-9)):
            before[key] = scale  # the same factor for all parts of a batch
        else:
            before[key] = old + scale * (2 if is_part else 1)
    return before


def _extrapolated(last: list[dict[Hashable, Scales]], left: int | None) -> dict[Hashable, Scales]:
    """As many turns more, of what grows by the same in each; of anything else it is not known."""

    def after(*scales: float) -> float:
        growths = [b - a for a, b in itertools.pairwise(scales)]
        if scales[-1] <= scales[-2]:
            return scales[-1]
        is_steady = math.isclose(*growths, rel_tol=1e-6)
        return scales[-1] + growths[-1] * left * 1.001 if is_steady and left else math.inf

    return {
        name: {key: after(*(one[name].get(key, 0.0) for one in last)) for key in scales}
        for name, scales in last[-1].items()
    }


def _most(a: Scales, b: Scales) -> Scales:
    return {key: max(a.get(key, 0.0), b.get(key, 0.0)) for key in {**a, **b}}


def _as_sum(place: Carried, scales: Scales) -> Sum:
    assert isinstance(place.symbol, Sum)
    terms = frozenset(Linear(*key, scale) for key, scale in scales.items())
    is_known = all(math.isfinite(scale) for scale in scales.values())
    why = "" if is_known else "a loop adds to it, and for how many turns is not known"
    start = place.start
    is_tight = start.is_tight if isinstance(start, Sum) else True
    return Sum(terms, is_tight, why, place.symbol.spread, releases=place.symbol.releases)


def turn_of(value: Public, loop: Hashable, length: int) -> Public:
    """What a turn of a loop sees of a public array that it goes over, of so many entries."""
    term = value.term
    match term:
        case Key() if term.along and not term.along[0]:  # copies of one key
            term = term.at_turn(loop)
        case Key() if term.along:
            is_of_differing = any(differs(term.path[at], length) for at in term.along[0])
            term = term.at_turn(loop) if is_of_differing else Key(UNKNOWN)
        case Span() | Listed() | Root() if differs(term, length):
            term = Each(loop, term)
        case _:
            term = None
    along = frozenset(dim - 1 for dim in value.along if dim)
    return replace(value, term=term, along=along, changes=value.changes | {loop})
