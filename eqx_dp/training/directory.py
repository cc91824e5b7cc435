"""What the directory of a run holds, and that one run at a time uses it.

    run.json                        which run this is: its newest program, and all before it
    released_at_most.00000300       no step beyond the 300th was ever released
    lock                            held by the process that runs
    latest -> 00000200              the checkpoint that counts
    privacy.json -> latest/privacy.json
    00000100/  00000200/            checkpoints, each with
        state/                      arrays, as orbax writes them
        privacy.json                what was spent for them
        run.json                    which run they belong to, as it was then
        files.json                  SHA-256 of every file above, written last

`run.json`, `released_at_most` and a checkpoint of step 0 are there before the first step is taken.
`released_at_most` is an empty file, and what it says is in its name: to change it is one atomic
operation that needs no room, so that it lasts where a disk is full. (`metrics.jsonl`,
`checks.json`, `tuning.json` and `hosts/` are there as well; no run needs them to be resumed.)
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .files import (
    CheckpointError,
    CheckpointWarning,
    problem_of,
    read_json,
    sync,
    turn_link,
    write_json,
)
from .hosts import from_first_host

PRIVACY, RUN, FILES, STATE = "privacy.json", "run.json", "files.json", "state"
METRICS, CHECKS, TUNING = "metrics.jsonl", "checks.json", "tuning.json"
_LATEST, _BOUND, _LOCK = "latest", "released_at_most", "lock"
_NUMBER = re.compile(r"\d{8,}")

# What a record says of itself, and what it has to hold.
FORMAT, VERSION = "eqx_dp.run", 2
_OF_MAKER = ("platform", "devices", "hosts", "microbatch_size")
_OF_PROGRAM = {"starts_after", "begins_from", "digest", "disclose", "is_unsafe"}
_PARTS = {
    "plan": dict,
    "seed": dict,
    "identity": dict,
    "arrays": dict,
    "programs": list,
    "made_by": dict,
}


class RunDirectory:
    """The record and the checkpoints of a run. The first host alone changes anything.

    **Guarantee.** At any moment, of a process that is killed as well, the steps that the run has
    released are among steps 1 to `bound()`, and each was taken by one of `record()["programs"]`.

    | case | what happens |
    |---|---|
    | `run.json` is damaged, or of another release | `CheckpointError` |
    | the bound's file is gone | the bound is that of the plan: all steps may have been released |
    | there are several of them | the largest counts |
    | a bound cannot be raised | `CheckpointError`, before a step beyond it is taken |
    """

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    # The record.

    def record(self) -> dict[str, Any]:
        """The run's record, as it was written last."""
        return record_in(self.path)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Replaces the record, durably; a `CheckpointError` if it cannot be written."""
        beside = self.path / f"{RUN}.partial"
        try:
            if not self._bounds():
                (self.path / _bound_file(0)).touch()
            write_json(beside, dict(record))
            beside.replace(self.path / RUN)
            sync(self.path)
        except OSError as error:
            raise CheckpointError(
                f"The run cannot be recorded in {self.path} ({error.strerror}), which has to "
                "be before its first step. Make room, or name another directory."
            ) from None

    def check_complete(self, numbers: Sequence[int]) -> None:
        """Refuses checkpoints (of these numbers) without a record, and steps without them."""
        is_recorded = (self.path / RUN).exists()
        released = max(self._bounds(), default=int(is_recorded))
        if numbers and not is_recorded:
            raise CheckpointError(
                f"{self.path} holds checkpoints (steps {', '.join(map(str, numbers))}) and no "
                f"{RUN} beside them: an earlier release of eqx_dp made them, or it was removed. "
                "Finish the run with that release, or restore the file from a backup; or start "
                "another run, in another directory and with another seed."
            )
        if released and not numbers:
            raise CheckpointError(
                f"{self.path} holds no checkpoint, and the run in it may have released steps, "
                f"as {_bound_file(released) if self._bounds() else RUN} says. Restore one from a "
                "backup; or start another run, in another directory and with another seed."
            )

    # Up to which step any may have been released.

    def bound(self, of: Mapping[str, Any]) -> int:
        """How many steps of a run, by its record, may have been released."""
        return max(self._bounds(), default=of["plan"]["steps"])

    def set_bound(self, number: int) -> None:
        """Notes durably how many steps may be released; a `CheckpointError` if it cannot."""
        old, new = self._bounds(), self.path / _bound_file(number)
        if old == [number]:
            return
        try:
            if old:
                (self.path / _bound_file(max(old))).rename(new)
            else:
                new.touch()
            for other in set(old) - {max(old, default=number), number}:
                (self.path / _bound_file(other)).unlink()
            sync(self.path)
        except OSError as error:
            raise CheckpointError(
                f"It cannot be noted in {self.path} that steps up to {number} are taken "
                f"({error.strerror}), so that none of them is. Make the directory writable, and "
                "start again to go on from the last checkpoint."
            ) from None

    def _bounds(self) -> Sequence[int]:
        found = self.path.glob(f"{_BOUND}.*")
        return [int(file.suffix[1:]) for file in found if file.suffix[1:].isdecimal()]

    # Checkpoints, by number.

    def checkpoint(self, number: int) -> Path:
        """The folder of a checkpoint."""
        return self.path / f"{number:08d}"

    def latest(self) -> int | None:
        """The step of the checkpoint that counts."""
        link = self.path / _LATEST
        named = os.readlink(link) if link.is_symlink() else ""
        return int(named) if _NUMBER.fullmatch(named) else None

    def point_to(self, number: int) -> None:
        """Makes a checkpoint the one that counts, for its arrays and its statement at once."""
        try:
            turn_link(self.path / PRIVACY, f"{_LATEST}/{PRIVACY}")
            turn_link(self.path / _LATEST, self.checkpoint(number).name)
        except FileExistsError as error:
            raise CheckpointError(str(error)) from error
        sync(self.path)

    def numbers(self) -> list[int]:
        """Checkpoints, newest first; the latest is among them, even if it has gone."""
        latest = self.latest()
        return sorted(self._found() | (set() if latest is None else {latest}), reverse=True)

    def _found(self) -> set[int]:
        """Checkpoints that are there; folders that others have made are not."""
        parts = (PRIVACY, RUN, FILES, STATE)
        return {
            int(path.name)
            for path in self.path.iterdir()
            if _NUMBER.fullmatch(path.name) and any((path / part).exists() for part in parts)
        }

    def remove_unfinished(self) -> None:
        """Removes, with a warning, what a process left that was killed while it wrote."""
        for leftover in self.path.glob("*.partial"):
            if leftover.is_symlink():
                leftover.unlink()
            elif leftover.is_dir() and _NUMBER.fullmatch(leftover.stem):
                self._remove_unfinished(leftover)
        latest, numbers = self.latest(), self._found()
        link = self.path / _LATEST
        if latest in numbers:
            for number in numbers:
                if number > (latest or 0):  # renamed, and killed before it counted
                    self._remove_unfinished(self.checkpoint(number))
        elif link.is_symlink() and (latest is None or latest < max(numbers, default=0)):
            _warn(
                f"{link} points to {os.readlink(link)}, which is not there. The newest checkpoint "
                "that is whole is used."
            )

    def _remove_unfinished(self, folder: Path) -> None:
        shutil.rmtree(folder)
        latest = self.latest()
        before = "there is none" if latest is None else f"that of step {latest}"
        _warn(
            f"The checkpoint of step {int(folder.stem)} in {self.path} is removed: the process "
            f"ended while it was written. The one before it is used: {before}."
        )

    def newest_whole(self, numbers: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The newest checkpoint that is whole, and those that are newer, of which it warns."""
        for position, number in enumerate(numbers):
            problem = problem_of(self.checkpoint(number), FILES)
            if problem is None:
                return number, numbers[:position]
            used = f"step {numbers[position + 1]}" if position + 1 < len(numbers) else "none"
            _warn(
                f"The checkpoint of step {number} in {self.path} is damaged ({problem}) and "
                f"set aside; the one before it is tried: {used}."
            )
        raise CheckpointError(
            f"None of the checkpoints in {self.path} is whole (steps "
            f"{', '.join(map(str, numbers))}). Restore one from a backup; or start anew, in "
            "another directory and with another seed."
        )

    def set_aside(self, damaged: Sequence[int]) -> None:
        """Gives damaged checkpoints another name, under which they are none."""
        for step in damaged:
            aside = self.checkpoint(step).with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            if self.checkpoint(step).exists():
                self.checkpoint(step).rename(aside)


