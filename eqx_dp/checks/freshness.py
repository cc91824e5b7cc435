"""Whether the noise of a step is new: its keys among each other, turn by turn, call by call."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from .key_paths import independent, is_new_each_turn, paths_part
from .privacy_report import Finding
from .record import Record
from .releases import Drawn, Noised
from .terms import SEEDS, Affine, Counters, Key, Listed, Root, Span
from .values import SOME, Path

_ADVICE = (
    "Derive it from a key that is used nowhere else, with the step folded in (plan.privatizer does "
    "so), or split a key and keep one half in the state."
)
_NO_CONSTANT = (
    "This key is a constant of the program. Pass the state that holds it as an argument, and take "
    "the next state from the results. What a function closes over is no argument, and the object "
    "of a bound method is none either."
)


class Calls(NamedTuple):
    """What becomes of keys among the arguments from call to call.

    Attributes:
        steps: by the name of an argument's root, the steps to the key that comes back in its place.
        given: the names of roots that nothing comes back as: the caller gives them anew.
    """

    steps: Mapping[Hashable, tuple[Any, ...]]
    given: frozenset[Hashable]


def fresh_noise(
    releases: Mapping[Path, Noised], record: Record, calls: Calls
) -> tuple[list[Finding], list[str]]:
    """What speaks against the noise being new, and what is taken for granted."""
    draws, counters = record.draws, record.counters
    hiding = {
        path: draws[path]
        for release in releases.values()
        for path in release.draws
        if path in draws
    }
    found = [*_same_noise_twice(releases)]
    for drawn in hiding.values():
        found += _each_turn(drawn, counters, calls)
        found += _secret(drawn, counters)
    found += _each_other(hiding, draws, record.of_losses, counters)
    given = {d.key.root.name: d for d in hiding.values() if d.key.root.name in calls.given}
    notes = [
        f"argument {name[1]} is taken for a key that is another one in each call"
        for name in given
        if isinstance(name, tuple)
    ]
    return list(dict.fromkeys(found)), notes


def _same_noise_twice(releases: Mapping[Path, Noised]) -> list[Finding]:
    """Two sums with the same noise on them: their difference has none."""
    uses: defaultdict[Path, list[Noised]] = defaultdict(list)
    for release in releases.values():
        for draw in release.draws:
            uses[draw].append(release)
    return [
        Finding(
            "fresh noise",
            f"the same noise is added to two sums, here and at {other.at.line}",
            one.at.line,
            f"The difference of the two has no noise. {_ADVICE}",
        )
        for those in uses.values()
        for one, other in itertools.combinations(those, 2)
        if _overlap(one.part, other.part)
    ]


def _overlap(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    if a is None or b is None or SOME in (a, b):
        return True
    return a[0] < b[1] and b[0] < a[1]


def _secret(drawn: Drawn, counters: Counters) -> list[Finding]:
    """A key that is made of numbers that all may know hides nothing."""
    seed = drawn.key.path[0] if drawn.key.root == SEEDS else None
    base = seed.base if isinstance(seed, Affine) else seed
    is_known = isinstance(base, Span | Listed) or (isinstance(base, Root) and base.name in counters)
    if not is_known:
        return []
    return [
        Finding(
            "fresh noise",
            "the noise's key is made in the step from a number that is not secret",
            drawn.at.line,
            f"Who knows the number can take the noise off again. {_ADVICE}",
        )
    ]


def _each_turn(drawn: Drawn, counters: Counters, calls: Calls) -> list[Finding]:
    found: list[Finding] = []
    for loop in drawn.at.loops:
        is_new = is_new_each_turn(drawn.key, loop.path, counters)
        if is_new is None or not is_new:
            found.append(_not_new(drawn, is_new, "turn of a loop"))
    is_new = _in_each_call(drawn, counters, calls)
    if not is_new:
        found.append(_not_new(drawn, is_new, "call of the step"))
    return found


def _not_new(drawn: Drawn, is_new: bool | None, what: str) -> Finding:
    is_decided = is_new is False
    name = drawn.key.root.name
    is_constant = isinstance(name, tuple) and name[:1] == ("constant",)
    may = "is" if is_decided else "may be"
    return Finding(
        "fresh noise",
        f"the noise {may} the same in each {what}: its key does not change, or is drawn from and "
        "split as well"
        if is_decided
        else f"it is not known whether the noise is another one in each {what}",
        drawn.at.line,
        "Two results with the same noise show private data by their difference. "
        f"{_NO_CONSTANT if is_constant else _ADVICE}",
        is_decided,
    )


def _in_each_call(drawn: Drawn, counters: Counters, calls: Calls) -> bool | None:
    root = drawn.key.root
    if root.name in calls.given:
        return True
    if steps := calls.steps.get(root.name):
        return paths_part(steps, drawn.key.path, counters)
    return is_new_each_turn(drawn.key, "calls", counters)


def _each_other(
    hiding: Mapping[Path, Drawn],
    draws: Mapping[Path, Drawn],
    of_losses: Mapping[Path, Drawn],
    counters: Counters,
) -> list[Finding]:
    """Draws of noise against all other draws, and against the keys that losses are given."""
    found: list[Finding] = []
    others = {**draws, **{("loss", *path): drawn for path, drawn in of_losses.items()}}
    seen: set[tuple[Key, Key]] = set()
    for path, drawn in hiding.items():
        for other_path, other in others.items():
            is_done = other_path in hiding and other_path <= path
            is_other_branch = any(
                choice == at and branch != taken
                for choice, branch in drawn.at.branches
                for at, taken in other.at.branches
            )
            if path == other_path or is_done or (is_other_branch and drawn.key == other.key):
                continue
            if (drawn.key, other.key) in seen:
                continue
            is_apart = independent(drawn.key, other.key, counters)
            if is_apart:
                continue
            seen.add((drawn.key, other.key))
            is_loss = other_path[:1] == ("loss",)
            what = "the loss is given a key" if is_loss else "random numbers are drawn"
            found.append(
                Finding(
                    "fresh noise",
                    f"{what} at {other.at.line}, from the key of this noise or one split from it"
                    if is_apart is False
                    else f"{what} at {other.at.line}, and it is not known whether from another key",
                    drawn.at.line,
                    f"Noise must depend on nothing else. {_ADVICE}",
                    is_apart is False,
                )
            )
    return found
