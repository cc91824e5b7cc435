"""Epsilon of the steps after which it is told, worked out while earlier ones are taken."""

import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

# As many as are shown in a run: they are there when the first step has been compiled.
_AHEAD = 20


class ForeseenEpsilon:
    """A context in which epsilon is worked out ahead, in a thread beside the steps.

    It depends on the plan alone, and the steps after which it is told are known from the start. So
    the first figures are worked out while the first step is compiled, and later ones long before
    their step. Nobody waits for a figure but who asks for it before it is there.

    Args:
        epsilon: of so many steps.
        told_after: the next step after a given one after which epsilon is told; None for no more.
        start: how many steps have been taken.
    """

    def __init__(
        self,
        epsilon: Callable[[int], float],
        told_after: Callable[[int], int | None],
        start: int,
    ):
        self._epsilon, self._told_after, self._last = epsilon, told_after, start
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="eqx_dp-epsilon")
        self._coming: collections.deque[tuple[int, Future[float]]] = collections.deque()

    def __enter__(self) -> "ForeseenEpsilon":
        self._foresee()
        return self

    def after(self, step: int) -> float | None:
        """Epsilon after a step; None where it is not told. To be asked after every step."""
        if not self._coming or self._coming[0][0] != step:
            return None
        _, figure = self._coming.popleft()
        self._foresee()
        return figure.result()

    def _foresee(self) -> None:
        while len(self._coming) < _AHEAD and (step := self._told_after(self._last)) is not None:
            self._coming.append((step, self._worker.submit(self._epsilon, step)))
            self._last = step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)
