"""Files of a run, on a file system or in an object store, each there as a whole or not at all.

A path is `pathlib`'s on a file system, and `etils.epath`'s in an object store, which has the same
methods. A store has no links, no locks and no renaming of folders; what it has is that a file is
replaced in one atomic act. So nothing else is relied on.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from ..expected import RunPath


class CheckpointWarning(UserWarning):
    """A run goes on, and something in its directory was damaged, changed, or not written."""


class CheckpointError(Exception):
    """The directory of a run, or every checkpoint in it, cannot be used."""


def is_remote(path: RunPath) -> bool:
    """Whether a path is in an object store."""
    return not isinstance(cast(object, path), Path)


# Reading.


def files_below(folder: RunPath) -> set[str]:
    """The files in a folder and in those below it, by their paths from there."""
    found: set[str] = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir():
            found |= {f"{path.name}/{name}" for name in files_below(path)}
        else:
            found.add(path.name)
    return found


def size_and_digest(file: RunPath) -> tuple[int, str]:
    """How many bytes a file has, and their SHA-256; it is read from beginning to end."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


def read_whole(file: RunPath) -> bytes:
    """What a file holds; an OSError if it cannot be read, whatever a store's library raises."""
    if not is_remote(file):
        return file.read_bytes()
    with _told_as_os_error():
        return file.read_bytes()


def read_json(file: RunPath) -> dict[str, Any]:
    """Reads a JSON object; a ValueError if it is none."""
    try:
        found = json.loads(read_whole(file))
    except RecursionError:
        raise ValueError(f"{file.name} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return cast("dict[str, Any]", found)


# Writing.


def write_whole(file: RunPath, content: bytes) -> None:
    """Replaces a file in one atomic act; on a file system it lasts through a power failure."""
    if is_remote(file):
        with _told_as_os_error():
            file.write_bytes(content)
        return
    beside = file.with_name(f"{file.name}.partial")
    with beside.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)
    sync(file.parent)


def write_json(file: RunPath, content: dict[str, Any]) -> None:
    """Replaces a file by JSON, likewise."""
    write_whole(file, json.dumps(content, indent=2).encode())


def finite_or_none(value: float | None) -> float | None:
    """A number for JSON, which has none that are not finite."""
    return value if value is not None and math.isfinite(value) else None


def append(file: RunPath, line: str) -> None:
    """Adds a line to a file. In an object store, where files do not grow, it is written anew."""
    if not is_remote(file):
        with file.open("a") as stream:
            stream.write(line)
        return
    before = file.read_bytes() if file.exists() else b""
    write_whole(file, before + line.encode())


def remove(path: RunPath) -> None:
    """Removes a file, or a folder with all that is in it, if there is one."""
    if not is_remote(path):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
    elif path.exists():
        with contextlib.suppress(FileNotFoundError):
            cast(Any, path).rmtree()


def sync(directory: RunPath) -> None:
    """Makes names in a directory of a file system last through a power failure."""
    if is_remote(directory):
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def going_on(told: str, kind: type[Warning] = UserWarning) -> Generator[None]:
    """Warns where something cannot be written; once, since Python shows a warning once."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{told} ({error.strerror}); the run goes on without.", kind, stacklevel=3)


@contextlib.contextmanager
def _told_as_os_error() -> Generator[None, None, None]:
    """What libraries of object stores raise, as a file system would."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
