"""Checkpoints that are whole or not there, and a statement of privacy that is true of them.

A directory holds

    latest -> 00000200              the checkpoint that counts
    privacy.json -> latest/privacy.json
    00000100/  00000200/            checkpoints, each with
        state/                      arrays, as orbax writes them
        privacy.json                what was spent for them
        run.json                    which run they belong to
        files.json                  SHA-256 of every file above, written last

A checkpoint is written beside (`00000200.partial`), renamed, and counts from the moment at which
`latest` is turned to it: one atomic operation for arrays and statement together. Whatever a killed
process leaves behind is either older, or not yet `latest` and removed, with a warning, at the next
start. (`metrics.jsonl` and `hosts/` are there as well; a run does not need them to be resumed.)

No secret is in it. Of the noise's state the key is left out; it follows from the seed, which the
program that resumes a run has to give again, and which is recognised by a fingerprint.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
from jaxtyping import Array

from ..extras import extra
from ..gradients import split_trainable
from .arrays import leaves, named_arrays, same, target, with_arrays
from .files import digests, emptied, problem_of, sync, turn_link, write_json
from .hosts import broadcast, is_first_host
from .record import differences, microbatch_of, privacy_statement, record_of, salt_of
from .state import TrainState
from .step import Step

Model = TypeVar("Model")

_LATEST, _PRIVACY, _RUN, _FILES, _STATE = (
    "latest",
    "privacy.json",
    "run.json",
    "files.json",
    "state",
)
_PARTS = (_PRIVACY, _RUN, _FILES, _STATE)
_NUMBER = re.compile(r"\d{8,}")


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged, or could not be written."""


class CheckpointError(Exception):
    """No checkpoint of a directory can be used."""


