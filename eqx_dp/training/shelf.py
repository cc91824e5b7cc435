"""Which checkpoints a directory holds, and which of them counts."""

import os
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from .files import CheckpointError, CheckpointWarning, problem_of, sync, turn_link

LATEST = "latest"
PRIVACY, RUN, FILES, STATE = "privacy.json", "run.json", "files.json", "state"
_PARTS = (PRIVACY, RUN, FILES, STATE)
_NUMBER = re.compile(r"\d{8,}")


class Shelf:
    """The checkpoints of a directory, by number. The first host alone changes anything.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, number: int) -> Path:
        """The folder of a checkpoint."""
        return self.directory / f"{number:08d}"

    def latest(self) -> int | None:
        """The step of the checkpoint that counts."""
        link = self.directory / LATEST
        named = os.readlink(link) if link.is_symlink() else ""
        return int(named) if _NUMBER.fullmatch(named) else None

    def remove_unfinished(self) -> None:
        """Removes what a process left that was killed while it wrote."""
        for leftover in self.directory.glob("*.partial"):
            if leftover.is_symlink():
                leftover.unlink()
            elif leftover.is_dir() and _NUMBER.fullmatch(leftover.stem):
                shutil.rmtree(leftover)
                self._warn_unfinished(int(leftover.stem))
        latest, numbers = self.latest(), self._found()
        link = self.directory / LATEST
        if link.is_symlink() and latest not in numbers:
            if latest is None or latest < max(numbers, default=0):
                warnings.warn(
                    f"{link} points to {os.readlink(link)}, which is not there. The newest "
                    "checkpoint that is whole is used.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            return
        for number in numbers:
            if latest is not None and number > latest:  # renamed, and killed before it counted
                shutil.rmtree(self.path(number))
                self._warn_unfinished(number)

    def _warn_unfinished(self, number: int) -> None:
        latest = self.latest()
        before = "there is none" if latest is None else f"that of step {latest}"
        warnings.warn(
            f"The checkpoint of step {number} in {self.directory} is removed: the process ended "
            f"while it was written. The one before it is used: {before}.",
            CheckpointWarning,
            stacklevel=2,
        )

    def _found(self) -> set[int]:
        """Checkpoints that are there; folders that others have made are not."""
        return {
            int(path.name)
            for path in self.directory.iterdir()
            if _NUMBER.fullmatch(path.name) and any((path / part).exists() for part in _PARTS)
        }

    def numbers(self) -> list[int]:
        """Checkpoints, newest first; the latest is among them, even if it has gone."""
        latest = self.latest()
        return sorted(self._found() | (set() if latest is None else {latest}), reverse=True)

    def set_aside(self, damaged: Sequence[int]) -> None:
        """Gives damaged checkpoints another name, under which they are none."""
        for step in damaged:
            aside = self.path(step).with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            if self.path(step).exists():
                self.path(step).rename(aside)

    def newest_whole(self, numbers: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The newest checkpoint that is whole, and those that are newer."""
        for position, number in enumerate(numbers):
            problem = problem_of(self.path(number), FILES)
            if problem is None:
                return number, numbers[:position]
            used = f"step {numbers[position + 1]}" if position + 1 < len(numbers) else "none"
            warnings.warn(
                f"The checkpoint of step {number} in {self.directory} is damaged ({problem}) and "
                f"set aside; the one before it is tried: {used}.",
                CheckpointWarning,
                stacklevel=2,
            )
        raise CheckpointError(
            f"None of the checkpoints in {self.directory} is whole (steps "
            f"{', '.join(map(str, numbers))}). Restore one from a backup; or start anew, in "
            "another directory and with another seed."
        )

    def point_to(self, number: int) -> None:
        """Makes a checkpoint the one that counts, for its arrays and its statement at once."""
        try:
            turn_link(self.directory / PRIVACY, f"{LATEST}/{PRIVACY}")
            turn_link(self.directory / LATEST, self.path(number).name)
        except FileExistsError as error:
            raise CheckpointError(str(error)) from error
        sync(self.directory)
