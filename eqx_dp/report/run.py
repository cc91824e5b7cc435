"""Reads a run's directory."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from ..audit.record import AUDIT
from ..files import read_json
from ..privacy import PrivacyPlan, epsilon_beyond
from ..trade_off import TradeOff
from ..training import CHECKS, METRICS, CheckpointError, entries_in, statement

# The number of epsilons that are computed, a tenth of a second each.
_FIGURES = 12
# In metrics, null stands for a number that is not finite.
_FIGURE, _LARGEST = (int, float, type(None)), 1e100


class Run(NamedTuple):
    """A run, finished or not.

    Attributes:
        name: of the directory.
        plan: of the run.
        starts: what each start wrote in the ledger, the newest last.
        released: how many steps may have been seen, of all starts.
        epsilon: of these steps; infinite without a promise.
        does_not_cover: the run's own statement, in words.
        checks: the reports of the checks, by name.
        audits: the reports of audits, by name.
        metrics: pairs of a step and a figure, by name; None for one that is not finite.
    """

    name: str
    plan: PrivacyPlan
    starts: list[dict[str, Any]]
    released: int
    epsilon: float
    does_not_cover: list[str]
    checks: dict[str, Any]
    audits: dict[str, Any]
    metrics: dict[str, list[tuple[int, float | None]]]


def read_run(directory: Path) -> Run:
    """Reads what a run wrote; nothing in the directory is changed.

    Nothing of it depends on private data, unless the run's `evaluate` returned such data.

    Raises:
        ValueError: there is no run; or a file in it is damaged, or of another release or run.
    """
    try:
        entries = entries_in(directory)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    if not entries:
        raise ValueError(
            f"found no run with a step in {str(directory)!r}; give the directory that a run was "
            "given, Trainer(..., directory=...)"
        )
    starts = sorted(entries.values(), key=lambda entry: entry["start"])
    plan = PrivacyPlan.from_json(json.dumps(starts[-1]["plan"]))
    said = statement(plan, entries)
    audits = _read(directory / AUDIT)
    attacks = audits.pop("canaries", {})
    if not isinstance(attacks, dict):
        raise ValueError(f"{directory / AUDIT} must hold an object at 'canaries'.")
    audits |= {f"canaries, {name}": found for name, found in attacks.items()}
    return Run(
        directory.resolve().name,
        plan,
        starts,
        said["steps_released"],
        float(said["epsilon"]),
        said["does_not_cover"],
        _read(directory / CHECKS),
        audits,
        _metrics(directory / METRICS),
    )


def epsilon_over_steps(run: Run) -> list[tuple[int, float]]:
    """Epsilon after some numbers of steps; denser at the beginning, where it rises fast."""
    shares = np.linspace(0, 1, _FIGURES) ** 2
    steps = sorted({run.released, *(round(float(share) * run.plan.steps) for share in shares)})
    return [(step, epsilon_beyond(run.plan, step)) for step in steps]


def attack_on(run: Run) -> TradeOff:
    """What an attack on all that was released finds out, at most."""

    def epsilon(delta: float) -> float:
        plan = dataclasses.replace(run.plan, delta=delta)
        return epsilon_beyond(plan, run.released) if math.isfinite(run.epsilon) else math.inf

    return TradeOff.of(epsilon, run.plan.delta)


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json(file) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}. Restore it from a backup.") from None


def _metrics(file: Path) -> dict[str, list[tuple[int, float | None]]]:
    """Figures by name; lines that are none of a run's metrics are passed over, as the run does."""
    found: dict[str, list[tuple[int, float | None]]] = {}
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            figures = json.loads(line)
        except (RecursionError, ValueError):
            continue
        step: Any = figures.get("step") if isinstance(figures, dict) else None
        if type(step) is not int or not 0 <= step < 2**53:
            continue
        for name, value in cast("dict[str, Any]", figures).items():
            if name not in ("step", "seconds", "epsilon") and type(value) in _FIGURE:
                is_finite = value is not None and abs(value) < _LARGEST
                found.setdefault(name, []).append((step, value if is_finite else None))
    return found
