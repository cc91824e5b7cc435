"""What a run tells those who listen to it, after every step."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from .held import Held
from .state import TrainState

Model = TypeVar("Model")

RESERVED = ("step", "seconds", "epsilon")


@dataclasses.dataclass(frozen=True)
class Event(Generic[Model]):
    """A step was taken.

    Attributes:
        step: how many steps have been taken. If the run went on as another program, steps that may
            have been released and are lost count as well.
        metrics: figures by name, from an evaluation or disclosed. Empty after most steps.
        seconds: the time since this process began the run.
        epsilon: epsilon of the steps so far; None if it was not computed after this step.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float
    epsilon: float | None
    _held: Held[Model] = dataclasses.field(repr=False)

    @functools.cached_property
    def state(self) -> TrainState[Model]:
        """The state after the step. To read an array waits until the step is done.

        The next step uses it up: read it, or copy it, at once.
        """
        return self._held.state


Callback = Callable[[Event[Any]], bool | None]
"""Called after every step; a run ends early, and saves, where it returns True."""


def checked_metrics(found: object) -> dict[str, float]:
    """What an evaluation returned, as floats.

    Raises:
        ValueError: it is no mapping of names to real numbers, or takes a name that is taken.
    """
    if not isinstance(found, Mapping):
        raise ValueError(
            f"evaluate must return a mapping of names to numbers, as {{'accuracy': 0.9}}; found a "
            f"{type(found).__name__}."
        )
    metrics: dict[str, float] = {}
    for name, value in found.items():
        if name in RESERVED or not isinstance(name, str):
            shown = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
            raise ValueError(
                f"evaluate must return names that are strings other than {', '.join(RESERVED)}; "
                f"found {shown}."
            )
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"evaluate must return numbers; found a {type(value).__name__} for {name!r}."
            ) from None
    return metrics


def finite_or_none(value: float | None) -> float | None:
    """A number for JSON, which has none that are not finite."""
    return value if value is not None and math.isfinite(value) else None
