"""What the hosts of a run agree on: decisions of the first host, and when to stop."""

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

# The exit status of a process that SIGTERM interrupted, as shells and schedulers expect it.
INTERRUPTED = 128 + signal.SIGTERM

_INTERRUPTED_ONCE = b"\neqx_dp: saving. A second Ctrl-C ends the run at once, without it.\n"


def is_first_host() -> bool:
    """Whether this process is the one that writes and prints for all."""
    return jax.process_index() == 0


def from_first_host(decide: Callable[[], T]) -> T:
    """A decision of the first host, on every host; a value that JSON can hold.

    Where `decide` raises an error, the other hosts raise a `RuntimeError`, and do not wait.
    """
    if jax.process_count() == 1:
        return decide()
    decision, error = b"", None
    if is_first_host():
        try:
            decision = json.dumps(decide()).encode()
        except Exception as refusal:
            error = refusal
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(decision))))
    if error is not None:
        raise error
    if not length:
        raise RuntimeError("Host 0 refused to go on; its error says why, and what to do.")
    padded = np.frombuffer(decision.ljust(length), np.uint8)
    received = multihost_utils.broadcast_one_to_all(padded)
    return json.loads(np.asarray(received, np.uint8).tobytes())


def on_every_host(succeeded: bool) -> bool:
    """Whether something succeeded on all hosts."""
    if jax.process_count() == 1:
        return succeeded
    return bool(np.all(multihost_utils.process_allgather(np.bool_(succeeded))))


@contextlib.contextmanager
def failing_alone() -> Generator[None]:
    """A context in which an error ends this process without JAX's barrier for all hosts.

    The other hosts learn by JAX's heartbeat that this one is gone, and end as well.
    """
    try:
        yield
    except BaseException as error:
        is_stopped = isinstance(error, SystemExit) and error.code == INTERRUPTED
        if jax.process_count() > 1 and not is_stopped:
            sys.stdout.flush()
            atexit.register(os._exit, 1)
        raise


class StopSignal:
    """A context in which SIGTERM and Ctrl-C (SIGINT) ask to stop instead of ending the process.

    A second signal of the same kind ends the process at once; at an interactive prompt a second
    Ctrl-C raises `KeyboardInterrupt`. It does nothing outside of the main thread, where Python gets
    no signals, and leaves a Ctrl-C to a handler of the program. On several hosts JAX handles
    SIGTERM, and SIGINT ends a host at once.

    Without a directory (`can_save`) signals are left alone. In a forked child (for example of a
    data source) they do what they did before.

    Attributes:
        asked: the signal that this process has received; None before.
        is_asked: whether all hosts agreed to stop.
    """

    def __init__(self, can_save: bool) -> None:
        self.asked: int | None = None
        self._process = os.getpid()
        self.is_asked = False
        self._is_alone = jax.process_count() == 1
        is_main = threading.current_thread() is threading.main_thread()
        self._hears = can_save and self._is_alone and is_main
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if self._hears:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._hear)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        before = self._before[number]
        if os.getpid() != self._process:  # a forked child, which has nothing to save
            signal.signal(number, before)
            signal.raise_signal(number)
            return
        self.asked = number
        if number == signal.SIGINT:
            os.write(2, _INTERRUPTED_ONCE)  # `print` could be in the middle of one
            # Otherwise Python would wait for a checkpoint that is being written.
            before = before if hasattr(sys, "ps1") else signal.SIG_DFL
        signal.signal(number, before)

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self.asked is not None and error[0] is None:  # the signal came after the last step
            signal.raise_signal(self.asked)

    def asked_after(self, step: int) -> bool:
        """Whether to stop after a step: one answer for all hosts, asked once a step.

        Several hosts learn of SIGTERM by JAX's preemption service, which names a later step at
        which all stop.
        """
        if self._is_alone:
            self.is_asked = self.asked is not None
        else:
            self.is_asked = multihost_utils.reached_preemption_sync_point(step)
        return self.is_asked
