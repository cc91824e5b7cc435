"""How far a run is: a bar on a terminal, lines elsewhere. Nothing in it depends on the data."""

from types import TracebackType
from typing import Any

from ..extras import extra
from .events import Event
from .hosts import is_first_host


class ProgressBar:
    """Shows steps, rate, time left, epsilon so far, and metrics as they come.

    On a terminal a bar; elsewhere (a file, a pipe) a line whenever epsilon or a metric is new.

    Args:
        start: how many steps had been taken before.
        stop: how many the run takes.
        shown: whether anything is.
    """

    def __init__(self, start: int, stop: int, shown: bool):
        self._start, self._stop = start, stop
        self._status = "compiling"
        self._first: tuple[int, float] | None = None
        self._bar: Any = None
        self._console: Any = None
        if shown and is_first_host():
            self._console = extra("rich.console").Console()

    def __enter__(self) -> "ProgressBar":
        if self._console is not None and self._console.is_terminal:
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
            self._bar.start()
            self._task = self._bar.add_task(
                "training", total=self._stop, completed=self._start, status=self._status, rate=""
            )
        return self

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
        step, seconds = self._first = self._first or (event.step, event.seconds)
        if event.step == step:
            return ""
        return f"{(event.step - step) / max(event.seconds - seconds, 1e-9):.3g} steps/s"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _told(event: Event[Any]) -> str:
    figures = {} if event.epsilon is None else {"epsilon": event.epsilon}
    return "  ".join(
        f"{name} {value:.4g}" for name, value in (*figures.items(), *event.metrics.items())
    )
