"""That one run at a time uses a directory: a lock where there are locks, else a name in a file."""

import contextlib
import fcntl
import os
import secrets
import socket
import warnings
from collections.abc import Generator

from ..expected import RunPath
from .files import CheckpointError, CheckpointWarning, is_remote, read_whole, write_whole
from .hosts import from_first_host

_LOCK = "lock"


class Claim:
    """The claim of a run to its directory: its name in a file, beside whatever lock there is.

    A run names itself in the file, and only then reads how many steps may have been released; a run
    that is under way notes its steps, and only then looks whose name is in the file. So of two runs
    that do not know of one another, and see each other's writes, the later one counts all steps of
    the earlier one, or the earlier one takes none of them: it ends.

    Without a file nobody can contest it; `is_made` says that the name is in the file by now.

    Attributes:
        name: which process this is, for people; no other claim has the same.
    """

    def __init__(self, file: RunPath | None = None, is_made: bool = False):
        self._file, self._is_made = file, is_made
        self.name = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(8)})"
        self._before = b""

    def make(self) -> None:
        """Names this run in the file, if it is not named there."""
        if self._file is None or self._is_made:
            return
        self._before = _read(self._file)
        write_whole(self._file, self.name.encode())
        self._is_made = True

    def give_back(self) -> None:
        """Puts the name there that was there before: nothing was begun."""
        with contextlib.suppress(OSError):  # an error is on its way that says more
            if self._file is not None and self._before and self.other() is None:
                write_whole(self._file, self._before)

    def other(self) -> str | None:
        """The name of a later run; None if there is none."""
        found = b"" if self._file is None else _read(self._file)
        is_other = bool(found) and found != self.name.encode()
        return found[:200].decode(errors="replace") if is_other else None

    def check(self) -> None:
        """Refuses to go on where a later run has named itself; a `CheckpointError`."""
        try:
            other = self.other()
        except OSError as error:
            raise CheckpointError(
                f"It cannot be read in {self._file} which run has the directory ({error}), so that "
                "no step is taken. Start again to go on from the last checkpoint."
            ) from None
        if other is not None:
            raise CheckpointError(
                f"Another run has begun in {self._file and self._file.parent}: {other}. "
                "This one ends, and takes no step that the other does not count. Let one run at a "
                "time use a directory."
            )


def _read(file: RunPath) -> bytes:
    try:
        return read_whole(file)
    except FileNotFoundError:
        return b""


@contextlib.contextmanager
def claimed(directory: RunPath | None) -> Generator[Claim]:
    """A context in which no other run uses a directory; it is made if it is not there.

    On a file system the lock is `flock`'s on a file named `lock`: it ends with the process that
    holds it, however that ends, so that there is nothing to clean up. The first host of a run holds
    it for all.

    | case | what happens |
    |---|---|
    | another process, or another thread, holds it | `CheckpointError`, which names the process |
    | a process that it has forked lives on | the directory stays claimed until that ends, too |
    | locks are not shared by machines | the later run goes on, the earlier one ends: `Claim` |
    | an object store, which has no locks | the same |
    | the file system knows no locks | the same, and a `CheckpointWarning` |
    | nothing can be written there | `CheckpointError` |
    | it is a file | `ValueError` |
    | it is None | nothing is done |
    """
    claim = Claim()
    with contextlib.ExitStack() as stack:
        if directory is not None and is_remote(directory):
            claim = Claim(directory / _LOCK)
        elif directory is not None:
            claim = Claim(directory / _LOCK, is_made=True)
            from_first_host(lambda: _lock(directory, claim.name, stack))
        yield claim


def _lock(directory: RunPath, name: str, stack: contextlib.ExitStack) -> None:
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
        file.seek(0)
        holder = file.read(200) or "a process that has just begun"
        raise CheckpointError(
            f"Another run is under way in {directory}: {holder}. Wait until it ends or end "
            "it, and start again; or name another directory, for a run with a seed of its own."
        ) from None
    except OSError as error:
        warnings.warn(
            f"{directory} cannot be locked ({error.strerror}). See to it that no other process "
            "trains there.",
            CheckpointWarning,
            stacklevel=2,
        )
    file.truncate(0)
    file.write(name)
    file.flush()
