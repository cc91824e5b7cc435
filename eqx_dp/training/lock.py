"""One directory, one run at a time."""

import contextlib
import fcntl
import os
import socket
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

from .files import CheckpointError, CheckpointWarning
from .hosts import from_first_host

_LOCK = "lock"


@contextlib.contextmanager
def claimed(directory: Path | None) -> Generator[None, None, None]:
    """A context in which no other run uses a directory; the directory is made if it is not there.

    The lock is `flock`'s on a file named `lock`: it ends with the process that holds it, however
    that ends, so that there is nothing to clean up. The first host of a run holds it for all.

    | case | what happens |
    |---|---|
    | another process, or another thread, holds it | `CheckpointError`, which names the process |
    | a process that it has forked lives on | the directory stays claimed until that ends, too |
    | locks are not shared between machines | runs on two machines are not told apart |
    | the file system knows no locks | a `CheckpointWarning`; the run goes on without |
    | nothing can be written there | `CheckpointError` |

    Args:
        directory: of the run, the same on all hosts; None to do nothing.

    Raises:
        ValueError: the directory is a file.
        CheckpointError: another run uses the directory, or it cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        if directory is not None:
            from_first_host(lambda: _claim(directory, stack))
        yield


def _claim(directory: Path, stack: contextlib.ExitStack) -> None:
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"directory is a file: {directory}. Name a folder.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((directory / _LOCK).open("a+"))
    except OSError as error:
        raise CheckpointError(
            f"Nothing can be written to {directory} ({error.strerror}), where the run is to be "
            "recorded before its first step. Make it writable, or name another directory."
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"Another run is under way in {directory}: {_holder(file)}. Wait until it ends or end "
            "it, and start again; or name another directory, for a run with a seed of its own."
        ) from None
    except OSError as error:
        warnings.warn(
            f"{directory} cannot be locked ({error.strerror}). Make sure that no other process "
            "trains there.",
            CheckpointWarning,
            stacklevel=2,
        )
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read(200) or "a process that has just begun"
