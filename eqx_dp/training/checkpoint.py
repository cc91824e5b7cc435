"""Checkpoints that are whole or not there, and a statement of privacy that is true of them.

A directory holds

    run.json                        which run this is, and which programs it has had (`ledger.py`)
    released_at_most.00000300       up to which step any may have been released
    lock                            held by the process that runs (`lock.py`)
    latest -> 00000200              the checkpoint that counts
    privacy.json -> latest/privacy.json
    00000100/  00000200/            checkpoints, each with
        state/                      arrays, as orbax writes them
        privacy.json                what was spent for them
        run.json                    which run they belong to, as it was then
        files.json                  SHA-256 of every file above, written last

`run.json` and a checkpoint of step 0 are there before the first step is taken. A checkpoint is
written beside (`00000200.partial`), renamed, and counts from the moment at which `latest` is turned
to it: one atomic operation for arrays and statement together. Whatever a killed process leaves
behind is either older, or not yet `latest` and removed, with a warning, at the next start.
(`metrics.jsonl` and `hosts/` are there as well; a run does not need them to be resumed.)

**Another program** (loss, optimizer, method, ...) goes on from a checkpoint only where that is
asked for. It counts its steps from the last that the program before may have released, so that the
number of a step is the number of releases, and what a killed process may have shown is paid for.
Its noise and sample follow from all programs so far: they are those of no program before, and not
those of a program that comes back.

No secret is in it. Of the noise's state the key is left out; it follows from the seed, which the
program that resumes a run has to give again, and which is recognised by a fingerprint.
"""

import contextlib
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array

from ..extras import extra
from ..gradients import split_trainable
from .arrays import leaves, named_arrays, same, with_arrays
from .files import (
    CheckpointError,
    CheckpointWarning,
    digests,
    emptied,
    sync,
    write_json,
)
from .hosts import broadcast, from_first_host, is_first_host
from .ledger import Ledger, record_in
from .record import as_it_became, changeable, privacy_statement, record_of
from .resuming import Start, begun, resumed
from .shelf import FILES, PRIVACY, RUN, STATE, Shelf
from .state import TrainState
from .step import Step

Model = TypeVar("Model")


