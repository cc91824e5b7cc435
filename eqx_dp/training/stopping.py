"""SIGTERM, heard and kept until the step that is under way is done."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """A context in which SIGTERM asks to stop instead of ending the process.

    A second one ends the process as usual. Outside of the main thread, where Python hears no
    signals, it does nothing.

    Args:
        heard: False for a context that leaves SIGTERM alone.

    Attributes:
        asked: whether SIGTERM has come.
    """

    def __init__(self, heard: bool = True) -> None:
        self.asked = False
        self._heard = heard and threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def __enter__(self) -> "StopSignal":
        if self._heard:
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked = True
        self._restore()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
