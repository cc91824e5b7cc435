"""How long programs take, side by side: all take turns, and the fastest turn of each counts."""

import random
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

Run = Callable[[], Any]
Turn = Callable[[Run], float]

# A turn lasts at least this long, so that neither the clock nor one interruption decides.
_TURN_SECONDS = 0.03
_SEARCH_ROUNDS = 3
# How many microbatch sizes are measured again after a first round of all of them.
_FINALISTS = 2
# What a library raises for a loss that it cannot take.
_UNABLE = (NotImplementedError, ValueError)

_Name = TypeVar("_Name", bound=Hashable)


class Program(NamedTuple):
    """Something to be timed, ready to run.

    Attributes:
        run: computes, and returns when the results are there.
        leaves: the arrays of what `run` returned, in the order of the trained leaves.
        temp_bytes: temporary memory of the compiled program; None where there is none.
    """

    run: Run
    leaves: Callable[[Any], list[Any]] = jax.tree.leaves
    temp_bytes: int | None = None


class Contender(NamedTuple):
    """A program at the microbatch sizes that are tried; None is the whole batch."""

    name: str
    prepare: Callable[[int | None], Program]
    sizes: Sequence[int | None] = (None,)


class Result(NamedTuple):
    """A contender at its fastest microbatch size, with its seconds in every round."""

    microbatch_size: int | None
    program: Program
    seconds: list[float]

    @property
    def best(self) -> float:
        """Seconds of the fastest round."""
        return min(self.seconds)

    @property
    def at(self) -> str:
        """The microbatch size, in words."""
        return "whole" if self.microbatch_size is None else str(self.microbatch_size)


def interleaved(
    programs: dict[_Name, Run], rounds: int, turn: Turn | None = None
) -> dict[_Name, list[float]]:
    """Seconds of each program in each round, by name. Each round has an order of its own.

    `turn` gives a program's seconds in one turn; by default the median of a few runs.
    """
    take = median_turn if turn is None else turn
    shuffled, order = random.Random(0), list(programs)
    seconds: dict[_Name, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            seconds[name].append(take(programs[name]))
    return seconds


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    turn: Turn | None = None,
    search: Turn | None = None,
    refused: dict[str, str] | None = None,
) -> dict[str, Result]:
    """Measures contenders in rounds that all share, each at its fastest microbatch size.

    Args:
        contenders: what is measured.
        rounds: how many rounds.
        turn: seconds of a program in one turn; by default the median of a few runs.
        search: the same, while microbatch sizes are compared.
        refused: receives the contenders that cannot take the loss, and why; None to raise instead.
    """
    chosen: dict[str, tuple[int | None, Program]] = {}
    for contender in contenders:
        try:
            chosen[contender.name] = at_its_fastest(contender, search or turn)
        except _UNABLE as error:
            if refused is None:
                raise
            refused[contender.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    seconds = interleaved({name: p.run for name, (_, p) in chosen.items()}, rounds, turn)
    return {name: Result(*found, seconds[name]) for name, found in chosen.items()}


def at_its_fastest(contender: Contender, turn: Turn | None = None) -> tuple[int | None, Program]:
    """The contender at its fastest microbatch size. Sizes that it cannot take are left out.

    Raises:
        NotImplementedError: it can take none; ValueError likewise.
    """
    programs: dict[int | None, Program] = {}
    refused: Exception | None = None
    for size in contender.sizes:
        try:
            programs[size] = contender.prepare(size)
        except _UNABLE as error:
            refused = error
    if refused is not None and not programs:
        raise refused
    if len(programs) > 1:
        seconds = interleaved({size: p.run for size, p in programs.items()}, 1, turn)
        finalists = sorted(programs, key=lambda size: seconds[size])[:_FINALISTS]
        again = {size: programs[size].run for size in finalists}
        more = interleaved(again, _SEARCH_ROUNDS - 1, turn)
        best = min(finalists, key=lambda size: min(seconds[size] + more[size]))
        return best, programs[best]
    return next(iter(programs.items()))


def compared(seconds: Sequence[float], reference: Sequence[float]) -> str:
    """The ratio of the fastest rounds, and the quartiles of the ratios round by round."""
    low, high = np.quantile(np.divide(seconds, reference), (0.25, 0.75))
    return f"{min(seconds) / min(reference):.2f} ({low:.2f}-{high:.2f})"


def once(run: Run) -> float:
    """Seconds of one run, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def median_turn(run: Run) -> float:
    """Median seconds of a few runs, after one that fills the caches and lets threads settle."""
    once(run)
    taken: list[float] = []
    while sum(taken) < _TURN_SECONDS:
        taken.append(once(run))
    return float(np.median(taken))


def mean_turn(runs: int) -> Turn:
    """A turn of so many runs, after one that is not timed: for programs whose runs differ."""

    def turn(run: Run) -> float:
        once(run)
        return float(np.mean([once(run) for _ in range(runs)]))

    return turn
