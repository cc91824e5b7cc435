"""Whether random keys are independent: how their paths from one root part.

Bits that are drawn with two keys of one root are independent if the paths part at some step. If one
path begins with the other, bits are drawn from a key that is also split. (Up to collisions of the
generator, as everywhere in JAX.)
"""

import math
from collections.abc import Hashable

from .terms import (
    UNKNOWN,
    Affine,
    Again,
    Counters,
    Each,
    Key,
    Listed,
    Number,
    Root,
    Span,
    Step,
    parts_of,
)


def differ(a: Step, b: Step, counters: Counters) -> bool | None:
    """Whether two numbers are never equal, in whatever turns of their loops.

    Returns:
        True if they differ in all turns, False if they are equal in some; None if it is not known.
    """
    if isinstance(a, Again) or isinstance(b, Again):
        return None
    found = [_values(term) for term in (a, b)]
    if found[0] is not None and found[1] is not None:
        return not {value % 2**32 for value in found[0]} & {value % 2**32 for value in found[1]}
    one, other = parts_of(a), parts_of(b)
    if one is None or other is None or one[:2] != other[:2] or one[0] == UNKNOWN:
        return None
    base, slope, offset = one
    if (offset - other[2]) % 2**32 == 0:
        return False
    turns = counters.get(base.name) if isinstance(base, Root) else None
    if isinstance(base, Each):
        return None
    change = 0 if turns is None else slope * turns.change
    return change == 0 or (offset - other[2]) % change != 0


def _values(term: Number) -> range | tuple[int, ...] | None:
    match term:
        case Span(start, stop):
            return range(start, stop)
        case Listed(values):
            return values
        case Each(_, Span() | Listed() as inner):
            return _values(inner)
        case _:
            return None


def paths_part(a: tuple[Step, ...], b: tuple[Step, ...], counters: Counters) -> bool | None:
    """Whether two paths from one root part, so that what is drawn from the ends is independent.

    Returns:
        True if they part in all turns of all loops, False if they are equal or one goes on from the
        other; None if it is not known.
    """
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if isinstance(x, Again) and isinstance(y, Again) and x[:2] == y[:2]:
            tails = a[i + 1 :], b[i + 1 :]
            return _after_again(x, y, tails, counters)
        if isinstance(x, Again) or isinstance(y, Again):
            # After any number of turns, none included, the first step has to be another one.
            its_own = [_first_steps(path[i:]) for path in (a, b)]
            parted = [differ(p, q, counters) for p in its_own[0] for q in its_own[1]]
            return True if all(parted) and all(its_own) else None
        found = differ(x, y, counters)
        if found is not False:
            return found
    return False


def _after_again(
    a: Again, b: Again, tails: tuple[tuple[Step, ...], tuple[Step, ...]], counters: Counters
) -> bool | None:
    """Both have taken the same steps, as often or one more often than the other."""
    if a.is_done and b.is_done:
        return paths_part(*tails, counters)
    found: list[bool | None] = []
    if a.is_done == b.is_done:  # in the same turn
        found.append(paths_part(*tails, counters))
    for done, tail in ((b.is_done, tails[0]), (a.is_done, tails[1])):
        if done or a.is_done == b.is_done:  # one turn or more behind the other
            found.append(paths_part(tail, a.steps, counters))
    if all(found):
        return True
    return False if False in found else None


def _first_steps(path: tuple[Step, ...]) -> list[Step]:
    """The steps that a path may begin with; none if it may be empty."""
    if not path:
        return []
    if not isinstance(path[0], Again):
        return [path[0]]
    later = _first_steps(path[1:])
    return [*_first_steps(path[0].steps), *later] if later else []


def is_new_each_turn(key: Key, loop: Hashable, counters: Counters) -> bool | None:
    """Whether keys differ, and are independent, between any two turns of a loop, or two calls.

    Returns:
        True if so; False if all turns have the same key; None if it is not known.
    """
    for i, step in enumerate(key.path):
        if isinstance(step, Again) and step.loop == loop:
            return paths_part(step.steps, key.path[i + 1 :], counters)
        if not isinstance(step, Again) and _is_new_number(step, loop, counters):
            return True
    steps = [key.root, *key.path]
    return None if any(_may_change(step, loop) for step in steps) else False


def _is_new_number(term: Number, loop: Hashable, counters: Counters) -> bool:
    parts = parts_of(term)
    if parts is None:
        return False
    base, slope, _ = parts
    if isinstance(base, Each):  # of an argument's entries it is assumed that they differ
        return base.loop == loop and slope % 2 == 1
    turns = counters.get(base.name)
    if turns is None:
        return False
    if turns.loop == loop:
        return _is_long(slope * turns.change)
    # A counter of a loop inside of this one, which starts where the last time has ended.
    start = None if turns.start is None else parts_of(turns.start)
    outer = counters.get(start[0].name) if start and isinstance(start[0], Root) else None
    if start is None or outer is None or outer.loop != loop or turns.length is None:
        return False
    is_long = _is_long(slope * start[1] * outer.change) and _is_long(slope * turns.change)
    return is_long and abs(start[1] * outer.change) >= abs(turns.change * turns.length)


def _is_long(change: int) -> bool:
    """Whether a number of 32 bits takes very many turns to come back to where it was."""
    return change != 0 and math.gcd(change, 2**32) <= 2**8


def _may_change(term: Step, loop: Hashable) -> bool:
    """Whether a term hangs on what a loop changes, or on what nothing is known of."""
    match term:
        case Again(its_loop, steps, _):
            return its_loop == loop or any(_may_change(step, loop) for step in steps)
        case Each(its_loop, inner):
            return its_loop == loop or _may_change(inner, loop)
        case Affine(base):
            return _may_change(base, loop)
        case Root():
            return term == UNKNOWN or loop in term.varies
        case _:
            return False


def independent(a: Key, b: Key, counters: Counters) -> bool | None:
    """Whether what is drawn with two keys is independent, in whatever turns of their loops.

    Different arguments and different constants are taken for keys that have nothing in common.

    Returns:
        As `paths_part`.
    """
    if a.root == b.root and a.root != UNKNOWN:
        return paths_part(a.path, b.path, counters)
    kinds = {_kind(key.root) for key in (a, b)}
    is_known = kinds <= {"argument", "constant"} or kinds == {"argument", "seeds"}
    return True if is_known else None


def _kind(root: Root) -> Hashable:
    match root.name:
        case (kind, *_):
            return kind
        case name:
            return name
