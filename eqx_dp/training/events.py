"""What a run tells after every step, and those who listen: progress, JSON lines, TensorBoard.

Nothing in it depends on the data, but for what is disclosed or evaluated.
"""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from ..expected import RunPath, directory, path
from ..extras import extra
from ..shown import shown
from .dispatch import FlatState
from .files import append, finite_or_none, going_on, write_whole
from .hosts import is_first_host
from .state import TrainState

Model = TypeVar("Model")

# What a line of metrics holds beside what was measured.
_RESERVED = ("step", "seconds", "epsilon")
# As many figures of epsilon as are shown in a run: they are there when a step has been compiled.
_AHEAD = 20


@dataclasses.dataclass(frozen=True)
class Event(Generic[Model]):
    """A step was taken.

    Where a call takes several steps (`steps_per_call`), their events come one after the other when
    it was made, and the state is there after the last of them alone.

    Attributes:
        step: how many steps have been taken. If the run went on as another program, steps that may
            have been released and are lost count as well.
        metrics: figures by name, from an evaluation or disclosed. Empty after most steps.
        seconds: the time since this process began the run.
        epsilon: epsilon of the steps so far; None if it was not computed after this step.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float
    epsilon: float | None
    _flat: FlatState[Model] | None = dataclasses.field(repr=False)

    @property
    def has_state(self) -> bool:
        """Whether there is a state: not after a step in the middle of a call."""
        return self._flat is not None

    @functools.cached_property
    def state(self) -> TrainState[Model]:
        """The state after the step. To read an array waits until the step is done.

        The next step uses it up: read it, or copy it, at once.

        Raises:
            ValueError: there is none.
        """
        if self._flat is None:
            raise ValueError(
                f"The state after step {self.step} is not kept: it is in the middle of a call "
                "(steps_per_call). Read the state where event.has_state is True, which is after "
                "every save and every evaluation as well; or take one step a call."
            )
        return self._flat.state


Callback = Callable[[Event[Any]], bool | None]
"""Called for every step; a run ends with the call, and saves, where it returns True."""


def checked_metrics(found: object) -> dict[str, float]:
    """What an evaluation returned, as floats; a ValueError if that is no mapping to numbers."""
    if not isinstance(found, Mapping):
        raise ValueError(
            f"evaluate must return a mapping of names to numbers, as {{'accuracy': 0.9}}; found a "
            f"{type(found).__name__}."
        )
    metrics: dict[str, float] = {}
    for name, value in found.items():
        if name in _RESERVED or not isinstance(name, str):
            told = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
            raise ValueError(
                f"evaluate must return names that are strings other than {', '.join(_RESERVED)}; "
                f"found {told}."
            )
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError):
            told = shown(value) if hasattr(value, "dtype") else f"a {type(value).__name__}"
            raise ValueError(
                f"evaluate must return numbers; found {told} for {name!r}. Of an array give the "
                "mean, or one name for each of its numbers."
            ) from None
    return metrics


class EpsilonAhead:
    """Epsilon after the steps where it is told, worked out in a thread beside the steps.

    It depends on the plan alone, and the steps are known from the start: the first figures are
    worked out while the first step is compiled, and later ones long before their step.
    """

    def __init__(self, epsilon: Callable[[int], float], steps: Iterator[int]):
        self._epsilon, self._steps = epsilon, steps
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="eqx_dp-epsilon")
        self._coming: collections.deque[tuple[int, Future[float]]] = collections.deque()
        for _ in range(_AHEAD):
            self._add_next()

    def after(self, step: int) -> float | None:
        """Epsilon after a step; None where it is not told. To be asked after every step."""
        if not self._coming or self._coming[0][0] != step:
            return None
        _, figure = self._coming.popleft()
        self._add_next()
        return figure.result()

    def _add_next(self) -> None:
        for step in itertools.islice(self._steps, 1):
            self._coming.append((step, self._worker.submit(self._epsilon, step)))

    def close(self) -> None:
        """Ends the thread; nobody waits for the figures that are still to come."""
        self._worker.shutdown(wait=False, cancel_futures=True)


# Those who listen.


class ProgressBar:
    """Shows steps, rate, time left, epsilon so far, and metrics as they come.

    On a terminal a bar, and in a notebook that has ipywidgets; elsewhere (a file, a pipe, another
    notebook) a line whenever epsilon or a metric is new.
    """

    def __init__(self, start: int, stop: int, shown: bool):
        self._stop = stop
        self._status = "compiling"
        self._first: tuple[int, float] | None = None
        self._console: Any = None
        self._bar: Any = None
        if not shown or not is_first_host():
            return
        self._console = extra("rich.console").Console()
        has_widgets = importlib.util.find_spec("ipywidgets") is not None
        if self._console.is_terminal or (self._console.is_jupyter and has_widgets):
            rich = extra("rich.progress")
            self._bar = rich.Progress(
                rich.TextColumn("training"),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TextColumn("{task.fields[rate]}"),
                rich.TimeRemainingColumn(),
                rich.TextColumn("{task.fields[status]}", markup=False),
                console=self._console,
            )
            self._task = self._bar.add_task(
                "training", total=stop, completed=start, status=self._status, rate=""
            )
            self._bar.start()

    def update(self, event: Event[Any]) -> None:
        """Shows what an event says."""
        if self._console is None:
            return
        is_news = event.epsilon is not None or bool(event.metrics)
        if is_news:
            self._status = _told(event)
        rate = self._rate(event)
        if self._bar is not None:
            self._bar.update(self._task, completed=event.step, rate=rate, status=self._status)
        elif is_news:
            told = "  ".join(filter(None, (rate, self._status)))
            line = f"step {event.step}/{self._stop}  {told}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _rate(self, event: Event[Any]) -> str:
        """Steps a second since the first of them, in which the step was compiled."""
        step, seconds = self._first or (event.step, event.seconds)
        if event.seconds == seconds:  # steps of the first call, which end together
            self._first = (event.step, seconds)
            return ""
        return f"{(event.step - step) / max(event.seconds - seconds, 1e-9):.3g} steps/s"

    def close(self) -> None:
        """Leaves a terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def _told(event: Event[Any]) -> str:
    figures = {} if event.epsilon is None else {"epsilon": event.epsilon}
    return "  ".join(
        f"{name} {value:.4g}" for name, value in (*figures.items(), *event.metrics.items())
    )


