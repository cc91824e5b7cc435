"""How much noise hides the clipped sums of a step: its releases, put together."""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .flow import Context
from .terms import Key
from .values import Cut, Linear, Path, Sum, Value


class Source(NamedTuple):
    """A clipped sum of the engine's, of the leaves that one clip norm is for.

    Attributes:
        bound: the L2 norm of what one example adds at most.
        cuts: which rows of the data it is over.
        line: where the engine is called.
        function: what is clipped, and the model: equal for the same.
    """

    bound: float
    cuts: frozenset[Cut]
    line: str
    function: Hashable = None


class Drawn(NamedTuple):
    """Random bits that a program draws.

    Attributes:
        key: that they are drawn with.
        at: where.
    """

    key: Key
    at: Context


class Noised(NamedTuple):
    """Noise that is added to a clipped sum.

    Attributes:
        value: the sum.
        stddev: the least standard deviation of an entry of the noise.
        draws: the bits that the noise is made of.
        part: which of their numbers, where a vector was cut.
        at: where it is added.
    """

    value: Sum
    stddev: float
    draws: frozenset[Path]
    part: tuple[int, int] | None
    at: Context

    @property
    def is_known(self) -> bool:
        """Whether sensitivity and noise are both known."""
        return self.stddev > 0 and all(math.isfinite(term.scale) for term in self.value.terms)


class Group(NamedTuple):
    """Releases that have clipped sums in common."""

    releases: tuple[Path, ...]
    sources: tuple[Hashable, ...]


def alternatives(releases: Mapping[Path, Noised]) -> list[dict[Path, Noised]]:
    """The releases of a call, for each way in which its branches may be taken.

    Of more than six choices all branches count at once.
    """
    choices: defaultdict[Hashable, set[int]] = defaultdict(set)
    for release in releases.values():
        for choice, branch in release.at.branches:
            choices[choice].add(branch)
    several = {choice: branches for choice, branches in choices.items() if len(branches) > 1}
    if len(several) > 6:
        return [dict(releases)]
    return [
        {
            path: release
            for path, release in releases.items()
            if all(taken.get(choice, branch) == branch for choice, branch in release.at.branches)
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
) -> float:
    """How far one example moves the releases of a group, in units of the noise put on them.

    A leaf u with |u| <= C that is released as a_i u plus noise of standard deviation s_i, for
    several i, moves by at most sqrt(sum (a_i / s_i)^2) C; leaves of one sum share C, so that the
    largest counts. A release that a loop repeats, of the same rows of the data, counts each time.

    An example that is added or removed moves all rows behind it by one, for a sampler gives rows
    without gaps. A sum over all slices of a batch does not see that. A part of them loses one
    example and gains another: it moves twice as far.
    """
    found = {source: _of_source(source, group, releases, sources) for source in group.sources}
    total, parts = 0.0, defaultdict[Hashable, list[tuple[Cut, float]]](list)
    for source, moved in found.items():
        cuts = [cut for cut in sources[source].cuts if isinstance(cut.start, int)]
        if len(cuts) == 1:
            parts[cuts[0].axis].append((cuts[0], moved))
        else:
            total += moved * (2 if cuts else 1)
    for axis, cut in parts.items():
        moved = [each for _, each in cut]
        is_even = max(moved) <= min(moved) * (1 + 1e-6) and _are_alike(group, releases, sources)
        is_whole = is_even and _are_all([one for one, _ in cut], _length(axis))
        total += max(moved) if is_whole else 2 * sum(moved)
    return total


def _are_alike(
    group: Group, releases: Mapping[Path, Noised], sources: Mapping[Hashable, Source]
) -> bool:
    """Whether clipped sums are of one function, and every release holds the same of each."""
    for path in group.releases:
        value = releases[path].value
        leaves: defaultdict[Hashable, set[frozenset[int]]] = defaultdict(set)
        for term in value.terms:
            leaves[term.source].add(term.leaves)
        if not value.is_even or any(one != next(iter(leaves.values())) for one in leaves.values()):
            return False
    return len({sources[source].function for source in group.sources}) == 1


def _of_source(
    source: Hashable,
    group: Group,
    releases: Mapping[Path, Noised],
    sources: Mapping[Hashable, Source],
) -> float:
    squares: defaultdict[int, float] = defaultdict(float)
    for release in (releases[path] for path in group.releases):
        for term in release.value.apart():
            if term.source == source:
                ratio = _ratio(term, release) ** 2 * _repeats(release, sources[source])
                for leaf in term.leaves:
                    squares[leaf] += ratio
    return math.sqrt(max(squares.values(), default=0.0)) * sources[source].bound


def _are_all(cuts: list[Cut], length: int | None) -> bool:
    """Whether slices make up an axis, none of it twice."""
    ends = sorted((cut.start, cut.stop) for cut in cuts if isinstance(cut.start, int))
    starts, stops = [start for start, _ in ends], [stop for _, stop in ends]
    return [*starts, length] == [0, *stops]


def _length(axis: Hashable) -> int | None:
    match axis:
        case ("axis", _, int() as length):
            return length
        case ("split", _, tuple() as sizes, int() as i):
            return sizes[i]  # pyright: ignore
        case _:
            return None


def _ratio(term: Linear, release: Noised) -> float:
    if term.scale == 0:
        return 0.0
    return term.scale / release.stddev if release.stddev else math.inf


def _repeats(release: Noised, source: Source) -> float:
    """How often a release is made of the same batch; four times as often, if of parts of it."""
    found = 1.0
    for loop in release.at.loops:
        is_sample = is_another_sample(source.cuts, loop.path) and loop.length is not None
        if loop.path in release.value.turns or is_sample:
            continue
        is_part = any(cut.start == loop.path for cut in source.cuts)
        found *= (math.inf if loop.length is None else loop.length) * (4 if is_part else 1)
    return found


def is_another_sample(cuts: Iterable[Cut], loop: Hashable) -> bool:
    """Whether each turn of a loop works on another batch, and not on a part of one."""
    return any(cut.start == ("sample", loop) for cut in cuts)


def batches(release: Noised, sources: Mapping[Hashable, Source]) -> frozenset[Cut]:
    """Which of several batches a release is made of; none where there is but one."""
    return frozenset(
        cut
        for term in release.value.terms
        for cut in sources[term.source].cuts
        if isinstance(cut.start, tuple) and cut.start[:1] == ("batch",)
        if cut.start != ("batch", 0, 0)  # somewhere
    )


def noise_multiplier(found: Sequence[float]) -> float:
    """Noise by sensitivity, over several groups of releases.

    Several Gaussian mechanisms on one example are one, whose squared sensitivities in units of the
    noise add up (Dong, Roth and Su 2019, corollary 3.3).
    """
    largest = math.hypot(*found)
    return 1 / largest if largest else math.inf


def joint_bound(values: Sequence[Value], sources: Mapping[Hashable, Source]) -> float:
    """The most that one example moves several sums together, in L2 norm."""
    squares: defaultdict[tuple[Hashable, int], float] = defaultdict(float)
    for value in values:
        for term in value.apart() if isinstance(value, Sum) else ():
            for leaf in term.leaves:
                squares[term.source, leaf] += term.scale**2
    scales: defaultdict[Hashable, float] = defaultdict(float)
    for (source, _), square in squares.items():
        scales[source] = max(scales[source], math.sqrt(square))
    return sum((scale * sources[source].bound for source, scale in scales.items()), 0.0)
