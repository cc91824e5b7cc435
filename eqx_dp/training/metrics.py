"""Metrics of a run, as JSON lines and for TensorBoard."""

import contextlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ..extras import extra
from .events import Event, finite_or_none
from .hosts import is_first_host


class JsonLines:
    """Writes a line of JSON for every step after which something was measured.

    A line holds `step`, `seconds` (since the process began the run), `epsilon`, and the metrics by
    name; null stands for what is not finite. What cannot be written costs a warning, and not the
    run.

    Where a run is resumed, lines of steps that it takes again are dropped first: it writes them
    anew. So is half a line at the end, of a process that was killed. Whatever else is in the file
    stays as it is. (Another run never comes upon it: `set_aside`.)

    Args:
        file: appended to; made, with its folder, if it is not there.
        resumed_at: how many steps had been taken when the run was resumed.
    """

    def __init__(self, file: str | os.PathLike[str], resumed_at: int = 0):
        self._file = Path(file)
        if is_first_host():
            with _told_once(self._file):
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
        with _told_once(self._file), self._file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def _drop_after(self, step: int) -> None:
        if not self._file.exists():
            return
        lines = self._file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and not _is_after(line, step)]
        if kept == lines:
            return
        beside = self._file.with_name(f"{self._file.name}.partial")
        beside.write_bytes(b"".join(kept))
        beside.replace(self._file)


def set_aside(file: Path) -> None:
    """Gives metrics that another run has left a name of their own; their lines stay."""
    if not file.is_file() or not file.stat().st_size:
        return
    names = (file.with_name(f"{file.stem}.before{n}{file.suffix}") for n in itertools.count(1))
    with _told_once(file):
        aside = next(name for name in names if not name.exists())
        file.rename(aside)
        warnings.warn(
            f"{file} is of another run, which left no record; it is now {aside.name}.", stacklevel=2
        )


@contextlib.contextmanager
def _told_once(file: Path) -> Generator[None, None, None]:
    """Warns, where metrics cannot be written; once, since Python shows a warning once."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"Metrics cannot be written to {file} ({error.strerror}); the run goes on without.",
            stacklevel=4,
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
        self._folder = Path(folder)
        if is_first_host():
            self._folder.mkdir(parents=True, exist_ok=True)
            # Not a SummaryWriter: it writes in a thread, and loses what a process writes last.
            writers = extra("tensorboardX.event_file_writer", name="tensorboard")
            self._writer = writers.EventsWriter(str(self._folder / "events"))

    def __call__(self, event: Event[Any]) -> None:
        """Writes an event's figures.

        Args:
            event: of the step that was taken.
        """
        if self._writer is None or not event.metrics:
            return
        epsilon = {} if event.epsilon is None else {"epsilon": event.epsilon}
        events = extra("tensorboardX.proto.event_pb2", name="tensorboard")
        summaries = extra("tensorboardX.summary", name="tensorboard")
        with _told_once(self._folder):
            for name, value in (*event.metrics.items(), *epsilon.items()):
                summary = summaries.scalar(name, value)
                self._writer.write_event(
                    events.Event(step=event.step, wall_time=time.time(), summary=summary)
                )
            self._writer.flush()
