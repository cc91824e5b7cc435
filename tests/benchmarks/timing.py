"""How long compiled programs take, side by side."""

import random
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

# A turn lasts at least this long, so that neither the clock nor one interruption decides.
_TURN_SECONDS = 0.03

_Name = TypeVar("_Name", bound=Hashable)


class Spread(NamedTuple):
    """The quartiles of some measurements."""

    low: float
    median: float
    high: float


def interleaved(
    programs: dict[_Name, Callable[[], Any]],
    rounds: int,
    turn: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[_Name, list[float]]:
    """Seconds of each program in each round, by name. Each round has an order of its own.

    `turn` gives a program's seconds in one turn; by default the median of a few runs.
    """
    take = _turn if turn is None else turn
    shuffled, order = random.Random(0), list(programs)
    seconds: dict[_Name, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            seconds[name].append(take(programs[name]))
    return seconds


def ratios(seconds: list[float], reference: list[float]) -> Spread:
    """Quartiles of the rounds' ratios: what slows down a whole round cancels."""
    low, median, high = np.quantile(np.divide(seconds, reference), (0.25, 0.5, 0.75))
    return Spread(float(low), float(median), float(high))


def once(program: Callable[[], Any]) -> float:
    """Seconds of one run, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start


def _turn(program: Callable[[], Any]) -> float:
    """Median seconds of a few runs, after one that fills the caches and lets threads settle."""
    once(program)
    taken: list[float] = []
    while sum(taken) < _TURN_SECONDS:
        taken.append(once(program))
    return float(np.median(taken))
