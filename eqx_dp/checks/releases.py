"""How much noise hides the clipped sums of a step: its releases, put together."""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .flow import Loop
from .rows import apart
from .terms import Key
from .values import Cut, Linear, Path, Sum, Value


class Source(NamedTuple):
    """A clipped sum of the engine's, of the leaves that one clip norm is for.

    Attributes:
        bound: the L2 norm of what one example adds at most.
        cuts: which rows of the data it is over.
        line: where the engine is called.
    """

    bound: float
    cuts: frozenset[Cut]
    line: str


class Drawn(NamedTuple):
    """Random bits that a program draws.

    Attributes:
        key: that they are drawn with.
        line: where.
        loops: around it, outermost first.
    """

    key: Key
    line: str
    loops: tuple[Loop, ...]


class Noised(NamedTuple):
    """Noise that is added to a clipped sum.

    Attributes:
        value: the sum.
        stddev: the least standard deviation of an entry of the noise.
        draws: the bits that the noise is made of.
        part: which of their numbers, where a vector was cut.
        line: where it is added.
        loops: around it, outermost first.
        branches: around it: where the choice is, and the number of the branch.
    """

    value: Sum
    stddev: float
    draws: frozenset[Path]
    part: tuple[int, int] | None
    line: str
    loops: tuple[Loop, ...]
    branches: tuple[tuple[Hashable, int], ...]

    @property
    def is_known(self) -> bool:
        """Whether sensitivity and noise are both known."""
        return self.stddev > 0 and all(math.isfinite(term.scale) for term in self.value.terms)


class Group(NamedTuple):
    """Releases that have clipped sums in common.

    Attributes:
        releases: where they are.
        sources: the clipped sums.
    """

    releases: tuple[Path, ...]
    sources: tuple[Hashable, ...]


def alternatives(releases: Mapping[Path, Noised]) -> list[dict[Path, Noised]]:
    """The releases of a call, for each way in which its branches may be taken.

    Of more than six choices all branches count at once.
    """
    choices: defaultdict[Hashable, set[int]] = defaultdict(set)
    for release in releases.values():
        for choice, branch in release.branches:
            choices[choice].add(branch)
    several = {choice: branches for choice, branches in choices.items() if len(branches) > 1}
    if len(several) > 6:
        return [dict(releases)]
    return [
        {
            path: release
            for path, release in releases.items()
            if all(taken.get(choice, branch) == branch for choice, branch in release.branches)
        }
        for branches in itertools.product(*several.values())
        for taken in [dict(zip(several, branches, strict=True))]
    ]


def groups(releases: Mapping[Path, Noised]) -> list[Group]:
    """Releases that no clipped sum is in common to are in different groups."""
    found: list[tuple[set[Path], set[Hashable]]] = []
    for path, release in releases.items():
        sources = {term.source for term in release.value.terms}
        meeting = [group for group in found if group[1] & sources]
        found = [group for group in found if not group[1] & sources]
        merged = ({path}, sources)
        for paths, others in meeting:
            merged = (merged[0] | paths, merged[1] | others)
        found.append(merged)
    return [Group(tuple(paths), tuple(sources)) for paths, sources in found]


def sensitivity_by_noise(
    group: Group, releases: Mapping[Path, Noised], sources: Mapping[Hashable, Source]
) -> dict[Hashable, float]:
    """How far one example moves each clipped sum of a group, in units of the noise put on it.

    A leaf u with |u| <= C that is released as a_i u plus noise of standard deviation s_i, for
    several i, moves by at most sqrt(sum (a_i / s_i)^2) C; leaves of one sum share C, so that the
    largest counts. A release that a loop repeats, of the same rows of the data, counts each time.
    """
    found: dict[Hashable, float] = {}
    for source in group.sources:
        squares: defaultdict[int, float] = defaultdict(float)
        for release in (releases[path] for path in group.releases):
            for term in release.value.terms:
                if term.source == source:
                    ratio = _ratio(term, release) ** 2 * _repeats(release, sources[source])
                    for leaf in term.leaves:
                        squares[leaf] += ratio
        found[source] = math.sqrt(max(squares.values(), default=0.0)) * sources[source].bound
    return found


def _ratio(term: Linear, release: Noised) -> float:
    if term.scale == 0:
        return 0.0
    return term.scale / release.stddev if release.stddev else math.inf


def _repeats(release: Noised, source: Source) -> float:
    """How often a release is made of the same rows."""
    once = [
        loop
        for loop in release.loops
        if loop.path not in release.value.turns and not is_another_sample(source.cuts, loop.path)
    ]
    return math.prod(math.inf if loop.length is None else loop.length for loop in once)


def is_another_sample(cuts: Iterable[Cut], loop: Hashable) -> bool:
    """Whether each turn of a loop works on other rows of the data, or on another sample of them."""
    return any(cut.start in (loop, ("sample", loop)) for cut in cuts)


def noise_multiplier(
    found: Sequence[dict[Hashable, float]], sources: Mapping[Hashable, Source]
) -> float:
    """Noise by sensitivity, over several groups of releases.

    Several Gaussian mechanisms on one example are one, whose squared sensitivities in units of the
    noise add up (Dong, Roth and Su 2019, corollary 3.3). Of sums over rows that have nothing in
    common, an example is in one.
    """
    largest = 0.0
    for together in _together([*{source for group in found for source in group}], sources):
        squares = [sum(group.get(source, 0.0) for source in together) ** 2 for group in found]
        largest = max(largest, math.sqrt(sum(squares)))
    return 1 / largest if largest else math.inf


_MANY = 12


def _together(
    names: list[Hashable], sources: Mapping[Hashable, Source]
) -> list[tuple[Hashable, ...]]:
    """The largest sets of clipped sums that one example may be in."""
    if len(names) > _MANY and not any(
        apart(sources[a].cuts, sources[b].cuts) for a, b in itertools.combinations(names[:_MANY], 2)
    ):
        return [tuple(names)]
    found: list[tuple[Hashable, ...]] = []
    for name in names:
        fits = [
            (*one, name)
            for one in found
            if not any(apart(sources[name].cuts, sources[other].cuts) for other in one)
        ]
        part = [
            tuple(o for o in one if not apart(sources[name].cuts, sources[o].cuts)) for one in found
        ]
        found = [one for one in found if (*one, name) not in fits] + fits
        found += [(*one, name) for one in part if (*one, name) not in fits]
        found = [one for one in {*found, (name,)} if not any(set(one) < set(o) for o in found)]
    return found


def joint_bound(values: Sequence[Value], sources: Mapping[Hashable, Source]) -> float:
    """The most that one example moves several sums together, in L2 norm."""
    squares: defaultdict[tuple[Hashable, int], float] = defaultdict(float)
    for value in values:
        for term in value.terms if isinstance(value, Sum) else ():
            for leaf in term.leaves:
                squares[term.source, leaf] += term.scale**2
    scales: defaultdict[Hashable, float] = defaultdict(float)
    for (source, _), square in squares.items():
        scales[source] = max(scales[source], math.sqrt(square))
    return sum(scale * sources[source].bound for source, scale in scales.items())
