"""Threads that read parts of a batch at the same time."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..privacy import whole_number

X = TypeVar("X")
Y = TypeVar("Y")


class Readers:
    """Threads for a source: made when there is something to read, ended by `close`.

    A source that is pickled, or used in a forked process, has threads of its own there.

    With one reader, the thread that asks reads.

    Raises:
        ValueError: it is no whole number from 1 to 1024.
    """

    def __init__(self, number: Any):
        self.number = whole_number("readers", number, least=1, most=1024)
        self._lock, self._pool, self._process = threading.Lock(), None, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number,)

    def map(self, function: Callable[[X], Y], items: Iterable[X]) -> list[Y]:
        """What a function returns for each item, in their order."""
        if self.number == 1:
            return [function(item) for item in items]
        with self._lock:  # several batches may be read, and another reader may close
            if self._pool is None or self._process != os.getpid():
                self._pool = ThreadPoolExecutor(self.number, "eqx_dp-records")
                self._process = os.getpid()
            found = self._pool.map(function, items)  # all are handed in at once
        return list(found)

    def close(self) -> None:
        """Ends the threads, if there are any; those that are needed later are made anew."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown()
