"""Files that are whole, or are known not to be: digests, links that are turned, names that last."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast


class CheckpointWarning(UserWarning):
    """A run goes on, and something in its directory was damaged, changed, or not written."""


class CheckpointError(Exception):
    """The directory of a run, or every checkpoint in it, cannot be used."""


def problem_of(path: Path, listed: str) -> str | None:
    """What is wrong with the files of a folder whose digests are listed in one of them.

    The list has to name every other file that is there: an empty list vouches for nothing.
    """
    try:
        expected = read_json(path / listed)
        found = _files(path) - {listed}
        if missing := expected.keys() - found:
            return f"{min(missing)} is missing"
        if unknown := found - expected.keys():
            return f"{min(unknown)} is not listed in {listed}"
        if not found:
            return "it is empty"
        for name, known in expected.items():
            if digest(path / name) != known:
                return f"{name} has changed since it was written"
    except (OSError, ValueError) as error:
        return f"{listed} cannot be read: {error}"
    return None


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, by path."""
    return {name: digest(path / name) for name in sorted(_files(path))}


def _files(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object; a ValueError if it is none."""
    try:
        found = json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError(f"{file.name} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return cast("dict[str, Any]", found)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes JSON that lasts through a power failure."""
    with file.open("w") as stream:
        json.dump(content, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())


def turn_link(link: Path, target: str) -> None:
    """Makes a link point to something else, in one atomic operation; refuses a folder."""
    if link.is_symlink() and os.readlink(link) == target:
        return
    if link.is_dir() and not link.is_symlink():
        raise FileExistsError(
            f"{link} is a folder, where a link to the newest checkpoint belongs: the directory was "
            "copied without its links. Remove that folder; the checkpoints beside it stay."
        )
    beside = link.with_name(f"{link.name}.partial")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(link)


def sync(directory: Path) -> None:
    """Makes names in a directory last through a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