class Checkpoints:
    """The checkpoints of one run, in one directory that all its hosts share.

    Args:
        directory: made if it is not there.
        step: the run's step: what the run is.
        keep: how many checkpoints stay, at least 2.
        identity: the run's programs, by part; from `step.identity`.
        allow_changed: parts of the run that may be others than those of the checkpoint.

    Attributes:
        step: as given until `restore`, which makes it that of the run: what draws samples and takes
            steps. To be replaced where a microbatch size is settled later.
        microbatch_size: that of the run which was restored, on as many devices; else None.

    Raises:
        ValueError: `keep` is below 2, or `allow_changed` names what is no part, or may not change.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: Step[Any],
        keep: int = 3,
        *,
        identity: Mapping[str, str] | None = None,
        allow_changed: Iterable[str] = (),
    ):
        if keep < 2:
            raise ValueError(
                "keep must be at least 2, so that the run survives one damaged checkpoint; found "
                f"{keep}."
            )
        self.directory = Path(directory).absolute()
        self.step = step
        self.microbatch_size: int | None = None
        self._keep = keep
        self._identity = dict(identity or {})
        self._allowed = _checked_parts(allow_changed, changeable(self._identity))
        self._salt = secrets.token_bytes(16)
        self._ledger, self._shelf = Ledger(self.directory), Shelf(self.directory)
        self._released = 0
        self._programs: list[dict[str, Any]] = []
        self._settle: Callable[[], None] = lambda: None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="eqx_dp-checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._unsaved: list[int] = []
        self._orbax = extra("orbax.checkpoint")
        self._checkpointer = self._new_checkpointer()

    def _new_checkpointer(self) -> Any:
        return self._orbax.AsyncCheckpointer(self._orbax.StandardCheckpointHandler())

    # Reading.

    def restore(self, model: Model) -> TrainState[Model]:
        """The newest state that is whole; where there is none, the first, which is then recorded.

        Every file is compared with its digest first. A checkpoint that fails is set aside (as
        `NUMBER.damaged`) with a warning, and the one before it is used.

        Args:
            model: as before the first step.

        Raises:
            ValueError: the checkpoint belongs to another run, each difference is named; or the plan
                has no steps left for another program.
            CheckpointError: there are checkpoints, and none of them is whole; the directory's
                record is damaged; nothing can be written.
        """
        arrays = named_arrays(self.step.init(model))
        start = Start(*from_first_host(lambda: self._start(arrays)))
        del arrays
        self._programs, self.microbatch_size = start.programs, start.microbatch_size
        self.step = as_it_became(self.step, self._programs)
        state = self.step.init(model)
        if start.number is None:
            self._record_first(state)
            return state
        targets = {
            name: array for name, array in named_arrays(state).items() if name in start.restored
        }
        restored = with_arrays(state, self._arrays_of(start.number, targets))
        self._check_frozen(start.number, state, restored)
        from_first_host(self._settle)
        lost = start.after - start.number
        return eqx.tree_at(lambda s: s.step, restored, restored.step + lost) if lost else restored

    def _record_first(self, state: TrainState[Any]) -> None:
        """A checkpoint of step 0: what a run that is killed soon begins with again."""
        if not (self.save(state, 0) and self.wait()):
            raise CheckpointError(
                f"The run cannot be recorded in {self.directory} (a warning says why). It must be "
                "recorded before its first step. Make room, or name another directory."
            )

    def _arrays_of(self, number: int, targets: dict[str, Array]) -> dict[str, Array]:
        """Arrays of a checkpoint, by name, each to where an array lives that is there now."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), targets
        )
        to = self._orbax.checkpoint_utils.construct_restore_args(shapes)
        with self._orbax.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(
                self._shelf.path(number) / STATE,
                args=self._orbax.args.PyTreeRestore(shapes, restore_args=to, partial_restore=True),
            )

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
                f"model{', model'.join(other)}, which is not trained, has other values in the "
                "checkpoint than in the given model. Give the model that the run was started with."
            )

    def _start(self, arrays: dict[str, Array]) -> Start:
        """From where to go on, after tidying up; what the first host finds out for all."""

        def describe(salt: bytes) -> dict[str, Any]:
            self._salt = salt
            return record_of(self.step, arrays, self._identity, salt)

        self._shelf.remove_unfinished()
        numbers = self._shelf.numbers()
        self._ledger.check_complete(numbers)
        if not numbers:
            return begun(self._ledger, describe(secrets.token_bytes(16)))
        number, damaged = self._shelf.newest_whole(numbers)
        saved = record_in(self._shelf.path(number) / RUN)
        start, self._settle = resumed(self._ledger, describe, number, saved, self._allowed)
        self._released = self._ledger.bound(of=saved)
        self._shelf.point_to(number)
        self._shelf.set_aside(damaged)
        return start

    # Writing.

    def save(self, state: TrainState[Any], number: int) -> bool:
        """Starts to save a state; returns when the state may be used up by the next step.

        Waits for the save before, and warns if that failed: the run goes on, and its last good
        checkpoint stays.

        Returns:
            Whether it could be started.
        """
        self.wait()
        partial = self._shelf.path(number).with_suffix(".partial")
        error = emptied(partial) if is_first_host() else None
        if broadcast(int(error is not None)):  # else the other hosts would wait for the first
            self._warn_not_saved(number, error or OSError("host 0 cannot write"))
            return False
        try:
            arrays = named_arrays(state)
            self._checkpointer.save(
                partial / STATE, args=self._orbax.args.StandardSave(arrays), force=True
            )
        except Exception as error:
            self._warn_not_saved(number, error)
            return False
        record = self._record(arrays) if is_first_host() else {}
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

    def finish(self, done: int) -> bool:
        """Waits for the last save; whether it succeeded. No step after `done` was taken."""
        succeeded = self.wait()
        self.may_release(done)
        return succeeded

    def told(self) -> str:
        """Which checkpoint the next start goes on from, in words."""
        latest = self._shelf.latest()
        if latest is None:
            return f"There is no checkpoint in {self.directory}."
        return (
            f"The run is saved up to step {latest}, in {self._shelf.path(latest)}. Start it again "
            "to go on from there."
        )

    def close(self) -> bool:
        """Waits, and ends; whether the last save succeeded."""
        succeeded = self.wait()
        self._writer.shutdown()
        self._checkpointer.close()
        self._remove_unsaved()  # orbax may have written on while they were removed before
        return succeeded

    def may_release(self, number: int) -> None:
        """Notes durably, before they are taken, that steps up to a number may be released.

        Raises:
            CheckpointError: it cannot be written.
        """
        if is_first_host():
            self._ledger.set_bound(max(number, self._released))

    def _commit(self, partial: Path, number: int, record: dict[str, Any]) -> None:
        self._checkpointer.wait_until_finished()
        if not is_first_host():
            return
        write_json(partial / PRIVACY, privacy_statement(self.step, number, self._programs))
        write_json(partial / RUN, record)
        write_json(partial / FILES, digests(partial))
        shutil.rmtree(self._shelf.path(number), ignore_errors=True)
        partial.rename(self._shelf.path(number))
        sync(self.directory)
        self._shelf.point_to(number)
        for old in self._shelf.numbers()[self._keep :]:
            shutil.rmtree(self._shelf.path(old))

    def _record(self, arrays: dict[str, Array]) -> dict[str, Any]:
        record = record_of(self.step, arrays, self._identity, self._salt)
        return record | {"programs": self._programs}

    def _warn_not_saved(self, number: int, error: Exception) -> None:
        latest = self._shelf.latest()
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
        self._unsaved.append(number)
        self._remove_unsaved()

    def _remove_unsaved(self) -> None:
        for number in self._unsaved if is_first_host() else ():
            shutil.rmtree(self._shelf.path(number).with_suffix(".partial"), ignore_errors=True)


def _checked_parts(names: Iterable[Any], known: Sequence[str]) -> frozenset[str]:
    found = (names,) if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or any(name not in known for name in found):
        shown = [name if isinstance(name, str) else type(name).__name__ for name in found]
        raise ValueError(
            "allow_changed must be a tuple of names of what may change while a run lasts, out of "
            f"{', '.join(known)}; found {', '.join(shown)}."
        )
    return frozenset(found)
