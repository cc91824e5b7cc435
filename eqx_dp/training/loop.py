"""The loop of one start: blocks of steps that the ledger knows of, and what happens after each."""
# pyright: reportPrivateUsage=false
# (a step keeps for a Trainer what is of no use to users)

import signal as signals
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import jax

from .checkpoints import Checkpoints
from .data import MaskedBatch
from .dispatch import FlatState
from .events import Callback, EpsilonAhead, Event, ProgressBar, checked_metrics
from .hosts import INTERRUPTED, StopSignal
from .ledger import Tally
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


class Loop(Generic[Model]):
    """Takes the steps of one start.

    Args:
        step: what is taken.
        options: of the trainer.
        stop: how many released steps end the run.
        tally: counts the steps; with a directory, its ledger.
        checkpoints: where states are saved; None without a directory.
        signal: what asks to stop.
    """

    def __init__(
        self,
        step: Step[Model],
        options: Options,
        stop: int,
        tally: Tally,
        checkpoints: Checkpoints | None,
        signal: StopSignal,
    ):
        self._step, self._options, self._stop = step, options, stop
        self._tally, self._checkpoints, self._signal = tally, checkpoints, signal
        self._announced, self._saved_at, self._is_saved = 0, 0, True

    @property
    def _done(self) -> int:
        """How many steps may have been released, by all starts."""
        return self._tally.released

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
            listeners = (bar.update, *options.callbacks)
            epsilons.expect(self._end_of_block())
            epsilons.expect(self._next_shown())
            try:
                for batch in batches:
                    # While one step is under way the next is prepared, and memory stays flat.
                    jax.block_until_ready(before_last)
                    # Without rules a step takes numpy's arrays as they are, which is faster.
                    examples, mask = batch if step.sharding is None else step.shard_batch(batch)
                    if self._done >= self._stop or self._signal.asked_after(self._tally.taken):
                        break
                    self._announce(epsilons)
                    before_last = flat.step
                    flat = step._next(flat, examples, mask)
                    self._tally.taken += 1
                    event = self._event(flat, time.monotonic() - began, epsilons)
                    answers = [listener(event) for listener in listeners]
                    if any(answer is True for answer in answers):
                        break
                    if self._done % options.save_every == 0:
                        self._save(jax.block_until_ready(flat.state))
                else:
                    self._signal.asked_after(self._tally.taken)
                state = jax.block_until_ready(flat.state)
                self._save(state)
            finally:
                if self._checkpoints is not None:
                    self._is_saved &= self._checkpoints.wait()
                if jax.process_count() == 1 or sys.exc_info()[0] is None:
                    self._tally.end(epsilons.of)  # else other hosts may have taken more steps
        if self._checkpoints is not None and (self._signal.is_asked or self._signal.asked):
            self._leave(self._checkpoints)
        return state

    def _end_of_block(self) -> int:
        """The number of released steps at which the next checkpoint is due."""
        every = self._options.save_every
        return min(self._stop, (self._done // every + 1) * every)

    def _announce(self, epsilons: EpsilonAhead) -> None:
        """Notes the next block of steps, unless the step to come is in the block that is noted."""
        if self._tally.taken < self._announced:
            return
        block = self._end_of_block() - self._done
        self._tally.announce(block, epsilons.of)
        self._announced = self._tally.taken + block
        epsilons.expect(min(self._stop, self._done + block + self._options.save_every))

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
            state = flat.state
            model = state.model if state.opt_state.average is None else state.averaged
            metrics = checked_metrics(options.evaluate(model))
        if metrics or (options.progress and done % options.show_every == 0):
            epsilon = epsilons.of(done)
            epsilons.expect(self._next_shown())
        return Event(done, metrics, seconds, epsilon, flat)

    def _save(self, state: TrainState[Model]) -> None:
        """Saves the state, once for each number of steps."""
        tally = self._tally
        if self._checkpoints is None or tally.taken in (0, self._saved_at):
            return
        self._saved_at = tally.taken
        self._is_saved = self._checkpoints.save(tally.released, state, tally.record())

    def _leave(self, checkpoints: Checkpoints) -> NoReturn:
        """Ends the process, or the run, as the signal asks."""
        newest = next(iter(checkpoints.numbers()), None)
        saved = "nothing is saved" if newest is None else f"saved at step {newest}"
        where = f"of {self._step.plan.steps} in {checkpoints.directory}"
        message = f"eqx_dp: {saved} {where}; start again to go on."
        if self._signal.asked == signals.SIGINT:
            raise KeyboardInterrupt(message)
        print(message, file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED if self._is_saved else 1)
