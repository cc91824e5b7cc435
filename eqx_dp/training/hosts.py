"""What the hosts of a run have to agree about, and what is said when one is lost."""

import atexit
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeAlias, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..expected import RunPath
from .files import CheckpointError, is_remote

T = TypeVar("T")
_Process: TypeAlias = subprocess.Popen[bytes]


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

    Where `decide` raises an error, the other hosts raise a `CheckpointError`, and do not wait.
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
        raise CheckpointError(
            "Host 0 refused to go on in the directory of the run; its error says why, and "
            "what to do."
        )
    padded = np.frombuffer(said.ljust(length), np.uint8)
    heard = multihost_utils.broadcast_one_to_all(padded)
    return json.loads(np.asarray(heard, np.uint8).tobytes())


def from_every_host(said: T) -> list[T]:
    """What each host says, on every host; values that JSON can hold."""
    if jax.process_count() == 1:
        return [said]
    text = json.dumps(said).encode()
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(text))))
    padded = np.frombuffer(text.ljust(int(lengths.max())), np.uint8)
    heard = np.asarray(multihost_utils.process_allgather(padded), np.uint8)
    return [json.loads(row.tobytes()) for row in heard]


@contextlib.contextmanager
def watched(directory: RunPath | None) -> Generator[Callable[[int], None]]:
    """A context in which no host waits for one that is lost; for several hosts with a directory.

    JAX's heartbeat ends a process whose peer is lost: at once where a collective reports it or the
    first host is gone, else after `heartbeat_timeout_seconds` of `jax.distributed.initialize`. A
    watchdog (`watchdog.py`) beside each host prints to stderr which host was lost and what to do.
    An error that leaves the context ends this host, with a status other than 0, without the barrier
    at which JAX would wait for the others.

    In an object store watchdogs cannot meet: JAX alone says there that a host was lost.

    The context is a function that is to be told how many steps have been taken.
    """
    if directory is None or jax.process_count() == 1:
        yield lambda step: None
        return
    watchdog = None if is_remote(directory) else _watchdog(directory)
    last_word = "done"
    try:
        yield lambda step: _tell(watchdog, f"step {step}")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code != 0:
            last_word = "peer?" if isinstance(error, jax.errors.JaxRuntimeError) else "failed"
        raise
    finally:
        _tell(watchdog, last_word)
        if last_word == "done":
            _end(watchdog)
        else:
            atexit.register(_leave, watchdog)


def _watchdog(directory: RunPath) -> _Process:
    program, folder = Path(__file__).with_name("watchdog.py"), _new_folder(directory)
    hosts = (str(jax.process_index()), str(jax.process_count()))
    command = [sys.executable, "-I", str(program), str(folder), *hosts]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _tell(watchdog: _Process | None, line: str) -> None:
    if watchdog is not None and watchdog.stdin is not None:
        with contextlib.suppress(OSError):  # it has ended, and said why
            watchdog.stdin.write(line.encode() + b"\n")
            watchdog.stdin.flush()


def _end(watchdog: _Process | None) -> None:
    if watchdog is not None and watchdog.stdin is not None:
        with contextlib.suppress(OSError):
            watchdog.stdin.close()
        watchdog.wait()


def _leave(watchdog: _Process | None) -> None:
    """At exit, before JAX waits for hosts that will not come."""
    _end(watchdog)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _new_folder(directory: RunPath) -> RunPath:
    """A folder that this run alone has: one of a name that its hosts have agreed on."""
    if is_first_host():
        shutil.rmtree(directory / "hosts", ignore_errors=True)
    folder = directory / "hosts" / f"{broadcast(secrets.randbits(31)):08x}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