def record_in(folder: Path) -> dict[str, Any]:
    """Reads the record of a run; a `CheckpointError` if it is none that this release knows."""
    try:
        found = read_json(folder / RUN)
        problem = _problem_of_record(found)
    except (OSError, ValueError) as error:
        found, problem = {}, f"it cannot be read: {error}"
    if problem is None:
        return found
    raise CheckpointError(
        f"{folder / RUN} cannot be used ({problem}). It says which programs the run has had, so "
        "that none of their noise is used again. Restore it from a backup; or start another run, "
        "in another directory and with another seed."
    )


def _problem_of_record(record: Mapping[str, Any]) -> str | None:
    """Why something read from a file is no record that this release knows; None if it is one."""
    if record.get("format") != FORMAT:
        return f"its format is not {FORMAT}"
    if record.get("version") != VERSION:
        return (
            f"it is of version {record.get('version')}, and this release of eqx_dp reads version "
            f"{VERSION}"
        )
    for name, kind in _PARTS.items():
        if not isinstance(record.get(name), kind):
            return f"its {name!r} is missing, or no {kind.__name__}"
    try:
        bytes.fromhex(record["seed"]["salt"] + record["seed"]["scrypt"])
        _ = [record["made_by"][name] for name in _OF_MAKER]
        missing = [_OF_PROGRAM - program.keys() for program in record["programs"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"it is damaged: {type(error).__name__} ({error})"
    if not record["programs"] or any(missing):
        return "its 'programs' are not all there"
    return None


def _bound_file(number: int) -> str:
    return f"{_BOUND}.{number:08d}"


def _warn(said: str) -> None:
    warnings.warn(said, CheckpointWarning, stacklevel=3)


@contextlib.contextmanager
def claimed(directory: Path | None) -> Generator[None, None, None]:
    """A context in which no other run uses a directory; it is made if it is not there.

    The lock is `flock`'s on a file named `lock`: it ends with the process that holds it, however
    that ends, so that there is nothing to clean up. The first host of a run holds it for all.

    | case | what happens |
    |---|---|
    | another process, or another thread, holds it | `CheckpointError`, which names the process |
    | a process that it has forked lives on | the directory stays claimed until that ends, too |
    | locks are not shared between machines | runs on two machines are not told apart |
    | the file system knows no locks | a `CheckpointWarning`; the run goes on without |
    | nothing can be written there | `CheckpointError` |

    | it is a file | `ValueError` |
    | it is None | nothing is done |
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
        _warn(
            f"{directory} cannot be locked ({error.strerror}). See to it that no other process "
            "trains there."
        )
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read(200) or "a process that has just begun"
