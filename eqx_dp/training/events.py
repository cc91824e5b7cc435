"""Events after every step, and their listeners: progress bar, JSON lines.

Nothing here depends on the data, except the results of an evaluation.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

from ..expected import RunPath
from ..extras import extra
from ..files import append, finite_or_none, going_on
from ..privacy import PrivacyPlan, epsilon_beyond
from .dispatch import FlatState
from .hosts import is_first_host
from .state import TrainState

# The keys of a line of metrics that are not measured values.
_RESERVED = ("step", "seconds", "epsilon")


@dataclasses.dataclass(frozen=True)
class Event:
    """A step was taken.

    Attributes:
        step: how many steps may have been released so far, by all starts of the run: what epsilon
            depends on. It is this start's own steps, and those that the others had announced when
            the ledger was last read: after each evaluation, wherever there is an epsilon, and
            before each block. Without a directory, how many were taken.
        metrics: numbers by name, from an evaluation. Empty after most steps.
        seconds: the time since this start began.
        epsilon: epsilon of those steps; None if it was not computed after this step.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float
    epsilon: float | None
    _flat: FlatState[Any] = dataclasses.field(repr=False)

    @functools.cached_property
    def state(self) -> TrainState[Any]:
        """The state after the step. To read an array waits until the step is done.

        The next step uses it up: read it, or copy it, at once.
        """
        return self._flat.state


Callback = Callable[[Event], bool | None]
"""Called after every step; the run saves and ends where it returns True."""


def checked_metrics(found: object) -> dict[str, float]:
    """The result of an evaluation, as floats; a ValueError if it is no mapping to numbers."""
    try:
        metrics = {name: float(value) for name, value in cast("Any", found).items()}
        if all(isinstance(name, str) and name not in _RESERVED for name in metrics):
            return metrics
        problem = f"names {list(metrics)}"
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"a {type(found).__name__} ({type(error).__name__})"
    raise ValueError(
        "evaluate must return a mapping of names to numbers, as {'accuracy': 0.9}. Names are "
        f"strings other than {', '.join(_RESERVED)}. Found {problem}; of an array give the mean."
    )


class EpsilonAhead:
    """Epsilon of numbers of steps, computed in a thread: each takes a tenth of a second.

    It depends only on the plan, so it can be computed ahead of the steps.

    Args:
        plan: of the run.
        stop: the last number of steps whose epsilon will be asked for.
        every: it will be asked for at multiples of these.
    """

    def __init__(self, plan: PrivacyPlan, stop: int, every: tuple[int, ...]):
        self._plan, self._stop, self._every = plan, stop, every
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="eqx_dp-epsilon")
        self._coming: dict[int, Future[float]] = {}

    def of(self, step: int) -> float:
        """Epsilon of `step` steps, by `epsilon_beyond`."""
        coming = step
        for _ in range(3):  # this one, and the next two
            if coming not in self._coming:
                self._coming[coming] = self._worker.submit(epsilon_beyond, self._plan, coming)
            coming = min([self._stop, *((coming // every + 1) * every for every in self._every)])
        return self._coming[step].result()

    def close(self) -> None:
        """Ends the thread, without waiting for unfinished results."""
        self._worker.shutdown(wait=False, cancel_futures=True)


# Listeners.


class ProgressBar:
    """Shows steps, time left, epsilon so far, and metrics as they come.

    On a terminal it is a bar; elsewhere (a file, a pipe, a notebook) a line whenever there is news.
    """

    def __init__(self, start: int, stop: int, shown: bool):
        self._is_shown, self._stop, self._bar = shown and is_first_host(), stop, None
        if not self._is_shown:
            return
        rich = extra("rich.progress")
        status = rich.TextColumn("{task.fields[status]}", markup=False)
        columns = (*rich.Progress.get_default_columns(), rich.MofNCompleteColumn(), status)
        bar = rich.Progress(*columns)
        if bar.console.is_terminal:
            self._bar: Any = bar
            self._task = bar.add_task("training", total=stop, completed=start, status="compiling")
            bar.start()

    def update(self, event: Event) -> None:
        """Shows an event."""
        known = {} if event.epsilon is None else {"epsilon": event.epsilon}
        text = "  ".join(f"{name} {x:.4g}" for name, x in {**known, **event.metrics}.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=event.step, **({"status": text} if text else {}))
        elif self._is_shown and text:
            print(f"step {event.step}/{self._stop}  {text}", flush=True)

    def close(self) -> None:
        """Leaves a terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


class JsonLines:
    """Writes a line of JSON for every step after which something was measured.

    A line holds `step`, `seconds` (since this start began), `epsilon`, and the metrics by name;
    null stands for a number that is not finite. If a line cannot be written, there is a warning,
    and the run continues. A start appends its lines to those of earlier starts. A line begins by
    ending the one before it, which may be half a line of a killed process.
    """

    def __init__(self, file: RunPath):
        self._file = file

    def __call__(self, event: Event) -> None:
        """Writes a line, if the event has metrics."""
        if not event.metrics or not is_first_host():
            return
        known = {"step": event.step, "seconds": round(event.seconds, 3), "epsilon": event.epsilon}
        line = {name: finite_or_none(x) for name, x in {**known, **event.metrics}.items()}
        with going_on(f"Metrics cannot be written to {self._file}"):
            append(self._file, "\n" * self._file.exists() + json.dumps(line))
