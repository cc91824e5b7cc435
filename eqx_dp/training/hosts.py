"""What the hosts of a run have to agree about, and how one that is lost stops the others."""

import atexit
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from .files import CheckpointError

T = TypeVar("T")

_SILENCE = 20.0


def is_first_host() -> bool:
    """Whether this process is the one that writes and prints for all."""
    return jax.process_index() == 0


def broadcast(number: int) -> int:
    """The first host's number, on every host."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def from_first_host(decide: Callable[[], T]) -> T:
    """What the first host decides, on every host; a value that JSON can hold.

    Raises:
        CheckpointError: on the other hosts, where `decide` raises an error on the first. (They
            would wait for it otherwise.)
        Exception: on the first host, what `decide` raises.
    """
    if jax.process_count() == 1:
        return decide()
    said, error = b"", None
    if is_first_host():
        try:
            said = json.dumps(decide()).encode()
        except Exception as refusal:
            error = refusal
    length = broadcast(len(said))
    if error is not None:
        raise error
    if not length:
        raise CheckpointError("Host 0 refused to go on in the directory of the run; it says why.")
    padded = np.frombuffer(said.ljust(length), np.uint8)
    heard = multihost_utils.broadcast_one_to_all(padded)
    return json.loads(np.asarray(heard, np.uint8).tobytes())


def hears_signals() -> bool:
    """Whether a run hears of SIGTERM and SIGINT by itself.

    On several hosts JAX hears of SIGTERM (and must not be cut), and SIGINT ends a host at once.
    """
    return jax.process_count() == 1


def any_host_asked_to_stop(asked: bool, step: int) -> bool:
    """Whether to stop after this step: one answer for all hosts, at the same step.

    Several hosts hear of SIGTERM by JAX's preemption service, which names a step that none of them
    has passed; one alone hears of it itself.
    """
    if jax.process_count() == 1:
        return asked
    return multihost_utils.reached_preemption_sync_point(step)


class HostWatch:
    """A context in which no host waits for one that is lost; for several hosts with a directory.

    A warden (`warden.py`) beside each host prints to stderr which host was lost and what to do, and
    the process ends, with a status other than 0: at once where a collective or JAX reports the
    loss, else after 20 seconds of silence. An error that leaves the context is the others' signal
    to stop; this host then ends without the barrier at which JAX would wait for them.

    Args:
        directory: of the run, the same on all hosts; None to watch nothing.
    """

    def __init__(self, directory: Path | None):
        self._directory = directory if jax.process_count() > 1 else None
        self._warden: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "HostWatch":
        if self._directory is not None:
            folder = self._meeting_place(self._directory)
            places = map(str, (folder, jax.process_index(), jax.process_count(), _SILENCE))
            program = Path(__file__).with_name("warden.py")
            self._warden = subprocess.Popen(
                [sys.executable, "-I", str(program), *places], stdin=subprocess.PIPE
            )
        return self

    def stepped(self, step: int) -> None:
        """Notes how many steps have been taken."""
        self._say(f"step {step}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code == 0):
            self._say("done")
            self._end()
        elif self._warden is not None:
            self._say("peer?" if isinstance(error, jax.errors.JaxRuntimeError) else "failed")
            atexit.register(self._leave)

    def _meeting_place(self, directory: Path) -> Path:
        """A folder that this run alone has: one of a name that its hosts have agreed on."""
        if is_first_host():
            shutil.rmtree(directory / "hosts", ignore_errors=True)
        folder = directory / "hosts" / f"{broadcast(secrets.randbits(31)):08x}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _say(self, line: str) -> None:
        if self._warden is None or self._warden.stdin is None:
            return
        try:
            self._warden.stdin.write(line.encode() + b"\n")
            self._warden.stdin.flush()
        except OSError:  # the warden has ended, and said why
            pass

    def _end(self) -> None:
        if self._warden is not None and self._warden.stdin is not None:
            self._warden.stdin.close()
            self._warden.wait()

    def _leave(self) -> None:
        """At exit, before JAX waits for hosts that will not come."""
        self._end()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
