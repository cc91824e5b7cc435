"""What `check_privacy` knows of a value: public, random, a sum of bounded sensitivity, private."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from .terms import UNKNOWN, Key, Term

Path: TypeAlias = tuple[int, ...]
"""Where an equation is, by which a draw, a sum or a release is told apart."""

Nothing: frozenset[Path] = frozenset()


@dataclass(frozen=True)
class Public:
    """A value that no private data is in, or that is made of releases.

    Attributes:
        term: which number or key it is, if that is known.
        low: the least of its entries, if that is known.
        high: the largest.
        releases: those that it is made of.
        noise: draws of random numbers that it is made of, and that hide nothing in it.
        words: the keys whose words it is made of.
        along: dimensions along which it varies by constants of the program.
        changes: loops in whose turns it may be another.
        noised: the release that it is, with nothing else done to it; None if it is not one.
    """

    term: Term | None = None
    low: float = -math.inf
    high: float = math.inf
    releases: frozenset[Path] = Nothing
    noise: frozenset[Path] = Nothing
    words: frozenset[Key] = frozenset()
    along: frozenset[int] = frozenset()
    changes: frozenset[Hashable] = frozenset()
    noised: Path | None = None

    @property
    def largest(self) -> float:
        """The largest absolute value of an entry, at most; infinite if that is not known."""
        return max(abs(self.low), abs(self.high))

    @property
    def least(self) -> float:
        """The least absolute value of an entry, at least."""
        return 0.0 if self.low <= 0 <= self.high else min(abs(self.low), abs(self.high))


Distribution: TypeAlias = Literal["bits", "mantissa", "one to two", "uniform", "normal", "repeated"]


SOME = (-1, -1)
"""Entries of a vector of which it is not known which they are."""


@dataclass(frozen=True)
class Random:
    """Independent random numbers, entry by entry, that nothing else is in.

    Attributes:
        draws: where they were drawn.
        kind: bits as they were drawn; bits below a mantissa's; the bits of a number between 1 and
            2; uniform between `low` and `high`; normal around public values; the same with one
            number at several entries.
        low: of uniform numbers. Of bits, how many there are.
        high: of uniform numbers. Of normal ones, the least standard deviation of an entry.
        part: which entries of a vector they are, where it was cut: (start, stop). None for all of
            them; `SOME` for what is not known.
        turns: the loops that have other entries in each turn.
    """

    draws: frozenset[Path]
    kind: Distribution
    low: float = 0.0
    high: float = 0.0
    part: tuple[int, int] | None = None
    turns: frozenset[Hashable] = frozenset()

    @property
    def stddev(self) -> float:
        """The least standard deviation of an entry; 0 of what is not normal."""
        return self.high if self.kind == "normal" else 0.0


class Linear(NamedTuple):
    """Part of a sum: some leaves of one clipped sum, through a linear map.

    Attributes:
        source: the clipped sum; or what a loop carries, whose bound is found later.
        leaves: which of its leaves.
        scale: an upper bound on the norm of the map.
    """

    source: Hashable
    leaves: frozenset[int]
    scale: float


@dataclass(frozen=True)
class Sum:
    """A value that moves by a bounded distance if one example does: what noise can hide.

    Attributes:
        terms: added up. Leaves of one term stand side by side.
        is_tight: whether the bound is reached by some data, as far as is known.
        why: why a scale is infinite.
        spread: the mesh axes along which devices hold sums over rows of their own.
        turns: the loops that have other entries in each turn.
        apart_along: the dimension along which entries are sums over rows of their own, if any is.
        releases: those that it is made of as well.
        kept_in: the loops that carry it from turn to turn.
        is_even: whether all clipped sums in it went through maps alike, of positive factors.
    """

    terms: frozenset[Linear]
    is_tight: bool = True
    why: str = ""
    spread: frozenset[str] = frozenset()
    turns: frozenset[Hashable] = frozenset()
    apart_along: int | None = None
    releases: frozenset[Path] = Nothing
    kept_in: frozenset[Hashable] = frozenset()
    is_even: bool = True

    def apart(self) -> "list[Linear]":
        """Terms that bound it as if they stood side by side (Cauchy and Schwarz)."""
        count = Counter(term.source for term in self.terms)
        return [
            term._replace(scale=term.scale * math.sqrt(count[term.source])) for term in self.terms
        ]

    def scaled(self, factor: float, why: str = "", is_tight: bool = True) -> "Sum":
        """Through a map whose norm is at most `factor`."""
        if factor == 1:
            return replace(self, is_tight=self.is_tight and is_tight)
        terms = frozenset(term._replace(scale=term.scale * factor) for term in self.terms)
        why = self.why or (why if math.isinf(factor) else "")
        return replace(self, terms=terms, is_tight=self.is_tight and is_tight, why=why)


def added(sums: Iterable[Sum]) -> Sum:
    """Sums added up."""
    scales: dict[tuple[Hashable, frozenset[int]], float] = {}
    sums = list(sums)
    for term in (term for one in sums for term in one.terms):
        key = term[:2]
        scales[key] = scales.get(key, 0.0) + term.scale
    return _of(scales, sums)


def side_by_side(sums: Iterable[Sum]) -> Sum:
    """Sums next to each other in one array. Different leaves of one clipped sum share its bound."""
    sums = list(sums)
    found: dict[Hashable, list[Linear]] = {}
    for term in (term for one in sums for term in one.apart()):
        before = found.setdefault(term.source, [])
        for i, other in enumerate(before):
            if not other.leaves & term.leaves:
                leaves, scale = other.leaves | term.leaves, max(other.scale, term.scale)
                before[i] = Linear(term.source, leaves, scale)
                break
        else:
            before.append(term)
    scales: dict[tuple[Hashable, frozenset[int]], float] = {}
    for term in (term for terms in found.values() for term in terms):
        scales[term[:2]] = math.hypot(scales.get(term[:2], 0.0), term.scale)
    return _of(scales, sums)


def either(sums: Iterable[Sum]) -> Sum:
    """Any of several sums."""
    scales: dict[tuple[Hashable, frozenset[int]], float] = {}
    sums = list(sums)
    for term in (term for one in sums for term in one.terms):
        scales[term[:2]] = max(scales.get(term[:2], 0.0), term.scale)
    return _of(scales, sums)


def _of(scales: Mapping[tuple[Hashable, frozenset[int]], float], sums: list[Sum]) -> Sum:
    terms = frozenset(Linear(*key, scale) for key, scale in scales.items())
    why = next((one.why for one in sums if one.why), "")
    spread = frozenset[str]().union(*(one.spread for one in sums))
    turns = frozenset[Hashable].intersection(*(one.turns for one in sums))
    return Sum(
        terms,
        all(one.is_tight for one in sums),
        why,
        spread,
        turns,
        releases=Nothing.union(*(one.releases for one in sums)),
        kept_in=frozenset[Hashable]().union(*(one.kept_in for one in sums)),
        is_even=all(one.is_even for one in sums),
    )


class Rows(NamedTuple):
    """Entries along a dimension that belong to different rows of the data.

    Attributes:
        axis: which rows they are: equal for arrays whose rows belong together.
        dim: the dimension.
        inner: entry `i` belongs to row `i // inner % num_rows`.
        num_rows: how many rows there are.
    """

    axis: Hashable
    dim: int
    inner: int
    num_rows: int


class Cut(NamedTuple):
    """Some of the rows along an axis.

    Attributes:
        axis: which rows.
        start: the first; or the loop, or the mesh axes, of which each turn or device has its own.
        stop: behind the last; None where `start` is a loop or mesh axes.
    """

    axis: Hashable
    start: Hashable
    stop: int | None


Reason: TypeAlias = Literal[
    "data", "nonlinear", "unknown", "kept", "mixed", "rounded", "noise known", "taken", "slots"
]


@dataclass(frozen=True)
class Private:
    """A value of which nothing is known but that private data is in it.

    Attributes:
        rows: the dimensions along which rows of the data are apart.
        cuts: which of the rows it can depend on.
        reason: data as it came in; a nonlinear function of a clipped sum, and so on.
        where: the line that made it so.
        arguments: numbers of arguments that it came back as, from an earlier call.
        noised: noise that was added to it, standard deviation and line; None without.
    """

    rows: frozenset[Rows] = frozenset()
    cuts: frozenset[Cut] = frozenset()
    reason: Reason = "data"
    where: str = ""
    arguments: frozenset[int] = frozenset()
    noised: tuple[float, str] | None = None


Value: TypeAlias = Public | Random | Sum | Private


def made_of(inputs: Sequence[Public]) -> Public:
    """A public value that is made of others."""
    return Public(
        releases=Nothing.union(*(value.releases for value in inputs)),
        noise=Nothing.union(*(value.noise for value in inputs)),
        words=frozenset[Key]().union(*(value.words | keys_of(value) for value in inputs)),
        changes=frozenset[Hashable]().union(*(value.changes for value in inputs)),
    )


def keys_of(value: Public) -> frozenset[Key]:
    """The key that a value is, if it is one."""
    return frozenset({value.term} if isinstance(value.term, Key) else ())


def words_of(value: Public, made: Public) -> frozenset[Key]:
    """The keys whose words a value holds, that is made of others; of a known key, itself alone."""
    if isinstance(value.term, Key) and value.term.root != UNKNOWN:
        return frozenset({value.term} if value.term.is_words else ())
    return made.words


def unknown(inputs: Sequence[Value], reason: Reason | None, line: str) -> Private:
    """A value made of others of which at least one is private."""
    private = [value for value in inputs if isinstance(value, Private)]
    arguments = frozenset[int]().union(*(value.arguments for value in private))
    noised = next((value.noised for value in private if value.noised is not None), None)
    has_sum = any(isinstance(value, Sum) for value in inputs)
    known = [value for value in private if value.reason != "data"]
    if not known and not has_sum and reason is None:
        known = private
    if known:
        whole = replace(known[0], rows=frozenset(), cuts=frozenset())
        return replace(whole, arguments=arguments, noised=noised)
    return Private(reason=reason or "nonlinear", where=line, arguments=arguments, noised=noised)


def as_public(value: Public | Random) -> Public:
    """Random numbers of which nothing is known but where they were drawn."""
    return value if isinstance(value, Public) else Public(noise=value.draws)