class JsonLines:
    """Writes a line of JSON for every step after which something was measured.

    A line holds `step`, `seconds` (since the process began the run), `epsilon`, and the metrics by
    name; null stands for what is not finite. What cannot be written costs a warning, and not the
    run.

    Where a run is resumed, lines of steps that it takes again are dropped first: it writes them
    anew. So is half a line at the end, of a process that was killed. Whatever else is in the file
    stays as it is. (Another run never comes upon it: `set_aside`.)
    """

    def __init__(self, file: str | os.PathLike[str], resumed_at: int = 0):
        self._file = directory("file", file)
        if is_first_host():
            with going_on(f"Metrics cannot be written to {self._file}"):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._drop_after(resumed_at)

    def __call__(self, event: Event[Any]) -> None:
        """Writes a line, if there is something to write."""
        if not event.metrics or not is_first_host():
            return
        line = {
            "step": event.step,
            "seconds": round(event.seconds, 3),
            "epsilon": finite_or_none(event.epsilon),
        } | {name: finite_or_none(value) for name, value in event.metrics.items()}
        with going_on(f"Metrics cannot be written to {self._file}"):
            append(self._file, json.dumps(line) + "\n")

    def _drop_after(self, step: int) -> None:
        if not self._file.exists():
            return
        lines = self._file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and not _is_after(line, step)]
        if kept == lines:
            return
        write_whole(self._file, b"".join(kept))


def set_aside(file: RunPath) -> None:
    """Gives metrics that another run has left a name of their own; their lines stay."""
    if not file.exists() or file.is_dir() or not file.read_bytes():
        return
    names = (file.with_name(f"{file.stem}.before{n}{file.suffix}") for n in itertools.count(1))
    with going_on(f"Metrics cannot be written to {file}"):
        aside = next(name for name in names if not name.exists())
        file.rename(aside)
        warnings.warn(
            f"{file} is of another run, which left no record; it is now {aside.name}.", stacklevel=2
        )


def _is_after(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] > step
    except (ValueError, KeyError, TypeError):  # not a line of ours
        return False


class TensorBoard:
    """A callback that writes metrics and epsilon for TensorBoard, by tensorboardX.

    Args:
        folder: the folder that TensorBoard reads; it is made if it does not exist.

    Raises:
        MissingExtra: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._writer: Any = None
        self._folder = path("folder", folder)
        if is_first_host():
            self._folder.mkdir(parents=True, exist_ok=True)
            # Not a SummaryWriter: it writes in a thread, and loses what a process writes last.
            writers = extra("tensorboardX.event_file_writer", name="tensorboard")
            self._writer = writers.EventsWriter(str(self._folder / "events"))

    def __call__(self, event: Event[Any]) -> None:
        """Writes an event's figures.

        Args:
            event: its metrics and its epsilon are written.
        """
        if self._writer is None or not event.metrics:
            return
        epsilon = {} if event.epsilon is None else {"epsilon": event.epsilon}
        events = extra("tensorboardX.proto.event_pb2", name="tensorboard")
        summaries = extra("tensorboardX.summary", name="tensorboard")
        with going_on(f"Metrics cannot be written to {self._folder}"):
            for name, value in (*event.metrics.items(), *epsilon.items()):
                summary = summaries.scalar(name, value)
                self._writer.write_event(
                    events.Event(step=event.step, wall_time=time.time(), summary=summary)
                )
            self._writer.flush()
