"""The loop of one start: blocks of steps that the ledger counts, and what follows each step."""
# pyright: reportPrivateUsage=false
# (a step keeps for a Trainer what is of no use to users)

import dataclasses
import signal as signals
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, Generic, NoReturn, TypeVar

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


@dataclasses.dataclass
class Loop(Generic[Model]):
    """Takes the steps of one start. Attributes that are not listed are those of a `Trainer`.

    Attributes:
        step: the step to take.
        show_every: steps after which epsilon is shown.
        stop: how many released steps end the run.
        tally: counts the steps; with a directory, its ledger.
        checkpoints: where states are saved; None without a directory.
        signal: says when to stop.
        announced: how many steps of this start the ledger counts.
        saved_at: how many steps it had taken at the last save.
        is_saved: whether that save succeeded.
    """

    step: Step[Model]
    save_every: int
    evaluate: Callable[[Any], Mapping[str, Any]] | None
    evaluate_every: int
    show_every: int
    callbacks: tuple[Callback, ...]
    progress: bool
    stop: int
    tally: Tally
    checkpoints: Checkpoints | None
    signal: StopSignal
    announced: int = 0
    saved_at: int = 0
    is_saved: bool = True

    def run(self, state: TrainState[Model], batches: Generator[MaskedBatch]) -> TrainState[Model]:
        """The state after the last step; the batches are those of the steps to come."""
        step, tally = self.step, self.tally
        flat, began = FlatState.of(state), time.monotonic()
        before_last, is_spread = flat.step, step.grad_fn.sharding is not None
        every = (self.save_every, self.show_every, self.evaluate_every)
        with (
            closing(ProgressBar(tally.released, self.stop, self.progress)) as bar,
            closing(EpsilonAhead(step.plan, self.stop, every)) as epsilons,
            closing(batches),
        ):
            listeners = (bar.update, *self.callbacks)
            try:
                for batch in batches:
                    # While one step is under way the next is prepared, and memory stays flat.
                    jax.block_until_ready(before_last)
                    # Without rules a step takes numpy's arrays as they are, which is faster.
                    examples, mask = step.shard_batch(batch) if is_spread else batch
                    if tally.released >= self.stop or self.signal.asked_after(tally.taken):
                        break
                    self._announce(epsilons)
                    if tally.taken == 0:  # an error in it shows before a step is spent
                        self._evaluation(flat)
                    before_last = flat.step
                    flat = step._next(flat, examples, mask)
                    tally.taken += 1
                    event = self._event(flat, time.monotonic() - began, epsilons)
                    if True in [listener(event) for listener in listeners]:
                        break
                    if tally.released % self.save_every == 0:
                        self._save(jax.block_until_ready(flat.state))
                else:
                    self.signal.asked_after(tally.taken)
                state = jax.block_until_ready(flat.state)
                self._save(state)
            finally:
                if self.checkpoints is not None:
                    self.is_saved &= self.checkpoints.wait()
                if jax.process_count() == 1 or sys.exc_info()[0] is None:
                    # Otherwise other hosts may have taken more steps. A signal leaves little time.
                    tally.end(epsilons.of if self.signal.is_asked else None)
        if self.checkpoints is not None and (self.signal.is_asked or self.signal.asked):
            self._leave(self.checkpoints)
        return state

    def _announce(self, epsilons: EpsilonAhead) -> None:
        """Records the block of steps up to the next checkpoint, before the first of them."""
        if self.tally.taken == self.announced:
            done, every = self.tally.released, self.save_every
            block = min(self.stop, (done // every + 1) * every) - done
            self.tally.announce(block, epsilons.of)
            self.announced += block

    def _event(self, flat: FlatState[Model], seconds: float, epsilons: EpsilonAhead) -> Event:
        done, epsilon = self.tally.released, None
        is_due = done % self.evaluate_every == 0 or done == self.stop
        is_shown = done % self.show_every == 0
        metrics = self._evaluation(flat) if is_due else {}
        if is_due or is_shown:  # whether or not this host evaluates or shows it
            self.tally.look()
        done = self.tally.seen + self.tally.taken
        if metrics or (self.progress and is_shown):
            epsilon = epsilons.of(done)
        return Event(done, metrics, seconds, epsilon, flat)

    def _evaluation(self, flat: FlatState[Model]) -> dict[str, float]:
        if self.evaluate is None:
            return {}
        state = flat.state
        model = state.model if state.opt_state.average is None else state.averaged
        return checked_metrics(self.evaluate(model))

    def _save(self, state: TrainState[Model]) -> None:
        """Saves the state, once for each number of steps."""
        if self.checkpoints is None or self.tally.taken in (0, self.saved_at):
            return
        self.saved_at = self.tally.taken
        self.is_saved = self.checkpoints.save(self.tally.released, state, self.tally.record())

    def _leave(self, checkpoints: Checkpoints) -> NoReturn:
        """Ends the process or the run, as the signal requires."""
        newest = next(iter(checkpoints.numbers()), None)
        saved = "nothing is saved" if newest is None else f"saved at step {newest}"
        steps, where = self.step.plan.steps, checkpoints.directory
        message = f"eqx_dp: {saved} of {steps} in {where}; start again to go on."
        if self.signal.asked == signals.SIGINT:
            raise KeyboardInterrupt(message)
        print(message, file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED if self.is_saved else 1)
