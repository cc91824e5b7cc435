"""What the directory of a run holds.

    run.json                        which run this is: its newest program, and all before it
    released_at_most.00000300       no step beyond the 300th was ever released
    lock                            which process has the directory (`claim.py`)
    privacy.json                    the checkpoint that counts, and what was spent for it
    00000100/  00000200/            checkpoints, each with
        run.json                    which run they belong to, as it was then; written first
        state/                      arrays, as orbax writes them
        privacy.json                what was spent for them
        files.json                  size and SHA-256 of every file above, written last

`run.json`, `released_at_most` and a checkpoint of step 0 are there before the first step is taken.
A checkpoint counts from the moment at which the directory's `privacy.json`, a copy of its own, is
replaced: one atomic act for arrays and statement together, which object stores have as well.

`released_at_most` is an empty file, and what it says is in its name: on a file system to change it
is one atomic operation that needs no room, so that it lasts where a disk is full. (`metrics.jsonl`,
`checks.json`, `tuning.json` and `hosts/` are there as well; no run needs them to be resumed.
Earlier releases had links in place of `privacy.json`: `latest`, which is removed, and one through
it.)
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..expected import RunPath
from .files import (
    CheckpointError,
    CheckpointWarning,
    is_remote,
    read_json,
    remove,
    sync,
    write_json,
)
from .hosts import is_first_host
from .parts import FILES, problem_of

PRIVACY, RUN, STATE = "privacy.json", "run.json", "state"
METRICS, CHECKS, TUNING = "metrics.jsonl", "checks.json", "tuning.json"
_LINK, _BOUND = "latest", "released_at_most"
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

    def __init__(self, path: RunPath):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    # The record.

    def record(self) -> dict[str, Any]:
        """The run's record, as it was written last."""
        return record_in(self.path)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Replaces the record, durably; a `CheckpointError` if it cannot be written."""
        try:
            if not self._bounds():
                (self.path / _bound_file(0)).touch()
            write_json(self.path / RUN, dict(record))
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
            if old and not is_remote(self.path):
                (self.path / _bound_file(max(old))).rename(new)
                old.remove(max(old))
            else:
                new.touch()
            for other in set(old) - {number}:
                (self.path / _bound_file(other)).unlink()
            sync(self.path)
        except OSError as error:
            raise CheckpointError(
                f"It cannot be noted in {self.path} that steps up to {number} are taken "
                f"({error.strerror}), so that none of them is. Make the directory writable, and "
                "start again to go on from the last checkpoint."
            ) from None

    def _bounds(self) -> list[int]:
        names = [name.partition(".") for name in self._names()]
        return [int(n) for name, _, n in names if name == _BOUND and n.isdecimal()]

    def _names(self) -> list[str]:
        """What is in the directory; an object store has no empty ones."""
        try:
            return [path.name for path in self.path.iterdir()]
        except FileNotFoundError:
            return []

    # Checkpoints, by number.

    def checkpoint(self, number: int) -> RunPath:
        """The folder of a checkpoint."""
        return self.path / f"{number:08d}"

    def latest(self) -> int | None:
        """The step of the checkpoint that counts."""
        try:
            number = read_json(self.path / PRIVACY).get("steps_done")
        except (OSError, ValueError):
            return None
        return number if type(number) is int and number >= 0 else None

    def point_to(self, number: int) -> None:
        """Makes a checkpoint the one that counts, for its arrays and its statement at once."""
        statement, own = read_json(self.checkpoint(number) / PRIVACY), self.path / PRIVACY
        is_link = not is_remote(own) and own.is_symlink()
        if is_link or self.latest() != number or read_json(own) != statement:
            write_json(own, statement)
        if not is_remote(own) and (link := self.path / _LINK).is_symlink():
            link.unlink()  # of an earlier release; it counts no more

    def numbers(self) -> list[int]:
        """Checkpoints, newest first; the latest is among them, even if it has gone."""
        latest = self.latest()
        return sorted(self._found() | (set() if latest is None else {latest}), reverse=True)

    def _found(self) -> set[int]:
        """Checkpoints that are there; folders that others have made are not."""
        parts = (RUN, PRIVACY, FILES, STATE)
        return {
            int(name)
            for name in self._names()
            if _NUMBER.fullmatch(name) and any((self.path / name / x).exists() for x in parts)
        }

    def remove_unfinished(self) -> None:
        """Removes, with a warning, what a process left that was killed while it wrote."""
        for leftover in () if is_remote(self.path) else self.path.glob("*.partial"):
            if leftover.is_symlink():  # both are of earlier releases
                leftover.unlink()
            elif leftover.is_dir() and _NUMBER.fullmatch(leftover.stem):
                self._remove_unfinished(leftover)
        latest, numbers = self.latest(), self._found()
        has_begun = numbers != {0} or (self.checkpoint(0) / FILES).exists()
        if latest in numbers or (numbers and not has_begun):
            for number in numbers:
                if latest is None or number > latest:  # killed before it counted
                    self._remove_unfinished(self.checkpoint(number))
        elif max(numbers, default=0) > (latest or 0):
            named = "names none" if latest is None else f"names that of step {latest}"
            _warn(
                f"{self.path / PRIVACY} {named}, and should name the checkpoint that counts: it is "
                "damaged, or gone. The newest checkpoint that is whole is used."
            )

    def _remove_unfinished(self, folder: RunPath) -> None:
        remove(folder)
        latest = self.latest()
        before = "there is none" if latest is None else f"that of step {latest}"
        _warn(
            f"The checkpoint of step {int(folder.stem)} in {self.path} is removed: the process "
            f"ended while it was written. The one before it is used: {before}."
        )

    def newest_whole(
        self, numbers: Sequence[int], problem: Callable[[RunPath], str | None] = problem_of
    ) -> tuple[int, Sequence[int]]:
        """The newest checkpoint that is whole, and those that are newer, of which it warns.

        `problem` says what is wrong with the files of a folder, the same on all hosts.
        """
        for position, number in enumerate(numbers):
            found = problem(self.checkpoint(number))
            if found is None:
                return number, numbers[:position]
            used = f"step {numbers[position + 1]}" if position + 1 < len(numbers) else "none"
            if is_first_host():
                _warn(
                    f"The checkpoint of step {number} in {self.path} is damaged ({found}) and "
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
            remove(aside)
            if self.checkpoint(step).exists():
                self.checkpoint(step).rename(aside)


def record_in(folder: RunPath) -> dict[str, Any]:
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
