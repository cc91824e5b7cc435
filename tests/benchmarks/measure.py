"""Times, temporary memory and compile times of a row's contenders, taken side by side."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.benchmarks.timing import Spread, interleaved, once, ratios

from .contenders import Contender, Program
from .rows import Row

_SEARCH_ROUNDS = 3
# How many microbatch sizes are still in it after a first round of all of them.
_FINALISTS = 2
# What a library says of a loss that it cannot take.
_UNABLE = (NotImplementedError, ValueError)


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


def ratio(result: Result, reference: Result) -> Spread:
    """Quartiles of the rounds' ratios of time: what slows down a whole round cancels."""
    return ratios(list(result.seconds), list(reference.seconds))


def mean_of(runs: int) -> Callable[[Callable[[], Any]], float]:
    """A turn of so many runs, after one that is not timed: for programs whose runs differ."""

    def turn(program: Callable[[], Any]) -> float:
        once(program)
        return float(np.mean([once(program) for _ in range(runs)]))

    return turn


def at_its_best(
    contender: Contender,
    row: Row,
    rounds: int = _SEARCH_ROUNDS,
    turn: Callable[[Callable[[], Any]], float] | None = None,
) -> tuple[int | None, Program]:
    """The contender at the microbatch size that is fastest on this row, turn as `interleaved`'s.

    Sizes that it cannot take are left out.

    Raises:
        NotImplementedError: it can take none.
    """
    programs: dict[int | None, Program] = {}
    refused = ""
    for size in contender.sizes(row):
        try:
            programs[size] = contender.prepare(row, size)
        except _UNABLE as error:
            refused = f"{type(error).__name__}: {error}"
    if not programs:
        raise NotImplementedError(refused)
    if len(programs) == 1:
        return next(iter(programs.items()))
    seconds = interleaved({size: program.run for size, program in programs.items()}, 1, turn)
    finalists = sorted(programs, key=lambda size: seconds[size])[:_FINALISTS]
    again = interleaved({size: programs[size].run for size in finalists}, rounds - 1, turn)
    best = min(finalists, key=lambda size: min(seconds[size] + again[size]))
    return best, programs[best]


def measure(
    row: Row,
    contenders: list[Contender],
    repeats: int,
    tell: Callable[[str], None] = lambda message: None,
    refused: dict[str, str] | None = None,
) -> list[Result]:
    """Measures all contenders on a row, each at its best, in rounds that all of them share.

    Args:
        row: the row.
        contenders: who is measured.
        repeats: how many rounds.
        tell: is told what is going on.
        refused: gets who cannot take the row, and why; None to raise instead.
    """
    chosen: dict[str, tuple[int | None, Program]] = {}
    for contender in contenders:
        tell(f"{row.name}: preparing {contender.name}")
        try:
            chosen[contender.name] = at_its_best(contender, row)
        except NotImplementedError as error:
            if refused is None:
                raise
            refused[contender.name] = str(error)
    tell(f"{row.name}: timing {len(chosen)} contenders in {repeats} rounds")
    seconds = interleaved({name: program.run for name, (_, program) in chosen.items()}, repeats)
    return [
        Result(name, size, seconds[name], program.compile_seconds, program.temp_bytes)
        for name, (size, program) in chosen.items()
    ]
