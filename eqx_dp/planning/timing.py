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
            jax.block_until_ready(programs[name]())  # fills the caches
            start = time.perf_counter()
            jax.block_until_ready(programs[name]())
            seconds[name].append(time.perf_counter() - start)
    return seconds
