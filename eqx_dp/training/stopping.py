"""SIGTERM and Ctrl-C, heard and kept until the step that is under way is done."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

_TOLD = (
    b"\neqx_dp: interrupted; the step is finished and saved. A second Ctrl-C ends the run at once,"
    b" without saving.\n"
)


class StopSignal:
    """A context in which SIGTERM and Ctrl-C (SIGINT) ask to stop instead of ending the process.

    A second signal of the kind ends the process at once; at an interactive prompt a second Ctrl-C
    raises `KeyboardInterrupt`. Outside of the main thread, where Python hears no signals, it does
    nothing; nor does it hear a Ctrl-C for which the program has a handler of its own.

    Args:
        heard: False for a context that leaves signals alone.

    Attributes:
        asked: the signal that has come; None before.
    """

    def __init__(self, heard: bool = True) -> None:
        self.asked: int | None = None
        self._heard = heard and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if self._heard:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._hear)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.asked = number
        before = self._before[number]
        if number == signal.SIGINT:
            os.write(2, _TOLD)  # `print` could be in the middle of a line of its own
            # Python would wait for a checkpoint that is being written, and this is to be at once.
            before = before if hasattr(sys, "ps1") else signal.SIG_DFL
        signal.signal(number, before)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def leave(self, is_saved: bool, said: str) -> NoReturn:
        """Ends the run as the signal asks.

        Args:
            is_saved: whether the state was.
            said: which checkpoint a resume will use.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: else, with status 0 if the state was saved, or 1.
        """
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt(said)
        raise SystemExit(0 if is_saved else 1)
