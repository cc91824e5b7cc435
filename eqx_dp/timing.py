"""Times compiled programs side by side."""

import random
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax

_Name = TypeVar("_Name", bound=Hashable)


def interleaved(programs: dict[_Name, Callable[[], Any]], rounds: int) -> dict[_Name, list[float]]:
    """Seconds of each program in each round, by name: of the second of two runs.

    Each round has an order of its own.
    """
    shuffled, order = random.Random(0), list(programs)
    seconds: dict[_Name, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            seconds[name].append(_once_warm(programs[name]))
    return seconds


def _once_warm(program: Callable[[], Any]) -> float:
    """Seconds until the results of a run are ready, after one that fills the caches."""
    jax.block_until_ready(program())
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start
