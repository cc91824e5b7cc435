"""Checkpoints that are whole or not there, and a statement of privacy that is true of them.

A checkpoint counts from the moment at which `privacy.json` in the run's directory is replaced by
its own: one atomic act for arrays and statement together. Whatever a killed process leaves behind
is either older, or does not count yet and is removed, with a warning, at the next start. Nothing is
renamed for that and nothing is linked, so that an object store will do.

Orbax writes the arrays, in the background and from all hosts, and each host lists what it wrote
(`parts.py`). Orbax's `CheckpointManager` is not used: it takes every folder with a number for a
step of its own and rotates it away, it has nothing that tells whether a file was altered, and a
checkpoint counts before digests and statement could be beside it.

**Another program** (loss, optimizer, method, ...) goes on from a checkpoint only where that is
asked for. It counts its steps from the last that the program before may have released, so that the
number of a step is the number of releases, and what a killed process may have shown is paid for.
Its noise and sample follow from all programs so far: they are those of no program before, and not
those of a program that comes back.

No secret is in it. Of the noise's state the key is left out; it follows from the seed, which the
program that resumes a run has to give again, and which is recognised by a fingerprint.
"""

import contextlib
import json
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import equinox as eqx
import jax

from ..expected import RunPath
from ..extras import extra
from ..paths import dotted_name
from .claim import Claim
from .directory import PRIVACY, RUN, STATE, RunDirectory, record_in
from .files import CheckpointError, CheckpointWarning, remove, sync, write_json
from .first_model import FirstModel
from .hosts import broadcast, from_every_host, from_first_host, is_first_host
from .parts import problem_of, write_list, write_part
from .record import (
    Start,
    begun,
    changeable,
    privacy_statement,
    record_of,
    resumed,
)
from .saved_arrays import arrays_in, writer
from .state import TrainState, named_arrays, with_arrays
from .step import Step

Model = TypeVar("Model")


