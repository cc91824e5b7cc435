"""SIGTERM and Ctrl-C, heard and kept until the step that is under way is done."""

import os
import signal
import sys
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

_TOLD = (
    b"\neqx_dp: interrupted; the step is finished and saved. A second Ctrl-C ends the run at once,"
    b" without saving.\n"
)


class StopSignal:
    """A context in which SIGTERM and Ctrl-C (SIGINT) ask to stop instead of ending the process.

    A second signal of the kind ends the process at once; at an interactive prompt a second Ctrl-C
    raises `KeyboardInterrupt`. Outside of the main thread, where Python hears no signals, it does
    nothing; nor does it hear a Ctrl-C for which the program has a handler of its own. On several
    hosts JAX hears of SIGTERM (and must not be cut), and SIGINT ends a host at once.

    Without a directory (`can_save`) signals are left alone.

    Attributes:
        asked: the signal that this process has heard; None before.
    """

    def __init__(self, can_save: bool) -> None:
        self.asked: int | None = None
        self._is_alone = jax.process_count() == 1
        is_main = threading.current_thread() is threading.main_thread()
        self._heard = can_save and self._is_alone and is_main
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

    def asked_after(self, steps: Iterable[int]) -> bool:
        """Whether to stop after a call that took these steps: one answer for all hosts.

        Several hosts hear of SIGTERM by JAX's preemption service, which names a step that none of
        them has asked about: the one behind the last. So it has to be asked about every step.
        """
        if self._is_alone:
            return self.asked is not None
        return any(map(multihost_utils.reached_preemption_sync_point, steps))

    def leave(self, is_saved: bool, said: str) -> NoReturn:
        """Ends the run: after Ctrl-C with these words, else with status 0 if it was saved, or 1."""
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt(said)
        raise SystemExit(0 if is_saved else 1)
