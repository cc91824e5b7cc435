"""A loop around a step: batches, evaluation, progress, metrics, checkpoints, and a good end."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, Generic, SupportsIndex, TypeVar

import jax

from .. import expected
from ..expected import entries, expect, flag, function
from ..privacy import whole_number
from .calls import calls, checked_number
from .checked import checks_of, write_checks
from .checkpoint import Checkpoints
from .claim import claimed
from .data import Batches
from .directory import METRICS
from .dispatch import FlatState
from .events import Callback, EpsilonAhead, JsonLines, ProgressBar
from .first_model import FirstModel
from .hosts import watched
from .identity import Texts
from .measures import Measures
from .state import TrainState
from .step import Step
from .stopping import StopSignal
from .tuned import largest_size, settled

Model = TypeVar("Model")


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
    | SIGTERM, to any host | the call is finished, saved, and all hosts exit with status 0 |
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
            takes its memory. With `steps_per_call`, a batch is all that a call takes.
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
        callbacks: each is called with an `Event` for every step, after the call that took it, and
            ends the run by returning True.
        progress: whether to show a progress bar.
        extra: `extra(steps_done, model)` is called before every step and returns more arguments of
            the optimizer's update, by name, for instance `{"value": v}` for
            `optax.contrib.reduce_on_plateau`. **Public values only**, and the same values for the
            same arguments, so that a run that is resumed repeats itself.
        device_memory: bytes of a device, for a step with `microbatch_size="auto"` or "tune"; by
            default the memory that the device reports. A run that is resumed on as many devices
            keeps its microbatch; one that was tuned keeps method and microbatch on any.
        steps_per_call: how many steps one call of the compiled program takes, where steps are
            short. A call ends where a checkpoint or an evaluation is due, after single steps if
            need be: take a number that divides `save_every` and `evaluate_every`; a larger one than
            these is as good as the smallest of them. A device holds as many batches. It does not
            belong to the run: resumed with another number, or stopped by `steps` where a call would
            go on, a run ends with the same parameters up to rounding. A killed run is best resumed
            with the same number: it repeats steps with the same noise, and bit for bit only then.

    Raises:
        ValueError: a number is out of its range; `data` is not a source, or its length is not the
            step's `num_examples`; `steps_per_call` is more than 1 and there is `extra`, or the step
            takes several steps itself.
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
        steps_per_call: SupportsIndex = 1,
    ):
        expect("step", step, Step, "what dp.make_step returned")
        callbacks = entries("callbacks", callbacks, "functions")
        for one in callbacks:
            function("callbacks", one, "callback(event)")
        if extra is not None:
            function("extra", extra, "extra(steps_done, model), or None")
        self._save_every = whole_number("save_every", save_every, least=1, most=2**53)
        self._step = step
        self._batches = Batches(
            data,
            step.sampler(),
            whole_number("readers", readers, least=1, most=1024),
            whole_number("read_ahead", read_ahead, least=1, most=1024),
        )
        self._extra = extra
        self._callbacks = callbacks
        self._progress = flag("progress", progress)
        self._measures = Measures(step, evaluate, evaluate_every, self._progress)
        self._device_memory = (
            None
            if device_memory is None
            else whole_number("device_memory", device_memory, least=1, most=2**60)
        )
        self._directory = None if directory is None else expected.directory("directory", directory)
        self._keep = whole_number("keep", keep, least=2, most=2**53)
        self._ends = [*self._measures.ends, *([self._save_every] * (directory is not None))]
        number = checked_number(steps_per_call, step, has_extra=extra is not None)
        self._steps_per_call = min([number, step.plan.steps, *self._ends])
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
        step = step.with_steps_per_call(self._steps_per_call)
        examples, mask = step.place(self._batches.zeros(step.steps_per_call))
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
        start, began = int(state.step), time.monotonic()
        listeners = self._callbacks
        if self._directory is not None:
            listeners = (JsonLines(self._directory / METRICS, start), *listeners)
        flat = FlatState.of(state, step.sharding)
        before_last, done, bound = flat.step, start, start
        tried, is_saved = start, True  # to save the state of that step, once
        is_asked, unheard = False, range(0)
        if step.microbatch_size == "auto" and start < stop:
            step = self._sized(step, flat.state, start, checkpoints)
        several = step.with_steps_per_call(self._steps_per_call)
        with (
            closing(ProgressBar(start, stop, self._progress)) as bar,
            closing(
                EpsilonAhead(step.plan.epsilon, self._measures.told_after(start, stop))
            ) as epsilons,
            closing(
                self._batches.drawn_by(step.sampler_of(texts)).from_step(
                    start, stop, self._calls(start, stop)
                )
            ) as batches,
        ):
            for call, batch in zip(self._calls(start, stop), batches, strict=True):
                # While one step is under way the next is prepared, and memory stays flat.
                jax.block_until_ready(before_last)
                of_call = several if len(call) > 1 else step
                # Without rules a step takes numpy's arrays as they are, which is faster.
                examples, mask = batch if step.sharding is None else of_call.place(batch)
                if len(call) > 1:  # No call waits behind another: who asks is answered at its end.
                    jax.block_until_ready(flat.step)
                if is_asked := signal.asked_after(unheard):
                    break
                extra = self._extra(done, flat.state.model) if self._extra else {}
                # All steps of the call count as released before it begins.
                if checkpoints is None:
                    self._step.unrecorded.steps = call.stop
                elif call.stop > bound:
                    bound = min(stop, -(-call.stop // self._save_every) * self._save_every)
                    checkpoints.may_release(bound)
                before_last = flat.step
                flat = of_call.next(flat, examples, mask, extra)
                unheard, done = range(done + 1, call.stop + 1), call.stop
                stepped(done)
                seconds, ends = time.monotonic() - began, False
                for event in self._measures.events(flat, call, stop, seconds, epsilons):
                    bar.update(event)
                    answers = [listener(event) is True for listener in listeners]
                    ends = ends or any(answers)
                if ends or signal.asked is not None:
                    break
                if checkpoints is not None and done % self._save_every == 0:
                    tried = done
                    is_saved = checkpoints.save(jax.block_until_ready(flat.state), done)
            state = jax.block_until_ready(flat.state)
            if checkpoints is not None:
                if tried < done:
                    is_saved = checkpoints.save(state, done)
                if is_asked or signal.asked_after(unheard):
                    signal.leave(checkpoints.finish(done) and is_saved, checkpoints.told())
            return state

    def _sized(
        self,
        step: Step[Model],
        state: TrainState[Model],
        start: int,
        checkpoints: Checkpoints | None,
    ) -> Step[Model]:
        """A step whose microbatch is known, where it was to be the largest that fits."""
        size = None if checkpoints is None else checkpoints.microbatch_size
        if size is None:
            several = step.with_steps_per_call(self._steps_per_call)
            extra = self._extra(start, state.model) if self._extra else {}
            examples, mask = several.place(self._batches.zeros(several.steps_per_call))
            size = largest_size(several, state, (examples, mask, extra), self._device_memory)
        step = step.with_microbatch_size(size)
        if checkpoints is not None:
            checkpoints.step = step
        return step

    def _calls(self, start: int, stop: int) -> Iterator[range]:
        return calls(start, stop, self._steps_per_call, self._ends)
