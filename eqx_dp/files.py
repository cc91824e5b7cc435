"""Files of a run, on a file system or in an object store, each written completely or not at all.

A path is `pathlib`'s on a file system, and `etils.epath`'s in an object store, which has the same
methods.
"""

import contextlib
import errno
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

from .expected import RunPath

_DEEPEST = 100


def parsed(parse: Callable[[Any], Any], content: str | bytes) -> Any:
    """What a parser of JSON or TOML finds; a ValueError if that is nested too deeply to be used.

    Python raises a RecursionError where something very deep is parsed, printed or copied.
    """
    with contextlib.suppress(RecursionError):
        level: list[Any] = [found := parse(content)]
        for _ in range(_DEEPEST):
            inside = [x for x in level if isinstance(x, dict | list)]
            level = [y for x in inside for y in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return found
    raise ValueError(f"lists and tables are nested more than {_DEEPEST} deep")


def is_remote(path: RunPath) -> bool:
    """Whether a path is in an object store."""
    return not isinstance(cast(object, path), Path)


def read_json(file: RunPath) -> dict[str, Any]:
    """Reads a JSON object; a ValueError if it is none."""
    with _as_os_error(file):
        content = file.read_bytes()
    try:
        found = parsed(json.loads, content)
    except ValueError as error:
        raise ValueError(f"{file.name} holds no JSON that can be used: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return cast("dict[str, Any]", found)


def write_whole(file: RunPath, content: bytes) -> None:
    """Replaces a file atomically; on a file system it survives a power failure."""
    if is_remote(file):
        with _as_os_error(file):
            file.write_bytes(content)
        return
    # Another process may write the same file at the same moment.
    beside = file.with_name(f"{file.name}.{secrets.token_hex(4)}.partial")
    try:
        with beside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(file: RunPath, content: dict[str, Any]) -> None:
    """Replaces a file by JSON, likewise."""
    write_whole(file, json.dumps(content, indent=2).encode())


def append(file: RunPath, line: str) -> None:
    """Appends a line to a file; in an object store it rewrites the file, which cannot grow."""
    if not is_remote(file):
        with file.open("a") as stream:
            stream.write(line)
        return
    before = file.read_bytes() if file.exists() else b""
    write_whole(file, before + line.encode())


def finite_or_none(value: Any) -> Any:
    """A value for JSON, which has no infinity and no NaN: null in place of such a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def going_on(what: str) -> Generator[None]:
    """Warns if something cannot be written, and continues."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{what} ({error.strerror}); the run continues without.", stacklevel=3)


@contextlib.contextmanager
def _as_os_error(file: RunPath) -> Generator[None]:
    """Turns errors of object stores into those of a file system."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError | ImportError) or not is_remote(file):
            raise
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