class Checkpoints:
    """The checkpoints of one run, in one directory that all its hosts share.

    Args:
        directory: absolute, or in an object store; made if it is not there.
        step: the run's step: what the run is.
        keep: how many checkpoints stay, at least 2, lest a damaged one be the end.
        identity: the run's programs, by part; from `step.identity`.
        allow_changed: parts of the run that may be others than those of the checkpoint; a
            ValueError if one is no part, or may not change.
        claim: that of this run to the directory, which is looked at before steps are taken.

    Attributes:
        step: as given until `restore`, which makes it that of the run: what draws samples and takes
            steps. To be replaced where a microbatch size is settled later.
        microbatch_size: that of the run which was restored, on as many devices; else None.
    """

    def __init__(
        self,
        directory: RunPath,
        step: Step[Any],
        keep: int = 3,
        *,
        identity: Mapping[str, str] | None = None,
        allow_changed: Iterable[str] = (),
        claim: Claim | None = None,
    ):
        self._directory = RunDirectory(directory)
        self._claim = Claim() if claim is None else claim
        self.step = step
        self.microbatch_size: int | None = None
        self._keep = keep
        self._identity = dict(identity or {})
        self._allowed = _checked_parts(allow_changed, changeable(self._identity))
        self._salt = secrets.token_bytes(16)
        self._released = 0
        self._programs: list[dict[str, Any]] = []
        self._settle: Callable[[], None] = lambda: None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="eqx_dp-checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._unsaved: list[int] = []
        self._orbax = extra("orbax.checkpoint")
        self._checkpointer: Any = None

    # Reading.

    def restore(self, first: FirstModel[Model]) -> TrainState[Model]:
        """The newest state that is whole; where there is none, the first, which is then recorded.

        Every file is compared with its digest first, a share of them by each host. A checkpoint
        that fails is set aside (as `NUMBER.damaged`) with a warning, and the one before it is used.
        Arrays are read to where they are to live, and no other state is made for that (but where
        the optimizer is another, or its `init` cannot be traced).

        Raises:
            ValueError: the checkpoint belongs to another run, each difference is named; or the plan
                has no steps left for another program.
            CheckpointError: there are checkpoints, and none of them is whole; the directory's
                record is damaged; nothing can be written.
        """
        try:
            return self._restored(first)
        except BaseException:
            if is_first_host():  # nothing was begun: another run may be under way
                self._claim.give_back()
            raise

    def _restored(self, first: FirstModel[Model]) -> TrainState[Model]:
        form = self.step.form(first)
        state = self.step.first_state(first) if form is None else form
        arrays = named_arrays(state)
        start = self._start(arrays)
        self._programs, self.microbatch_size = start.programs, start.microbatch_size
        if len(self._programs) > 1:
            # Sample and noise follow from what the step computes, as ever, and from all changes as
            # well, so that a program that comes back does not repeat its noise.
            self.step = self.step.for_run(json.dumps(self._programs, sort_keys=True))
        is_new = start.number is None or not arrays.keys() <= set(start.restored)
        if form is not None and is_new:
            state = self.step.first_state(first)
        else:
            state = self.step.with_noise(state)
        if start.number is None:
            if all(from_every_host(self.save(state, 0) and self.wait())):
                return state
            raise CheckpointError(
                f"The run cannot be recorded in {self._directory}, as a warning says, which has to "
                "be before its first step. Make room, or name another directory."
            )
        if first.make is None and first.given is None:  # taken: the first state has its arrays
            first = FirstModel(state.model)
        first.keep_frozen(self.step.filter_spec)
        targets = {
            name: array for name, array in named_arrays(state).items() if name in start.restored
        }
        saved = arrays_in(self._directory.checkpoint(start.number), targets)
        restored = with_arrays(state, saved)
        self._check_frozen(start.number, first, restored)
        from_first_host(self._settle)
        lost = start.after - start.number
        return eqx.tree_at(lambda s: s.step, restored, restored.step + lost) if lost else restored

    def _check_frozen(
        self, number: int, first: FirstModel[Model], restored: TrainState[Model]
    ) -> None:
        """Refuses a model whose untrained part is not the one that the run began with."""
        other = self.step.other_frozen(first, restored.model)
        if other:
            places = ", ".join(f"model.{dotted_name(name)}" for name in other)
            raise ValueError(
                f"The checkpoint of step {number} in {self._directory} belongs to another run: "
                f"{places}, which is not trained, has other values there than in the "
                "model that was given. Give the model that the run was started with."
            )

    def _start(self, arrays: dict[str, Any]) -> Start:
        """From where to go on, after tidying up."""
        numbers = from_first_host(self._numbers)
        found = self._directory.newest_whole(numbers, _problem_on_any_host) if numbers else None
        return Start(*from_first_host(lambda: self._start_from(found, arrays)))

    def _numbers(self) -> list[int]:
        """The checkpoints that there are; what the first host finds out for all."""
        self._claim.make()
        self._directory.remove_unfinished()
        numbers = self._directory.numbers()
        self._directory.check_complete(numbers)
        return numbers

    def _start_from(self, found: tuple[int, Sequence[int]] | None, arrays: dict[str, Any]) -> Start:
        """Likewise, from a checkpoint that is whole, and those that are not."""

        def describe(salt: bytes) -> dict[str, Any]:
            self._salt = salt
            return record_of(self.step, arrays, self._identity, salt)

        if found is None and not self.step.is_seed_known:
            raise ValueError(
                f"There is no run in {self._directory}, and seed=None begins none: to go on after "
                "it is killed, a run needs its seed again. Give make_step(..., "
                "seed=dp.kept_secret(name)), which makes a secret once and finds it again."
            )
        if found is None:
            return begun(self._directory, describe(secrets.token_bytes(16)))
        number, damaged = found
        saved = record_in(self._directory.checkpoint(number))
        start, self._settle = resumed(
            self._directory, describe, number, saved, self._allowed, self.step.is_seed_known
        )
        self._released = self._directory.bound(of=saved)
        self._directory.point_to(number)
        self._directory.set_aside(damaged)
        return start

    # Writing.

    def save(self, state: TrainState[Any], number: int) -> bool:
        """Starts to save a state; returns when the state may be used up by the next step.

        Waits for the save before, and warns if that failed: the run goes on, and its last good
        checkpoint stays. Returns whether it could be started.
        """
        self.wait()
        folder, arrays = self._directory.checkpoint(number), named_arrays(state)
        error = self._new_folder(folder, arrays) if is_first_host() else None
        if number in self._unsaved:
            self._unsaved.remove(number)
        save = broadcast(0 if error else 1 + secrets.randbits(30))
        if not save:  # else the other hosts would wait for the first
            self._warn_not_saved(number, error or OSError("host 0 cannot write"))
            return False
        try:
            if self._checkpointer is None:
                self._checkpointer = writer(arrays, folder)
            self._checkpointer.save(
                folder / STATE, args=self._orbax.args.StandardSave(arrays), force=True
            )
        except Exception as error:
            self._warn_not_saved(number, error)
            return False
        commit = self._writer.submit(self._commit, folder, number, save)
        self._pending = (number, commit)
        return True

    def _new_folder(self, folder: RunPath, arrays: Mapping[str, Any]) -> Exception | None:
        """Makes the folder of a checkpoint, with the record in it; what went wrong, if anything."""
        record = record_of(self.step, arrays, self._identity, self._salt)
        record["programs"] = self._programs
        try:
            self._claim.check()  # else the folder may be another run's
            remove(folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / RUN, record)
        except (OSError, CheckpointError) as error:
            return error
        return None

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

    def finish(self, done: int) -> bool:
        """Waits for the last save; whether it succeeded. No step after `done` was taken."""
        succeeded = self.wait()
        self.may_release(done)
        return succeeded

    def told(self) -> str:
        """Which checkpoint the next start goes on from, in words."""
        latest = self._directory.latest()
        if latest is None:
            return f"There is no checkpoint in {self._directory}."
        folder = self._directory.checkpoint(latest)
        saved = f"The run is saved up to step {latest}, in {folder}."
        return f"{saved} Start it again to go on from there."

    def close(self) -> bool:
        """Waits, and ends; whether the last save succeeded."""
        succeeded = self.wait()
        self._writer.shutdown()
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._remove_unsaved()  # orbax may have written on while they were removed before
        return succeeded

    def may_release(self, number: int) -> None:
        """Notes durably, before they are taken, that steps up to a number may be released."""
        if is_first_host():
            self._directory.set_bound(max(number, self._released))
            self._claim.check()  # after it: see `Claim`

    def _commit(self, folder: RunPath, number: int, save: int) -> None:
        self._checkpointer.wait_until_finished()
        if not is_first_host():
            write_part(folder, jax.process_index(), save)
            return
        self._claim.check()
        write_json(folder / PRIVACY, privacy_statement(self.step, number, self._programs))
        write_list(folder, jax.process_count(), save, number)
        sync(self._directory.path)
        self._directory.point_to(number)
        for old in self._directory.numbers()[self._keep :]:
            remove(self._directory.checkpoint(old))

    def _warn_not_saved(self, number: int, error: Exception) -> None:
        latest = self._directory.latest()
        last = "there is none yet" if latest is None else f"it is that of step {latest}, and whole"
        warnings.warn(
            f"The state of step {number} could not be saved in {self._directory}: {error!r}. "
            f"The run goes on. Its last good checkpoint: {last}.",
            CheckpointWarning,
            stacklevel=2,
        )
        # Orbax keeps errors of writes in the background, and would raise them again at every save.
        if self._checkpointer is not None:
            with contextlib.suppress(Exception):
                self._checkpointer.close()
        self._checkpointer = None
        self._unsaved.append(number)
        self._remove_unsaved()

    def _remove_unsaved(self) -> None:
        """Removes what was not saved; what counts by now stays: its error came after that."""
        with contextlib.suppress(OSError):  # else the next start removes it
            if not is_first_host() or self._claim.other() is not None:
                return
            for number in self._unsaved:
                if number != self._directory.latest():
                    remove(self._directory.checkpoint(number))


def _problem_on_any_host(folder: RunPath) -> str | None:
    """What is wrong with the files of a checkpoint, each host having read its share."""
    found = from_every_host(problem_of(folder, jax.process_index(), jax.process_count()))
    return next((problem for problem in found if problem is not None), None)


def _checked_parts(names: Iterable[Any], known: Sequence[str]) -> frozenset[str]:
    found = (names,) if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or any(name not in known for name in found):
        shown = [name if isinstance(name, str) else type(name).__name__ for name in found]
        raise ValueError(
            "allow_changed must be a tuple of names of what may change while a run lasts, out of "
            f"{', '.join(known)}; found {', '.join(shown)}."
        )
    return frozenset(found)
