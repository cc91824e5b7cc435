"""Times, temporary memory and compile times of a row's contenders, taken side by side."""

import random
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import numpy as np

from .contenders import Contender, Program
from .rows import Row

# A turn lasts at least this long, so that neither the clock nor one interruption decides.
_TURN_SECONDS = 0.03
_SEARCH_ROUNDS = 3

_Name = TypeVar("_Name", bound=Hashable)


class Result(NamedTuple):
    """What was measured of one contender on one row.

    Attributes:
        contender: its name.
        microbatch_size: its best one; None for the whole batch, or for a choice of its own.
        seconds: of one gradient, a number a round.
        compile_seconds: None where nothing is compiled.
        temp_bytes: of the compiled program, None where there is none.
    """

    contender: str
    microbatch_size: int | None
    seconds: list[float]
    compile_seconds: float | None
    temp_bytes: int | None


class Spread(NamedTuple):
    low: float
    median: float
    high: float


def ratio(result: Result, reference: Result) -> Spread:
    """Quartiles of the rounds' ratios of time: what slows down a whole round cancels."""
    ratios = np.divide(result.seconds, reference.seconds)
    return Spread(*map(float, np.quantile(ratios, (0.25, 0.5, 0.75))))


def interleaved(programs: dict[_Name, Program], rounds: int) -> dict[_Name, list[float]]:
    """Seconds of each program in each round. Each round has an order of its own."""
    shuffled, order = random.Random(0), list(programs)
    seconds: dict[_Name, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            seconds[name].append(_turn(programs[name]))
    return seconds


def _turn(program: Program) -> float:
    """Median seconds of a few runs, after one that drives out what the one before left behind.

    Caches are that program's own by then, as they are in training, and the threads of another
    library have stopped waiting for work.
    """
    program.run()
    taken: list[float] = []
    while sum(taken) < _TURN_SECONDS:
        start = time.perf_counter()
        program.run()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def at_its_best(contender: Contender, row: Row) -> tuple[int | None, Program]:
    """The contender at the microbatch size that is fastest on this row."""
    programs = {size: contender.prepare(row, size) for size in contender.sizes(row)}
    if len(programs) == 1:
        return next(iter(programs.items()))
    seconds = interleaved(programs, _SEARCH_ROUNDS)
    best = min(programs, key=lambda size: min(seconds[size]))
    return best, programs[best]


def measure(
    row: Row,
    contenders: list[Contender],
    repeats: int,
    tell: Callable[[str], None] = lambda message: None,
) -> list[Result]:
    """Measures all contenders on a row, each at its best, in rounds that all of them share."""
    chosen: dict[str, tuple[int | None, Program]] = {}
    for contender in contenders:
        tell(f"{row.name}: preparing {contender.name}")
        chosen[contender.name] = at_its_best(contender, row)
    tell(f"{row.name}: timing {len(chosen)} contenders in {repeats} rounds")
    seconds = interleaved({name: program for name, (_, program) in chosen.items()}, repeats)
    return [
        Result(name, size, seconds[name], program.compile_seconds, program.temp_bytes)
        for name, (size, program) in chosen.items()
    ]