class Checkpoints:
    """The checkpoints of one run, in one directory that all its hosts share.

    Args:
        directory: made if it is not there.
        step: the run's step: what the run is.
        keep: how many checkpoints stay, at least 2.

    Attributes:
        step: as given; to be replaced where a microbatch size is settled later.
        microbatch_size: that of the run which was restored, on as many devices; else None.

    Raises:
        ValueError: `keep` is below 2, or the directory is a file.
    """

    def __init__(self, directory: str | os.PathLike[str], step: Step[Any], keep: int = 3):
        if keep < 2:
            raise ValueError(
                f"keep must be at least 2, lest a damaged checkpoint be the end; found {keep}."
            )
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"directory is a file: {self.directory}. Name a folder.")
        self.step = step
        self.microbatch_size: int | None = None
        self._keep = keep
        self._salt = secrets.token_bytes(16)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="eqx_dp-checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._orbax = extra("orbax.checkpoint")
        self._checkpointer = self._new_checkpointer()

    def _new_checkpointer(self) -> Any:
        return self._orbax.AsyncCheckpointer(self._orbax.StandardCheckpointHandler())

    # Reading.

    def restore(self, state: TrainState[Model]) -> TrainState[Model]:
        """The newest state that is whole; `state` itself where nothing has been saved.

        Every file is compared with its digest first. A checkpoint that fails is set aside (as
        `NUMBER.damaged`) with a warning, and the one before it is used.

        Args:
            state: as `step.init` gives it; says where arrays are to live.

        Raises:
            ValueError: the checkpoint belongs to another run; each difference is named.
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        arrays = named_arrays(state)
        if is_first_host():
            try:
                chosen, error = self._choose(arrays), None
            except Exception as refusal:  # else the other hosts would wait for this one
                chosen, error = _REFUSED, refusal
        else:
            chosen, error = _NOTHING, None
        chosen = broadcast(chosen)
        if error is not None:
            raise error
        if chosen == _REFUSED:
            raise CheckpointError("Host 0 refused the checkpoints in the directory; it says why.")
        if chosen == _NOTHING:
            return state
        self.microbatch_size = microbatch_of(json.loads((self._path(chosen) / _RUN).read_text()))
        targets = jax.tree.map(target, arrays)
        found = self._checkpointer.restore(
            self._path(chosen) / _STATE, args=self._orbax.args.StandardRestore(targets)
        )
        restored = with_arrays(state, found)
        self._check_frozen(chosen, state, restored)
        return restored

    def _check_frozen(
        self, number: int, given: TrainState[Model], restored: TrainState[Model]
    ) -> None:
        """Refuses a model whose untrained part is not the one that the run began with."""
        spec = self.step.filter_spec
        parts = [leaves(split_trainable(state.model, spec)[1]) for state in (given, restored)]
        other = [name for name, leaf in parts[0].items() if not same(leaf, parts[1][name])]
        if other:
            raise ValueError(
                f"The checkpoint of step {number} in {self.directory} belongs to another run: "
                f"model{', model'.join(other)}, which is not trained, has other values there than "
                "in the model that was given. Give the model that the run was started with."
            )

    def _choose(self, arrays: dict[str, Array]) -> int:
        """Which checkpoint is to be used, after tidying up; `_NOTHING` if there is none."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        steps = self._saved_steps()
        for position, number in enumerate(steps):
            problem = problem_of(self._path(number), _FILES)
            if problem is None:
                self._check_same_run(number, arrays)
                self._point_to(number)
                self._set_aside(steps[:position])
                return number
            used = f"step {steps[position + 1]}" if position + 1 < len(steps) else "none"
            warnings.warn(
                f"The checkpoint of step {number} in {self.directory} is damaged ({problem}) and "
                f"set aside; the one before it is tried: {used}.",
                CheckpointWarning,
                stacklevel=2,
            )
        if steps:
            raise CheckpointError(
                f"None of the checkpoints in {self.directory} is whole (steps "
                f"{', '.join(map(str, steps))}). Restore one from a backup; or start anew, in "
                "another directory and with another seed."
            )
        return _NOTHING

    def _remove_unfinished(self) -> None:
        """Removes what a process left that was killed while it wrote."""
        for leftover in self.directory.glob("*.partial"):
            if leftover.is_symlink():
                leftover.unlink()
            elif leftover.is_dir() and _NUMBER.fullmatch(leftover.stem):
                shutil.rmtree(leftover)
                self._warn_unfinished(int(leftover.stem))
        latest = self.latest()
        for number in self._numbers():
            if latest is not None and number > latest:  # renamed, and killed before it counted
                shutil.rmtree(self._path(number))
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

    def _numbers(self) -> set[int]:
        """Checkpoints that are there; folders that others have made are not."""
        return {
            int(path.name)
            for path in self.directory.iterdir()
            if _NUMBER.fullmatch(path.name) and any((path / part).exists() for part in _PARTS)
        }

    def _saved_steps(self) -> list[int]:
        """Checkpoints, newest first; the latest is among them, even if it has gone."""
        latest = self.latest()
        return sorted(self._numbers() | (set() if latest is None else {latest}), reverse=True)

    def _check_same_run(self, number: int, arrays: dict[str, Array]) -> None:
        saved = json.loads((self._path(number) / _RUN).read_text())
        self._salt = salt_of(saved)
        found = differences(saved, record_of(self.step, arrays, self._salt))
        if found:
            lines = "".join(f"\n  {line}" for line in found)
            raise ValueError(
                f"The checkpoint of step {number} in {self.directory} belongs to another run:"
                f"{lines}\nResume with what the run was started with; or start another run, in "
                "another directory and WITH ANOTHER SEED: with the same one both runs get the same "
                "noise, and what they differ by shows without any."
            )

    def _set_aside(self, damaged: list[int]) -> None:
        for step in damaged:
            aside = self._path(step).with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            if self._path(step).exists():
                self._path(step).rename(aside)

    # Writing.

    def save(self, state: TrainState[Any], number: int) -> bool:
        """Starts to save a state; returns when the state may be used up by the next step.

        Waits for the save before, and warns if that failed: the run goes on, and its last good
        checkpoint stays.

        Returns:
            Whether it could be started.
        """
        self.wait()
        partial = self._path(number).with_suffix(".partial")
        error = emptied(partial) if is_first_host() else None
        if broadcast(int(error is not None)):  # else the other hosts would wait for the first
            self._warn_not_saved(number, error or OSError("host 0 cannot write"))
            return False
        try:
            arrays = named_arrays(state)
            self._checkpointer.save(
                partial / _STATE, args=self._orbax.args.StandardSave(arrays), force=True
            )
        except Exception as error:
            self._warn_not_saved(number, error)
            return False
        record = record_of(self.step, arrays, self._salt) if is_first_host() else {}
        self._pending = (number, self._writer.submit(self._commit, partial, number, record))
        return True

    def wait(self) -> bool:
        """Waits for the save that is going on; whether there was none, or it succeeded."""
        if self._pending is None:
            return True
        (number, future), self._pending = self._pending, None
        try:
            future.result()
        except Exception as error:
            self._warn_not_saved(number, error)
            return False
        return True

    def close(self) -> bool:
        """Waits, and ends; whether the last save succeeded."""
        succeeded = self.wait()
        self._writer.shutdown()
        self._checkpointer.close()
        return succeeded

    def latest(self) -> int | None:
        """The step of the checkpoint that counts."""
        link = self.directory / _LATEST
        return int(os.readlink(link)) if link.is_symlink() else None

    def _commit(self, partial: Path, number: int, record: dict[str, Any]) -> None:
        self._checkpointer.wait_until_finished()
        if not is_first_host():
            return
        write_json(partial / _PRIVACY, privacy_statement(self.step, number))
        write_json(partial / _RUN, record)
        write_json(partial / _FILES, digests(partial))
        shutil.rmtree(self._path(number), ignore_errors=True)
        partial.rename(self._path(number))
        sync(self.directory)
        self._point_to(number)
        for old in self._saved_steps()[self._keep :]:
            shutil.rmtree(self._path(old))

    def _warn_not_saved(self, number: int, error: Exception) -> None:
        latest = self.latest()
        kept = "there is none yet" if latest is None else f"it is that of step {latest}, and whole"
        warnings.warn(
            f"The state of step {number} could not be saved in {self.directory}: {error!r}. The "
            f"run goes on. Its last good checkpoint: {kept}.",
            CheckpointWarning,
            stacklevel=2,
        )
        # Orbax keeps errors of writes in the background, and would raise them again at every save.
        with contextlib.suppress(Exception):
            self._checkpointer.close()
        self._checkpointer = self._new_checkpointer()
        if is_first_host():
            shutil.rmtree(self._path(number).with_suffix(".partial"), ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}"

    def _point_to(self, number: int) -> None:
        """Makes a checkpoint the one that counts, for its arrays and its statement at once."""
        try:
            turn_link(self.directory / _PRIVACY, f"{_LATEST}/{_PRIVACY}")
            turn_link(self.directory / _LATEST, self._path(number).name)
        except FileExistsError as error:
            raise CheckpointError(str(error)) from error
        sync(self.directory)


_NOTHING, _REFUSED = -1, -2
