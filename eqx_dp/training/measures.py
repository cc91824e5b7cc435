"""What is measured of a run: what its steps disclose, what an evaluation says, and epsilon."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, SupportsIndex, TypeVar

import numpy as np

from ..expected import function
from ..privacy import whole_number
from .dispatch import FlatState
from .events import EpsilonAhead, Event, checked_metrics
from .step import Step

Model = TypeVar("Model")

# Epsilon takes a tenth of a second to work out, so that it is not shown after every step.
_TIMES_SHOWN = 20


class Measures(Generic[Model]):
    """What is measured, and after which steps.

    Attributes:
        ends: numbers of steps, after every multiple of which the model is evaluated.
    """

    def __init__(
        self,
        step: Step[Model],
        evaluate: Callable[[Model], Mapping[str, Any]] | None,
        evaluate_every: SupportsIndex | None,
        progress: bool,
    ):
        if evaluate is not None:
            function("evaluate", evaluate, "evaluate(model), or None")
        often = max(1, step.plan.steps // _TIMES_SHOWN)
        every = often if evaluate_every is None else evaluate_every
        self._every = whole_number("evaluate_every", every, least=1, most=2**53)
        self._evaluate, self._disclose = evaluate, step.disclose
        self._shown_every = [often] * progress
        self.ends = [self._every] * (evaluate is not None)

    def told_after(self, done: int, stop: int) -> Iterator[int]:
        """The steps after which epsilon is shown, or told beside what is measured."""
        is_measured = self._evaluate is not None or bool(self._disclose)
        every = [*self._shown_every, *([self._every] * is_measured)]
        while True:
            found = [(done // steps + 1) * steps for steps in every] + [stop] * is_measured
            done = min((step for step in found if done < step <= stop), default=stop + 1)
            if done > stop:
                return
            yield done

    def events(
        self,
        flat: FlatState[Model],
        call: range,
        stop: int,
        seconds: float,
        epsilons: EpsilonAhead,
    ) -> Iterator[Event[Model]]:
        """What happened in a call, step by step; only the last one has a state."""
        disclosed = (flat.shown or flat.state.disclosed) if self._disclose else {}
        figures = {name: np.asarray(value).reshape(-1) for name, value in disclosed.items()}
        for index, before in enumerate(call):
            done, state = before + 1, flat if before + 1 == call.stop else None
            metrics = {name: float(values[index]) for name, values in figures.items()}
            if self._evaluate is not None and (done % self._every == 0 or done == stop):
                metrics |= checked_metrics(self._evaluate(flat.state.evaluated))
            yield Event(done, metrics, seconds, epsilons.after(done), state)
