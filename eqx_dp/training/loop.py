"""The loop of one start: blocks of steps that the ledger knows of, and what happens after each."""

import signal as signals
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import jax

from ..expected import RunPath
from .checkpoints import Checkpoints
from .data import MaskedBatch
from .dispatch import FlatState
from .events import Callback, EpsilonAhead, Event, JsonLines, ProgressBar, checked_metrics
from .hosts import INTERRUPTED, StopSignal
from .ledger import METRICS, Ledger
from .state import TrainState
from .step import Step

Model = TypeVar("Model")


class Options(NamedTuple):
    """What a `Trainer` was given for its loop; it says what each means."""

    save_every: int
    evaluate: Callable[[Any], Mapping[str, Any]] | None
    evaluate_every: int
    show_every: int
    callbacks: tuple[Callback, ...]
    progress: bool


class Record(NamedTuple):
    """Where a start keeps what it does.

    Attributes:
        directory: of the run.
        ledger: the steps of this start and of all others.
        checkpoints: of the run.
    """

    directory: RunPath
    ledger: Ledger
    checkpoints: Checkpoints


class Loop(Generic[Model]):
    """Takes the steps of one start.

    Args:
        step: what is taken.
        options: of the trainer.
        stop: how many released steps end the run.
        record: where it is kept; None without a directory.
        signal: what asks to stop.
    """

    def __init__(
        self,
        step: Step[Model],
        options: Options,
        stop: int,
        record: Record | None,
        signal: StopSignal,
    ):
        self._step, self._options, self._stop = step, options, stop
        self._record, self._signal = record, signal
        self._taken, self._announced = 0, 0
        self._saved_at, self._is_saved = 0, True

    @property
    def _done(self) -> int:
        """How many steps may have been released, by all starts."""
        return self._taken if self._record is None else self._record.ledger.released

    def run(self, state: TrainState[Model], batches: Generator[MaskedBatch]) -> TrainState[Model]:
        """The state after the last step; the batches are those of the steps to come."""
        step, options, plan = self._step, self._options, self._step.plan
        flat, began = FlatState.of(state), time.monotonic()
        before_last = flat.step
        with (
            closing(ProgressBar(self._done, self._stop, options.progress)) as bar,
            closing(EpsilonAhead(plan)) as epsilons,
            closing(batches),
        ):
            listeners = (bar.update, *self._listeners())
            epsilons.expect(self._end_of_block())
            epsilons.expect(self._next_shown())
            try:
                for batch in batches:
                    # While one step is under way the next is prepared, and memory stays flat.
                    jax.block_until_ready(before_last)
                    # Without rules a step takes numpy's arrays as they are, which is faster.
                    examples, mask = batch if step.sharding is None else step.place(batch)
                    if self._done >= self._stop or self._signal.asked_after(self._taken):
                        break
                    self._announce(epsilons)
                    before_last = flat.step
                    flat = step.next(flat, examples, mask)
                    self._count()
                    event = self._event(flat, time.monotonic() - began, epsilons)
                    answers = [
                        listener(event) is True for listener in listeners
                    ]  # all of them are called
                    if any(answers):
                        break
                    if self._done % options.save_every == 0:
                        self._save(jax.block_until_ready(flat.state))
                else:
                    self._signal.asked_after(self._taken)
                state = jax.block_until_ready(flat.state)
                self._save(state)
            finally:
                if self._record is not None:
                    self._is_saved &= self._record.checkpoints.wait()
                    self._record.ledger.end(epsilons.of)
        if self._record is not None and self._signal.is_asked:
            self._leave(self._record)
        return state

    def _listeners(self) -> tuple[Callback, ...]:
        if self._record is None:
            return self._options.callbacks
        return (JsonLines(self._record.directory / METRICS), *self._options.callbacks)

    def _end_of_block(self) -> int:
        """The number of released steps at which the next checkpoint is due."""
        every = self._options.save_every
        return min(self._stop, (self._done // every + 1) * every)

    def _announce(self, epsilons: EpsilonAhead) -> None:
        """Notes the next block of steps, unless the step to come is in the block that is noted."""
        if self._record is None or self._taken < self._announced:
            return
        block = self._end_of_block() - self._done
        self._record.ledger.announce(block, epsilons.of)
        self._announced = self._taken + block
        epsilons.expect(min(self._stop, self._done + block + self._options.save_every))

    def _count(self) -> None:
        self._taken += 1
        if self._record is not None:
            self._record.ledger.taken = self._taken

    def _next_shown(self) -> int:
        """The next number of steps whose epsilon is shown, or told beside an evaluation."""
        options = self._options
        every = [options.show_every] * options.progress
        every += [options.evaluate_every] * (options.evaluate is not None)
        return min([self._stop, *((self._done // number + 1) * number for number in every)])

    def _event(
        self, flat: FlatState[Model], seconds: float, epsilons: EpsilonAhead
    ) -> Event[Model]:
        done, options, epsilon = self._done, self._options, None
        metrics: dict[str, float] = {}
        is_due = done % options.evaluate_every == 0 or done == self._stop
        if options.evaluate is not None and is_due:
            metrics = checked_metrics(options.evaluate(flat.state.evaluated))
        if metrics or (options.progress and done % options.show_every == 0):
            epsilon = epsilons.of(done)
            epsilons.expect(self._next_shown())
        return Event(done, metrics, seconds, epsilon, flat)

    def _save(self, state: TrainState[Model]) -> None:
        """Saves the state, once for each number of steps."""
        if self._record is None or self._taken in (0, self._saved_at):
            return
        ledger = self._record.ledger
        self._saved_at = self._taken
        self._is_saved = self._record.checkpoints.save(ledger.released, state, ledger.record())

    def _leave(self, record: Record) -> NoReturn:
        """Ends the process, or the run, as the signal asks."""
        newest = next(iter(record.checkpoints.numbers()), None)
        saved = "no checkpoint is saved" if newest is None else f"saved at step {newest}"
        said = f"eqx_dp: {saved} of {self._step.plan.steps} in {record.directory}"
        said = f"{said}; start again to go on."
        if self._signal.asked == signals.SIGINT:
            raise KeyboardInterrupt(said)
        print(said, file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED if self._is_saved else 1)
