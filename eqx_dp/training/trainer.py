"""A loop around a step: batches, evaluation, progress, metrics, checkpoints, and a good end."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, SupportsIndex, TypeVar

import jax

from ..privacy import whole_number
from .checkpoint import Checkpoints
from .data import Batches
from .events import Callback, Event, checked_metrics
from .fitting import fitted
from .hosts import HostWatch, any_host_asked_to_stop, hears_sigterm
from .metrics import JsonLines
from .progress import ProgressBar
from .state import TrainState
from .step import Step
from .stopping import StopSignal

Model = TypeVar("Model")

# Epsilon takes half a second to work out, so that it is not shown after every step.
_TIMES_SHOWN = 20


class Trainer(Generic[Model]):
    """Runs a step over a data set: `state = dp.Trainer(step, data, directory="run").run(model)`.

    **What is written and shown** depends on the plan, on the number of steps, and on what
    `evaluate` returns, which is to work on public or held-out data: by default nothing that depends
    on the private data, but for how long steps take. A step that was made with `disclose` adds what
    that names.

    **A run that ends is resumed** by the same program: where `directory` holds a checkpoint, `run`
    goes on from it, with the batches, keys and noise that it would have had, and ends with the same
    parameters, bit for bit, on the same devices. On another number of devices or hosts it ends with
    the same up to rounding. Loss, optimizer and data have to be the same as well, which nothing
    compares: with others, a step that was seen already would be released again with the same noise.

    | event | what happens |
    |---|---|
    | killed (SIGKILL, power) | at the next start it goes on from the last checkpoint |
    | SIGTERM, to any host | the step is finished, saved, and all hosts exit with status 0 |
    | a checkpoint cannot be written | a `CheckpointWarning`; the run goes on |
    | a checkpoint is damaged | a `CheckpointWarning`, and the one before it is used |
    | another plan, policy, clip norm, data set, seed, model | refused; differences are named |
    | one of several hosts is lost | the others say so, and end with a status other than 0 |
    | metrics cannot be written | a warning; the run goes on |
    | a data source fails | `DataError`, which names the source and the example |

    Args:
        step: what `dp.make_step` made.
        data: a source of examples, or a tuple of sources, one an argument of the loss. A source has
            a length and is indexed by an array of integers: numpy arrays, memory-mapped files, data
            sets with fast random access. The next batch is read while a step is under way. On
            several hosts each reads only the examples that `step.sampler().owned` names, by their
            positions in the whole data set.
        directory: for checkpoints, `privacy.json` and `metrics.jsonl`; the same on all hosts. None
            to keep nothing.
        save_every: steps between checkpoints; the last step is always saved.
        keep: how many checkpoints stay.
        evaluate: `evaluate(model)` returns numbers by name. The model is as it is stored: cast it
            to compute as the policy says, and with sharding rules put data beside it by
            `step.place`.
        evaluate_every: steps between evaluations; by default a twentieth of the plan's. The last
            step is always evaluated.
        callbacks: called after every step with an `Event`; one that returns True ends the run.
        progress: whether to show how far the run is.
        device_memory: bytes of a device, for a step with `microbatch_size="auto"`; by default what
            the device says that it has. A run that is resumed on as many devices keeps to the size
            that it had.

    Raises:
        ValueError: a number is out of its range; `data` is no source, or is not as long as the step
            was told.
        DataError: a source cannot be read.
    """

    def __init__(
        self,
        step: Step[Model],
        data: Any,
        *,
        directory: str | os.PathLike[str] | None = None,
        save_every: SupportsIndex = 100,
        keep: SupportsIndex = 3,
        evaluate: Callable[[Model], Mapping[str, Any]] | None = None,
        evaluate_every: SupportsIndex | None = None,
        callbacks: Iterable[Callback] = (),
        progress: bool = True,
        device_memory: SupportsIndex | None = None,
    ):
        every = max(1, step.plan.steps // 20) if evaluate_every is None else evaluate_every
        self._save_every = whole_number("save_every", save_every, least=1, most=2**53)
        self._evaluate_every = whole_number("evaluate_every", every, least=1, most=2**53)
        self._step = step
        self._batches = Batches(data, step.sampler())
        self._evaluate = evaluate
        self._callbacks = tuple(callbacks)
        self._progress = progress
        self._device_memory = device_memory
        self._directory = None if directory is None else Path(directory).absolute()
        self._keep = whole_number("keep", keep, least=2, most=2**53)

    def run(self, model: Model, steps: SupportsIndex | None = None) -> TrainState[Model]:
        """Trains, from the start or from the last checkpoint.

        Args:
            model: as before the first step, whether or not there is a checkpoint.
            steps: stop when so many have been taken, counted from the start; by default the plan's.

        Returns:
            The last state; `.model` is the trained model.

        Raises:
            ValueError: as `step.init`; `steps` exceeds the plan's; the checkpoint belongs to
                another run.
            CheckpointError: no checkpoint in the directory is whole.
            DataError: a source fails.
            SystemExit: with status 0, after SIGTERM, or 1 if the state could not be saved then.
        """
        plan = self._step.plan
        stop = (
            plan.steps if steps is None else whole_number("steps", steps, least=0, most=plan.steps)
        )
        is_kept = self._directory is not None
        with (
            StopSignal(heard=is_kept and hears_sigterm()) as signal,
            self._step.mesh(),
            HostWatch(self._directory) as watch,
        ):
            state = self._step.init(model)
            if self._directory is None:
                return self._loop(state, stop, None, signal, watch)
            with closing(Checkpoints(self._directory, self._step, self._keep)) as checkpoints:
                state = self._loop(checkpoints.restore(state), stop, checkpoints, signal, watch)
                is_saved = checkpoints.wait()
                if signal.asked:  # after the last step
                    raise SystemExit(0 if is_saved else 1)
                return state

    def _loop(
        self,
        state: TrainState[Model],
        stop: int,
        checkpoints: Checkpoints | None,
        signal: StopSignal,
        watch: HostWatch,
    ) -> TrainState[Model]:
        start, began = int(state.step), time.monotonic()
        listeners = self._listeners(start)
        step = self._step
        with (
            ProgressBar(start, stop, self._progress) as bar,
            closing(self._batches.from_step(start, stop)) as batches,
        ):
            for done, batch in enumerate(batches, start + 1):
                examples, mask = step.place(batch)
                if done == start + 1:
                    known = None if checkpoints is None else checkpoints.microbatch_size
                    step = fitted(step, state, examples, mask, self._device_memory, known)
                    if checkpoints is not None:
                        checkpoints.step = step
                # No more than one step is ever under way, so that memory stays flat.
                jax.block_until_ready(state.step)
                state = step(state, *examples, is_padding_example=mask)
                watch.stepped(done)
                event = self._event(state, done, stop, time.monotonic() - began)
                bar.update(event)
                ends = [listener(event) is True for listener in listeners]
                is_asked = any_host_asked_to_stop(signal.asked, done)
                is_over = is_asked or any(ends) or done == stop
                if checkpoints is not None and (is_over or done % self._save_every == 0):
                    is_saved = checkpoints.save(state, done)
                    if is_asked:
                        raise SystemExit(0 if checkpoints.wait() and is_saved else 1)
                if is_over:
                    break
        return state

    def _listeners(self, start: int) -> list[Callback]:
        if self._directory is None:
            return list(self._callbacks)
        return [JsonLines(self._directory / "metrics.jsonl", start), *self._callbacks]

    def _event(
        self, state: TrainState[Model], done: int, stop: int, seconds: float
    ) -> Event[Model]:
        plan = self._step.plan
        metrics = {name: float(value) for name, value in state.disclosed.items()}
        is_due = done % self._evaluate_every == 0 or done == stop
        if self._evaluate is not None and is_due:
            metrics |= checked_metrics(self._evaluate(state.model))
        is_shown = self._progress and done % max(1, plan.steps // _TIMES_SHOWN) == 0
        epsilon = plan.epsilon(done) if is_shown or (metrics and is_due) else None
        return Event(done, state, metrics, seconds, epsilon)
