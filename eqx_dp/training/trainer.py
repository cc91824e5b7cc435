"""A loop around a step: batches, evaluation, progress, metrics, checkpoints, and a clean stop."""
# pyright: reportPrivateUsage=false
# (a step keeps for a Trainer what is of no use to users)

import functools
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any, Generic, SupportsIndex, TypeAlias, TypeVar

import jax

from .. import expected
from ..checks import check_precision, check_privacy
from ..expected import entries, expect, flag, function, whole_number
from ..files import going_on, write_json
from ..gradients import explain, takes_key
from . import events
from .checkpoints import Checkpoints, restored
from .data import Batches
from .events import Callback, JsonLines
from .first_state import FirstModel
from .hosts import StopSignal, failing_alone, is_first_host
from .ledger import CHECKS, METRICS, CheckpointError, CheckpointWarning, Ledger, Tally
from .loop import Loop
from .state import TrainState
from .step import Step

Model = TypeVar("Model")

# Epsilon takes a tenth of a second to compute, so it is not shown after every step.
_TIMES_SHOWN = 20


class Trainer(Generic[Model]):
    """Runs a step over a data set: `state = dp.Trainer(step, data, directory="run").run(model)`.

    **What is written and shown** depends on the plan, on the number of steps, and on what
    `evaluate` returns; `evaluate` must use public or held-out data. By default nothing depends on
    the private data, except for the time that steps take.

    **A start never uses old randomness.** Each `run` is a start: it draws 256 random bits from the
    operating system and stores them nowhere. Samples, noise, the loss's keys and stochastic
    rounding follow from them. So a killed run continues with fresh noise, and anything may change
    in between: the loss, the learning rate, the optimizer, the policy, the number of devices. Only
    the plan and `num_examples` must agree, and the model's arrays must have the shapes of the
    checkpoint. (With a `seed` they follow from it and from the number of the start.)

    **Steps that may have been released count.** The directory's ledger says how many steps each
    start took. Before a block of steps (up to the next checkpoint) a start records the block, so a
    killed process counts its unsaved steps as released: at most `save_every` of them, and as many
    again if it was still writing a checkpoint. All starts together take at most the plan's steps.
    `privacy.json` states epsilon of all of them.

    **Without a directory** there is no ledger: each `run` starts from the beginning, with fresh
    randomness (or that of the seed and the number of the run of this object), and is a separate
    release, of the plan's whole epsilon.

    **On several hosts** the same program runs on each, after `jax.distributed.initialize()`, with
    one directory that all of them share.

    | event | what happens |
    |---|---|
    | the step breaks its policy or its plan | `ValueError` before the first step, with the table |
    | a check is undecided | a warning |
    | killed (SIGKILL, power) | the next start continues from the last checkpoint |
    | SIGTERM, to any host | the step is finished, saved, and the process exits with status 143 |
    | Ctrl-C, with a directory, on one host | as SIGTERM; `KeyboardInterrupt` names the checkpoint |
    | Ctrl-C again | the process ends at once, as if it was killed |
    | all steps of the plan are released | the last checkpoint's state is returned |
    | another start is under way in the directory | both count; none goes beyond the plan |
    | the directory is moved, removed or replaced meanwhile | `CheckpointError`; its block counts |
    | copies of a run are put together | finished; epsilon is that of all steps of both |
    | `evaluate` fails on the starting model | its error, before a step is released |
    | a checkpoint cannot be written | a `CheckpointWarning`; the run continues |
    | a checkpoint is damaged | a `CheckpointWarning`, and the one before it is used |
    | the ledger cannot be written | `CheckpointError`; no step is taken |
    | a file of the ledger is missing or damaged | `CheckpointError`, which names it |
    | another plan or data-set size | `ValueError`; differences are named |
    | metrics cannot be written | a warning; the run continues |
    | a data source fails | `DataError`, which names the source |

    Args:
        step: the result of `dp.make_step`.
        data: a source of examples, or a tuple of sources, one for each argument of the loss. A
            source has a length and is indexed by an array of integers: numpy arrays, memory-mapped
            files, data sets with fast random access; or it is a dictionary of such. `dp.Records`
            wraps a sequence that gives one example at a time. On several hosts each reads only the
            examples that `step.sampler().owned` names, by their positions in the whole data set.
        read_ahead: how many batches are drawn and read at the same time while a step runs, each by
            its own thread into its own memory; more than one for sources that several threads may
            index at once.
        directory: the folder of checkpoints, ledger, `privacy.json`, `metrics.jsonl`, and
            `checks.json`, what the checks say of the step; the same on all hosts. It is on a file
            system, or in Google's cloud storage ("gs://bucket/run"). None to keep nothing.
        save_every: steps between checkpoints; the last step is always saved.
        keep: how many checkpoints are kept.
        evaluate: `evaluate(model)` returns numbers by name. It gets the model as it is stored, with
            `ema` the averaged one: cast it to the compute dtype if the policy asks for it, and with
            sharding rules place data on the mesh by `step.shard_batch`. Each start calls it once
            before its first step, so that an error costs no step; this result is not used.
        evaluate_every: steps between evaluations; by default a twentieth of the plan's. The last
            step is always evaluated.
        callbacks: each is called with a `dp.Trainer.Event` after every step; the run ends where one
            returns True.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a number is out of its range; `data` is not a source, or its length is not the
            step's `num_examples`.
        DataError: a source cannot be read.
    """

    Event: TypeAlias = events.Event

    def __init__(
        self,
        step: Step[Model],
        data: Any,
        *,
        read_ahead: SupportsIndex = 1,
        directory: str | os.PathLike[str] | None = None,
        save_every: SupportsIndex = 100,
        keep: SupportsIndex = 3,
        evaluate: Callable[[Model], Mapping[str, Any]] | None = None,
        evaluate_every: SupportsIndex | None = None,
        callbacks: Iterable[Callback] = (),
        progress: bool = True,
    ):
        expect("step", step, Step, "what dp.make_step returned")
        callbacks = entries("callbacks", callbacks, "functions")
        for one in callbacks:
            function("callbacks", one, "callback(event)")
        if evaluate is not None:
            function("evaluate", evaluate, "evaluate(model), or None")
        often = max(1, step.plan.steps // _TIMES_SHOWN)
        every = often if evaluate_every is None else evaluate_every
        if directory is not None:
            directory = expected.directory("directory", directory)
            callbacks = (JsonLines(directory / METRICS), *callbacks)
        self._loop: Callable[..., Loop[Model]] = functools.partial(
            Loop,
            step,
            whole_number("save_every", save_every, least=1, most=2**53),
            evaluate,
            whole_number("evaluate_every", every, least=1, most=2**53),
            often,
            callbacks,
            flag("progress", progress),
        )
        self._step, self._keep = step, whole_number("keep", keep, least=1, most=2**53)
        self._directory, self._runs = directory, itertools.count()  # of runs without a directory
        ahead = whole_number("read_ahead", read_ahead, least=1, most=1024)
        shape = step._sampler_of(b"its shape alone")
        self._batches = Batches(data, shape, ahead, step.plan.unit)

    def __repr__(self) -> str:
        where = self._directory and str(self._directory)
        return f"{type(self).__name__}({self._step}, directory={where!r})"

    def run(
        self,
        model: Model | None = None,
        steps: SupportsIndex | None = None,
        *,
        init_model: Callable[[], Model] | None = None,
    ) -> TrainState[Model]:
        """Trains, from the beginning or from the last checkpoint.

        Args:
            model: the model before the first step, also if there is a checkpoint. It is released
                once there is a state: if the caller does not hold it either, its memory is free.
            steps: the number of released steps, of all starts together, at which the run stops; by
                default the plan's number.
            init_model: in place of a model; `init_model()` returns it. No device and no host then
                holds a whole array that sharding rules spread (see [`Step`][]`.init`).

        Returns:
            The last state; `.model` is the trained model.

        Raises:
            ValueError: as for `step.init`; `steps` exceeds the plan's; the step breaks its policy
                or its plan; the directory's run has another plan or data-set size; the checkpoint
                does not fit the model.
            CheckpointError: no checkpoint in the directory can be read; a file of the ledger is
                missing or damaged, or cannot be written; the directory was moved or replaced;
                another start took the remaining steps.
            DataError: a source fails.
            SystemExit: after SIGTERM, with status 143, or 1 if the state could not be saved.
            KeyboardInterrupt: after Ctrl-C.
        """
        step, directory = self._step, self._directory
        most = step.plan.steps
        stop = most if steps is None else whole_number("steps", steps, least=0, most=most)
        first = FirstModel(model, init_model)
        del model
        with StopSignal(directory is not None) as signal, step._mesh(), failing_alone():
            checks = self._checks(first)
            if directory is None:
                secret = step._secret_of(next(self._runs))
                state = step._begun(step._recipe.made(first), 0, secret)
                batches = self._batches.drawn_by(step._sampler_of(secret), stop)
                return self._loop(stop, Tally(), None, signal).run(state, batches)
            with closing(Checkpoints(directory, self._keep)) as checkpoints:
                ledger = Ledger(directory, step)
                state, secret = self._begun(first, ledger, checkpoints)
                del first
                if is_first_host():
                    with going_on(f"{directory / CHECKS} cannot be written"):
                        write_json(directory / CHECKS, checks)
                left = stop - ledger.released
                if left <= 0:
                    ledger.end()  # a process that was killed may have left an old statement
                    if is_first_host():
                        finished = (
                            f"this run is finished: {ledger.released} of {stop} steps, in "
                            f"{directory}. Its last checkpoint is returned; the model, the loss "
                            "and the data that are given now are not used."
                        )
                        print(f"eqx_dp: {finished}", flush=True)
                        warnings.warn(finished, CheckpointWarning, stacklevel=2)
                    return state
                loop = self._loop(stop, ledger, checkpoints, signal)
                return loop.run(state, self._batches.drawn_by(step._sampler_of(secret), left))

    def _checks(self, first: FirstModel[Model]) -> dict[str, Any]:
        """Compares the traced step with its policy and its plan; nothing is computed.

        Raises:
            ValueError: the loss is refused, or the step breaks its policy or its plan.
        """
        step = self._step
        state = step._begun(step._recipe.form(first), 0, b"a check")
        examples, mask = step.shard_batch(self._batches.zeros())
        step.lower(state, *examples, is_padding_example=mask)
        if step.grad_fn._configuration.keep_batch_dim:  # a loss that compares rows gets a warning
            has_key, _ = takes_key(step.grad_fn.__wrapped__, 1 + len(examples))
            key = jax.random.key(0) if has_key else None
            explain(step.grad_fn, state.model, *examples, key=key)
        reports: dict[str, Any] = {"precision": None, "privacy": None}
        if (policy := step.grad_fn.policy) is not None:
            reports["precision"] = check_precision(
                step, state, *examples, is_padding_example=mask, policy=policy
            )
        if step.plan.noise_multiplier > 0:
            reports["privacy"] = check_privacy(step, state, *examples, is_padding_example=mask)
        for name, report in reports.items():
            if report is not None and report.violations:
                raise ValueError(f"This step breaks its {name} declaration.\n{report}")
            if report is not None and not report.ok:
                said = f"check_{name} cannot decide whether this step keeps to its declaration."
                warnings.warn(f"{said}\n{report}", stacklevel=3)
        return {name: report and json.loads(report.to_json()) for name, report in reports.items()}

    def _begun(
        self, first: FirstModel[Model], ledger: Ledger, checkpoints: Checkpoints
    ) -> tuple[TrainState[Model], bytes]:
        """The state to continue from, with fresh keys, and the secret that they follow from."""
        step = self._step
        secret = step._secret_of(ledger.start)
        found = restored(checkpoints, step._recipe, first)
        if found is not None:
            body, taken, record = found
            ledger.check(record)
            if is_first_host():
                print(f"eqx_dp: {self._directory} continues after step {taken}", flush=True)
            return step._begun(body, taken, secret), secret
        if ledger.released >= step.plan.steps:
            raise CheckpointError(
                f"{self._directory} holds no checkpoint, and all {step.plan.steps} steps may have "
                "been released. Restore one from a backup; or start a run in another directory."
            )
        if ledger.released:
            warnings.warn(
                f"{self._directory} holds no checkpoint: training begins with the first model. "
                f"{ledger.released} of {step.plan.steps} steps may have been released, and count.",
                CheckpointWarning,
                stacklevel=3,
            )
        return step._begun(step._recipe.made(first), 0, secret), secret
