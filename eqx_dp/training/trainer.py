"""A loop around a step: batches, evaluation, progress, metrics, checkpoints, and a good end."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, Generic, SupportsIndex, TypeVar

import jax
import numpy as np

from .. import expected
from ..expected import entries, expect, flag, function
from ..privacy import whole_number
from .checked import checks_of, write_checks
from .checkpoint import Checkpoints
from .claim import claimed
from .data import Batches
from .directory import METRICS
from .dispatch import FlatState
from .events import Callback, EpsilonAhead, Event, JsonLines, ProgressBar, checked_metrics
from .first_model import FirstModel
from .hosts import watched
from .identity import Texts
from .state import TrainState
from .step import Step
from .stopping import StopSignal
from .tuned import largest_size, settled

Model = TypeVar("Model")

# Epsilon takes a tenth of a second to work out, so that it is not shown after every step.
_TIMES_SHOWN = 20


class Trainer(Generic[Model]):
    """Runs a step over a data set: `state = dp.Trainer(step, data, directory="run").run(model)`.

    **What is written and shown** depends on the plan, on the number of steps, and on what
    `evaluate` returns; `evaluate` must use public or held-out data. By default nothing depends on
    the private data, except for the time that steps take. A step that was made with `disclose` adds
    the figures that it names.

    **A run that ended is resumed** by the same program. If `directory` holds a checkpoint, `run`
    goes on from it, with the batches, keys and noise that the run would have had, and ends with the
    same parameters, bit for bit, on the same devices. On another number of devices or hosts it ends
    with the same parameters up to rounding. The examples must be the same as well; nothing compares
    them.

    **Another program** (another learning rate, loss, optimizer, method, clip norm) is refused, with
    the name of each difference, unless `allow_changed` names the parts. The run then goes on with
    the model of the last checkpoint, and with the optimizer's state if it has the same shapes;
    sample and noise are fresh. Every step that may have been released counts, saved or not: the
    count goes on from the number in the name of the file `released_at_most.NUMBER`. That number is
    exact after a run that ended by itself; a killed run may have released all steps up to its next
    save. So the run takes fewer steps, and epsilon is that of all steps that count.

    **On several hosts** the same program runs on each, after `jax.distributed.initialize()`, with
    one directory that all of them share. The guide to devices says how to start it under SLURM and
    Kubernetes, and on TPUs.

    | event | what happens |
    |---|---|
    | killed (SIGKILL, power) | at the next start it goes on from the last checkpoint |
    | SIGTERM, to any host | the step is finished, saved, and all hosts exit with status 0 |
    | Ctrl-C, with a directory, on one host | as SIGTERM; `KeyboardInterrupt` names the checkpoint |
    | Ctrl-C again | the process ends at once, as if it was killed |
    | a checkpoint cannot be written | a `CheckpointWarning`; the run goes on |
    | a checkpoint is damaged | a `CheckpointWarning`, and the one before it is used |
    | nothing can be written before the first step | `CheckpointError` |
    | another plan, data-set size, seed, model | refused; differences are named |
    | `seed=None`, and all steps are taken | the state is returned; no seed is needed for that |
    | `seed=None` otherwise | refused, with a directory |
    | another program | the same, unless `allow_changed` names the part |
    | another run is under way in the directory | `CheckpointError` |
    | the same, without locks (an object store) | the earlier one ends: `CheckpointError` |
    | there is no directory, and `run` is called again | refused |
    | one of several hosts is lost | the others say so, and end with a status other than 0 |
    | metrics cannot be written | a warning; the run goes on |
    | the step does not keep to its policy | the same, and `checks.json` says where |
    | a data source fails | `DataError`, which names the source |

    Args:
        step: what `dp.make_step` made.
        data: a source of examples, or a tuple of sources, one for each argument of the loss. A
            source has a length and is indexed by an array of integers: numpy arrays, memory-mapped
            files, data sets with fast random access; or it is a dictionary of such. What gives one
            example at a time is a source by `dp.Records`. On several hosts each reads only the
            examples that `step.sampler().owned` names, by their positions in the whole data set.
        readers: how many batches are read at the same time, each by a thread of its own; more than
            one for sources that several threads may index at once.
        read_ahead: how many batches are drawn and read while a step runs, at least `readers`. Each
            takes its memory.
        directory: the folder of checkpoints, `privacy.json`, `metrics.jsonl`, and `checks.json`,
            what `check_precision` says of the step; the same on all hosts. It is on a file system,
            or in Google's cloud storage ("gs://bucket/run"). None to keep nothing.
        save_every: steps between checkpoints; the last step is always saved.
        keep: how many checkpoints are kept.
        allow_changed: parts of the run that may differ from those of the checkpoint: "loss",
            "optimizer", "method", "policy", "l2_clip_norm", "rescale_to_unit_norm", "ema",
            "disclose".
        evaluate: `evaluate(model)` returns numbers by name. It gets the model as it is stored, with
            `ema` the averaged one: cast it to the compute dtype if the policy asks for it, and with
            sharding rules place data on the mesh by `step.place`.
        evaluate_every: steps between evaluations; by default a twentieth of the plan's. The last
            step is always evaluated.
        callbacks: each is called after every step with an `Event`, and ends the run by returning
            True.
        progress: whether to show a progress bar.
        extra: `extra(steps_done, model)` is called before every step and returns more arguments of
            the optimizer's update, by name, for instance `{"value": v}` for
            `optax.contrib.reduce_on_plateau`. **Public values only**, and the same values for the
            same arguments, so that a run that is resumed repeats itself.
        device_memory: bytes of a device, for a step with `microbatch_size="auto"` or "tune"; by
            default the memory that the device reports. A run that is resumed on as many devices
            keeps its microbatch; one that was tuned keeps method and microbatch on any.

    Raises:
        ValueError: a number is out of its range; `data` is not a source, or its length is not the
            step's `num_examples`.
        DataError: a source cannot be read.
    """

    def __init__(
        self,
        step: Step[Model],
        data: Any,
        *,
        readers: SupportsIndex = 1,
        read_ahead: SupportsIndex = 1,
        directory: str | os.PathLike[str] | None = None,
        save_every: SupportsIndex = 100,
        keep: SupportsIndex = 3,
        allow_changed: Iterable[str] = (),
        evaluate: Callable[[Model], Mapping[str, Any]] | None = None,
        evaluate_every: SupportsIndex | None = None,
        callbacks: Iterable[Callback] = (),
        progress: bool = True,
        extra: Callable[[int, Model], Mapping[str, Any]] | None = None,
        device_memory: SupportsIndex | None = None,
    ):
        expect("step", step, Step, "what dp.make_step returned")
        callbacks = entries("callbacks", callbacks, "functions")
        for one in callbacks:
            function("callbacks", one, "callback(event)")
        if evaluate is not None:
            function("evaluate", evaluate, "evaluate(model), or None")
        if extra is not None:
            function("extra", extra, "extra(steps_done, model), or None")
        every = max(1, step.plan.steps // 20) if evaluate_every is None else evaluate_every
        self._save_every = whole_number("save_every", save_every, least=1, most=2**53)
        self._evaluate_every = whole_number("evaluate_every", every, least=1, most=2**53)
        self._step = step
        self._batches = Batches(
            data,
            step.sampler(),
            whole_number("readers", readers, least=1, most=1024),
            whole_number("read_ahead", read_ahead, least=1, most=1024),
        )
        self._evaluate = evaluate
        self._extra = extra
        self._callbacks = callbacks
        self._progress = flag("progress", progress)
        self._device_memory = (
            None
            if device_memory is None
            else whole_number("device_memory", device_memory, least=1, most=2**60)
        )
        self._directory = None if directory is None else expected.directory("directory", directory)
        self._keep = whole_number("keep", keep, least=2, most=2**53)
        self._allow_changed = (
            allow_changed
            if isinstance(allow_changed, str)
            else entries("allow_changed", allow_changed, "names of parts of a run")
        )

    def __repr__(self) -> str:
        directory = None if self._directory is None else str(self._directory)
        return f"{type(self).__name__}({self._step}, directory={directory!r})"

    def run(
        self,
        model: Model | None = None,
        steps: SupportsIndex | None = None,
        *,
        init_model: Callable[[], Model] | None = None,
    ) -> TrainState[Model]:
        """Trains, from the start or from the last checkpoint.

        Args:
            model: the model before the first step, also if there is a checkpoint. It is not held
                once a state is there: if the caller does not hold it either, its memory is free.
            steps: the number of steps, counted from the start, after which the run stops; by
                default the plan's.
            init_model: in place of a model; `init_model()` returns it. No device and no host then
                holds a whole array that sharding rules spread (see [`Step`][]`.init`).

        Returns:
            The last state; `.model` is the trained model.

        Raises:
            ValueError: as for `step.init`; `steps` exceeds the plan's; the checkpoint belongs to
                another run; the plan has no steps left for another program; without a directory,
                a trainer has used this step before.
            CheckpointError: no checkpoint in the directory is whole; another run is under way
                there; nothing can be written there before the first step.
            DataError: a source fails.
            SystemExit: after SIGTERM, with status 0, or 1 if the state could not be saved.
            KeyboardInterrupt: after Ctrl-C.
        """
        plan, directory = self._step.plan, self._directory
        stop = (
            plan.steps if steps is None else whole_number("steps", steps, least=0, most=plan.steps)
        )
        first = FirstModel(model, init_model)
        del model
        with (
            claimed(directory) as claim,
            StopSignal(can_save=directory is not None) as signal,
            self._step.mesh(),
            watched(directory) as stepped,
        ):
            self._step = settled(
                self._step,
                first,
                self._batches.example,
                directory,
                self._device_memory,
                self._progress,
            )
            if directory is None:
                self._refuse_to_begin_again()
                texts = self._texts(first)
                state = self._step.first_state(first)
                return self._loop(self._step, state, texts, stop, None, signal, stepped)
            checks = self._trace(first)
            texts = self._texts(first)
            with closing(
                Checkpoints(
                    directory,
                    self._step,
                    self._keep,
                    identity=self._step.identity_of(texts),
                    allow_changed=self._allow_changed,
                    claim=claim,
                )
            ) as checkpoints:
                state = checkpoints.restore(first)
                write_checks(directory, checks)
                state = self._loop(
                    checkpoints.step, state, texts, stop, checkpoints, signal, stepped
                )
                is_saved = checkpoints.finish(int(state.step))
                if signal.asked:  # after the last step
                    signal.leave(is_saved, checkpoints.told())
                return state

    def _refuse_to_begin_again(self) -> None:
        taken = self._step.unrecorded.steps
        if taken:
            raise ValueError(
                f"This trainer has no directory, and its step has taken steps 1 to {taken}, of "
                "which no state is kept: to begin again would release them twice, with the same "
                "noise. Give the trainer a directory, so that `run` can go on; or make a step with "
                "another seed."
            )

    def _trace(self, first: FirstModel[Model]) -> dict[str, Any]:
        """Traces a step: a loss that is refused has no record, and no steps that count.

        Returns what the checks say of it.
        """
        size = self._step.microbatch_size
        step = self._step.with_microbatch_size(None) if size == "auto" else self._step
        slots = step.sampler().capacity
        batch = jax.tree.map(
            lambda one: np.zeros((slots, *one.shape[1:]), one.dtype), self._batches.example
        )
        examples, mask = step.place((batch, np.zeros(slots, bool)))
        state, extra = step.form(first), self._extra_in_the_beginning(first)
        if state is None:
            state = step.init(first.given, init_model=first.make)
        step.lower(state, *examples, is_padding_example=mask, extra=extra)
        return checks_of(step, state, *examples, is_padding_example=mask, extra=extra)

    def _texts(self, first: FirstModel[Model]) -> Texts:
        """What a step computes; it is traced for that."""
        extra = self._extra_in_the_beginning(first)
        return self._step.texts(first.shapes, self._batches.example, extra)

    def _extra_in_the_beginning(self, first: FirstModel[Model]) -> Mapping[str, Any]:
        if self._extra is None:
            return {}
        if first.given is not None:
            return self._extra(0, first.given)
        return self._extra(0, self._step.init(init_model=first.make).model)

    def _loop(
        self,
        step: Step[Model],
        state: TrainState[Model],
        texts: Texts,
        stop: int,
        checkpoints: Checkpoints | None,
        signal: StopSignal,
        stepped: Callable[[int], None],
    ) -> TrainState[Model]:
        start, began, limit = int(state.step), time.monotonic(), self._device_memory
        listeners = self._callbacks
        if self._directory is not None:
            listeners = (JsonLines(self._directory / METRICS, start), *listeners)
        flat = FlatState.of(state, step.sharding)
        before_last = flat.step
        with (
            closing(ProgressBar(start, stop, self._progress)) as bar,
            closing(EpsilonAhead(step.plan.epsilon, self._told_after(start, stop))) as epsilons,
            closing(
                self._batches.drawn_by(step.sampler_of(texts)).from_step(start, stop)
            ) as batches,
        ):
            for done, batch in enumerate(batches, start + 1):
                # While one step is under way the next is prepared, and memory stays flat.
                jax.block_until_ready(before_last)
                # Without rules a step takes numpy's arrays as they are, which is faster.
                examples, mask = batch if step.sharding is None else step.place(batch)
                extra = self._extra(done - 1, flat.state.model) if self._extra else {}
                if done == start + 1 and step.microbatch_size == "auto":
                    known = None if checkpoints is None else checkpoints.microbatch_size
                    step = step.with_microbatch_size(
                        known or largest_size(step, flat.state, (examples, mask, extra), limit)
                    )
                    if checkpoints is not None:
                        checkpoints.step = step
                if checkpoints is None:
                    self._step.unrecorded.steps = done
                elif done == start + 1 or self._is_saved_at(done - 1):
                    next_save = -(-done // self._save_every) * self._save_every
                    checkpoints.may_release(min(stop, next_save))
                before_last = flat.step
                flat = step.next(flat, examples, mask, extra)
                stepped(done)
                event = self._event(flat, done, stop, time.monotonic() - began, epsilons)
                bar.update(event)
                ends = [listener(event) is True for listener in listeners]
                is_asked = signal.asked_after(done)
                is_over = is_asked or any(ends) or done == stop
                if checkpoints is not None and (is_over or self._is_saved_at(done)):
                    is_saved = checkpoints.save(jax.block_until_ready(flat.state), done)
                    if is_asked:
                        signal.leave(checkpoints.finish(done) and is_saved, checkpoints.told())
                if is_over:
                    break
            return jax.block_until_ready(flat.state)

    def _is_saved_at(self, done: int) -> bool:
        return done % self._save_every == 0

    def _event(
        self,
        flat: FlatState[Model],
        done: int,
        stop: int,
        seconds: float,
        epsilons: EpsilonAhead,
    ) -> Event[Model]:
        metrics: dict[str, float] = {}
        if self._step.disclose:
            metrics |= {name: float(value) for name, value in flat.state.disclosed.items()}
        is_due = done % self._evaluate_every == 0 or done == stop
        if self._evaluate is not None and is_due:
            metrics |= checked_metrics(self._evaluate(flat.state.evaluated))
        return Event(done, metrics, seconds, epsilons.after(done), flat)

    def _told_after(self, done: int, stop: int) -> Iterator[int]:
        """The steps after which epsilon is shown, or told beside what is measured."""
        is_measured = self._evaluate is not None or bool(self._step.disclose)
        every = [max(1, self._step.plan.steps // _TIMES_SHOWN)] if self._progress else []
        every += [self._evaluate_every] if is_measured else []
        while True:
            found = [(done // steps + 1) * steps for steps in every] + [stop] * is_measured
            done = min((step for step in found if done < step <= stop), default=stop + 1)
            if done > stop:
                return
            yield done
