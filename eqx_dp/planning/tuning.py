"""What was measured to choose a method and a microbatch, as a table that can be kept."""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx

from ..expected import expect
from ..gradients import ClippedGrad, checked_grad_fn
from ..shown import shown
from ..tables import Part, tabular
from ..timing import Spread
from .memory import told

_Result = TypeVar("_Result")
_FORMAT, _VERSION = "eqx_dp.tuning", 1


class Trial(NamedTuple):
    """One method with one microbatch, as it was tried.

    Attributes:
        method: the method.
        microbatch_size: how many examples at once on a device.
        seconds: quartiles, over the rounds, of the expected time of a call; None if it was not
            timed.
        bytes: what the compiled program takes of a device, the temporary part of it last; None if
            it was not compiled, or the compiler does not say.
        compile_seconds: how long it took to trace and compile; None if it was not compiled.
        problem: why it was not timed; empty if it was.
    """

    method: str
    microbatch_size: int
    seconds: Spread | None = None
    bytes: tuple[int, int] | None = None
    compile_seconds: float | None = None
    problem: str = ""


@tabular
class Tuning(NamedTuple):
    """A choice and what it rests on; `str()` is a table.

    Attributes:
        method: the method that was chosen.
        microbatch_size: how many examples at once on a device.
        own: what the function does that was tuned: `"auto"`'s choice, for instance.
        trials: all that was tried.
        measured_for: by name, in words or as digests: what the choice depends on.
    """

    method: str
    microbatch_size: int
    own: tuple[str, int]
    trials: tuple[Trial, ...]
    measured_for: tuple[tuple[str, str], ...]

    def apply(self, grad_fn: ClippedGrad[_Result]) -> "TunedGrad[_Result]":
        """A function fixed to this choice; whether it was measured for that is not compared.

        Args:
            grad_fn: what `filter_clipped_grad` returned.

        Raises:
            ValueError: `grad_fn` is something else, or the method is unknown.
        """
        return TunedGrad.of(checked_grad_fn(grad_fn), self)

    def stale(self, now: tuple[tuple[str, str], ...]) -> list[str]:
        """In what it was measured for something else, a line each.

        Args:
            now: what a choice is wanted for, as in `measured_for`.
        """
        then, names = dict(self.measured_for), dict((*self.measured_for, *now))
        return [
            f"{name}: {then.get(name, 'nothing')} there, {dict(now).get(name, 'nothing')} here"
            for name in names
            if then.get(name) != dict(now).get(name)
        ]

    def to_json(self) -> str:
        """Writes it as JSON; `from_json` reads the same from it."""
        fields = self._asdict() | {
            "trials": [trial._asdict() for trial in self.trials],
            "measured_for": dict(self.measured_for),
        }
        return json.dumps({"format": _FORMAT, "version": _VERSION} | fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Tuning":
        """Reads what `to_json` wrote.

        Args:
            text: JSON.

        Raises:
            ValueError: it is something else, or of another version.
        """
        expect("text", text, str, "the JSON that to_json wrote")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"a tuning must be JSON, as to_json writes it. {_ADVICE}") from None
        if not isinstance(found, dict):
            raise ValueError(f"a tuning in JSON must be an object. {_ADVICE}")
        fields = cast("dict[str, Any]", found)
        kind = fields.pop("format", None), fields.pop("version", None)
        if kind != (_FORMAT, _VERSION):
            raise ValueError(
                f'a tuning in JSON must say "format": "{_FORMAT}", "version": {_VERSION}; found '
                f"{shown(kind)}. {_ADVICE}"
            )
        try:
            return _read(**fields)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"a tuning in JSON is damaged: {error}. {_ADVICE}") from None

    def _parts(self) -> Iterator[Part]:
        best = min((x.seconds.median for x in self.trials if x.seconds), default=math.nan)
        head = ("", "method", "microbatch", "ms", "quartiles", "of the best", "temporary")
        rows = sorted(self.trials, key=lambda x: x.seconds.median if x.seconds else math.inf)
        lines = [(*head, "compiled in"), *(self._cells(row, best) for row in rows)]
        chosen = f"{self.method}, {self.microbatch_size} examples at once on a device"
        yield lines
        yield f"chosen: {chosen}"

    def _cells(self, trial: Trial, best: float) -> tuple[str, ...]:
        name = trial.method, trial.microbatch_size
        is_chosen = name == (self.method, self.microbatch_size)
        mark = f"{'*' if is_chosen else ''}{'(own)' if name == self.own else ''}"
        named = mark, trial.method, str(trial.microbatch_size)
        if trial.seconds is None:
            return (*named, "-", trial.problem, "", "", "")
        low, median, high = trial.seconds
        return (
            *named,
            f"{1e3 * median:.3g}",
            f"{1e3 * low:.3g} to {1e3 * high:.3g}",
            f"{median / best:.2f} x" if best else "",
            "-" if trial.bytes is None else told(trial.bytes[1]),
            "-" if trial.compile_seconds is None else f"{trial.compile_seconds:.1f} s",
        )


_ADVICE = "Measure again, without the file."


def _read(method: Any, microbatch_size: Any, own: Any, trials: Any, measured_for: Any) -> Tuning:
    """A tuning from JSON's types; an error says what is wrong."""
    its_own_method, its_own_size = own
    return Tuning(
        _text(method),
        _size(microbatch_size),
        (_text(its_own_method), _size(its_own_size)),
        tuple(_trial(**trial) for trial in trials),
        tuple((_text(name), _text(value)) for name, value in measured_for.items()),
    )


def _trial(
    method: Any, microbatch_size: Any, seconds: Any, bytes: Any, compile_seconds: Any, problem: Any
) -> Trial:
    return Trial(
        _text(method),
        _size(microbatch_size),
        None if seconds is None else Spread(*map(_seconds, seconds)),
        None if bytes is None else (_size(bytes[0], 0), _size(bytes[1], 0)),
        None if compile_seconds is None else _seconds(compile_seconds),
        _text(problem),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text")
    return value


def _size(value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{shown(value)} is no whole number of at least {least}")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{shown(value)} is no number of seconds")
    return float(value)


class TunedGrad(ClippedGrad[_Result]):
    """A clipped gradient that is fixed to a method and a microbatch, which `tune` chose.

    Attributes:
        tuning: what was measured; `str()` is a table, and `to_json()` keeps it.
    """

    tuning: Tuning = eqx.field(static=True, kw_only=True)

    @classmethod
    def of(cls, grad_fn: ClippedGrad[Any], tuning: Tuning) -> "TunedGrad[Any]":
        """The same function, which returns what it returned, by the choice.

        Args:
            grad_fn: the function.
            tuning: the choice.
        """
        fixed = grad_fn.with_choice(tuning.method, tuning.microbatch_size)
        return cls(
            fixed._fun,
            fixed._filter_spec,
            fixed._configuration,
            fixed._finish,
            fixed._sampling,
            tuning=tuning,
        )
