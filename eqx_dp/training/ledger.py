"""Which programs a run had, and how many steps they may have released: known before the first.

Two things in a run's directory, beside its checkpoints and older than the first of them:

    run.json                        which run this is: its newest program, and all before it
    released_at_most.00000300       no step beyond the 300th was ever released

The second is an empty file, and what it says is in its name: to change it is one atomic operation
that needs no room, so that it lasts where a disk is full.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import CheckpointError, read_json, sync, write_json
from .record import problem_of_record

_RUN = "run.json"
_BOUND = "released_at_most"


class Ledger:
    """The ledger of a directory. The first host alone writes it.

    **Guarantee.** At any moment, of a process that is killed as well, the steps that the run has
    released are among steps 1 to `bound()`, and each was taken by one of `record()["programs"]`.

    | case | what happens |
    |---|---|
    | `run.json` is damaged, or of another release | `CheckpointError` |
    | the bound's file is gone | the bound is that of the plan: all steps may have been released |
    | there are several of them | the largest counts |
    | a bound cannot be raised | `CheckpointError`, before a step beyond it is taken |

    Attributes:
        directory: the run's, as given.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def record(self) -> dict[str, Any]:
        """The run's record, as it was written last."""
        return record_in(self.directory / _RUN)

    def write(self, record: Mapping[str, Any]) -> None:
        """Replaces the record, durably.

        Raises:
            CheckpointError: it cannot be written.
        """
        beside = self.directory / f"{_RUN}.partial"
        try:
            if not self._bounds():
                (self.directory / _named(0)).touch()
            write_json(beside, dict(record))
            beside.replace(self.directory / _RUN)
            sync(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"The run cannot be recorded in {self.directory} ({error.strerror}). It must be "
                "recorded before its first step. Make room, or name another directory."
            ) from None

    def bound(self, of: Mapping[str, Any]) -> int:
        """How many steps may have been released.

        Args:
            of: the run's record.
        """
        return max(self._bounds(), default=of["plan"]["steps"])

    def check_complete(self, numbers: Sequence[int]) -> None:
        """Refuses a directory of which a part has gone.

        Args:
            numbers: of its checkpoints.

        Raises:
            CheckpointError: there are checkpoints without a record, or steps without checkpoints.
        """
        is_recorded = (self.directory / _RUN).exists()
        released = max(self._bounds(), default=int(is_recorded))
        if numbers and not is_recorded:
            raise CheckpointError(
                f"{self.directory} holds checkpoints (steps {', '.join(map(str, numbers))}) and no "
                f"{_RUN} beside them: an earlier release of eqx_dp made them, or it was removed. "
                "Finish the run with that release, or restore the file from a backup; or start "
                "another run, in another directory and with another seed."
            )
        if released and not numbers:
            raise CheckpointError(
                f"{self.directory} holds no checkpoint, and the run in it may have released steps, "
                f"as {_named(released) if self._bounds() else _RUN} says. Restore one from a "
                "backup; or start another run, in another directory and with another seed."
            )

    def set_bound(self, number: int) -> None:
        """Notes durably how many steps may be released from now on.

        Raises:
            CheckpointError: it cannot be written.
        """
        old, new = self._bounds(), self.directory / _named(number)
        if old == [number]:
            return
        try:
            if old:
                (self.directory / _named(max(old))).rename(new)
            else:
                new.touch()
            for other in set(old) - {max(old, default=number), number}:
                (self.directory / _named(other)).unlink()
            sync(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"It cannot be noted in {self.directory} that steps up to {number} are taken "
                f"({error.strerror}), so the run stops before them. Make the directory writable, "
                "and start again to go on from the last checkpoint."
            ) from None

    def _bounds(self) -> Sequence[int]:
        found = self.directory.glob(f"{_BOUND}.*")
        return [int(file.suffix[1:]) for file in found if file.suffix[1:].isdecimal()]


def record_in(file: Path) -> dict[str, Any]:
    """Reads the record of a run.

    Raises:
        CheckpointError: the file holds none that this release knows.
    """
    try:
        found = read_json(file)
        problem = problem_of_record(found)
    except (OSError, ValueError) as error:
        found, problem = {}, f"it cannot be read: {error}"
    if problem is None:
        return found
    raise CheckpointError(
        f"{file} cannot be used ({problem}). It lists the programs that the run has had, so that "
        "no noise is used twice. Restore it from a backup; or start another run, in another "
        "directory and with another seed."
    )


def _named(number: int) -> str:
    return f"{_BOUND}.{number:08d}"
