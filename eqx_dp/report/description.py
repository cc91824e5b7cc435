"""What a report says of a run, as JSON's types: read from the run's directory, and computed."""

import datetime
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..files import finite_or_none, read_json
from ..privacy import PrivacyPlan
from ..training import CHECKS, LEDGER, METRICS, CheckpointError, entries_in, statement, versions
from .trade_off import trade_off_of

FORMAT, VERSION = "eqx_dp.report", 2
AUDIT = "audit.json"

_PRECISION, _PRECISION_VERSION = "eqx_dp.PrecisionReport", 1
# How many figures of epsilon are computed, each of which takes a tenth of a second.
_FIGURES = 14
_DEEPEST = 20


def description_of(directory: Path) -> dict[str, Any]:
    """Describes a run, for a program and for `page_of`.

    Nothing of it depends on private data, unless the run has written such data down itself: what
    its `evaluate` returned. Nothing in the directory is changed, and the run
    may be under way.

    | key | value |
    |---|---|
    | format, version | "eqx_dp.report", 2 |
    | name, made_at | of the directory; when this was written, UTC |
    | plan | as `PrivacyPlan.to_json` writes it |
    | num_examples, policy, is_unsafe | of the run |
    | starts, randomness | how often the run was started; "fresh" or "seeded" |
    | steps_released | of all starts: how many may have been seen |
    | epsilon, delta | of the steps released; epsilon is null where it is infinite |
    | epsilon_over_steps | pairs of a number of steps and epsilon, for all steps of the plan |
    | trade_off | corners of the curve, in the order of false positives; see `TradeOff` |
    | right_guesses | see `TradeOff` |
    | covers, does_not_cover | the run's own statement, in words |
    | checks | "precision" and "privacy", each what `to_json` of the report says, or null |
    | audit | "neighbours" and "canaries" of `audit.json`, or null |
    | metrics | pairs of a step and a value, by name; null for one that is not finite |
    | made_by | where the run was made, and its libraries' versions |
    | versions | those of the libraries that made the report |

    Raises:
        ValueError: there is no run; or a file in it is damaged, or of another release or run.
    """
    entries = _entries(directory)
    starts = list(entries.values())
    plan = _plan(directory, starts[-1]["plan"])
    released = min(sum(entry["steps"] for entry in starts), plan.steps)
    epsilon = plan.epsilon(released)
    said = statement(plan, entries, epsilon)
    curve = trade_off_of(plan, released)
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": directory.resolve().name,
        "made_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "plan": said["plan"],
        "num_examples": said["num_examples"],
        "policy": said["policy"],
        "is_unsafe": any(entry["unsafe"] for entry in starts),
        "starts": len(starts),
        "randomness": said["randomness"],
        "noise": said["noise"],
        "steps_released": released,
        "epsilon": finite_or_none(epsilon),
        "delta": plan.delta,
        "epsilon_over_steps": _epsilon_over_steps(plan, released),
        "trade_off": np.stack([curve.false_positives, curve.true_positives], axis=1).tolist(),
        "right_guesses": curve.right_guesses,
        "covers": said["covers"],
        "does_not_cover": said["does_not_cover"],
        "checks": _checks(directory),
        "audit": _audit(directory),
        "metrics": _metrics(directory / METRICS),
        "made_by": _plain(starts[-1]["made_by"], LEDGER),
        "versions": versions(),
    }


def _entries(directory: Path) -> dict[str, dict[str, Any]]:
    """What each start of the run has written, the newest last."""
    if not directory.is_dir():
        raise ValueError(
            f"found no folder {str(directory)!r}; allowed: the directory that a run was given, "
            "Trainer(..., directory=...)"
        )
    try:
        entries = entries_in(directory)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    if not entries:
        raise ValueError(
            f"found no run in {str(directory)!r}: it has no {LEDGER}, or no start in it has "
            "taken a step; allowed: the directory that a run was given, Trainer(..., directory=...)"
        )
    return dict(sorted(entries.items(), key=lambda item: item[1]["start"]))


def _plan(directory: Path, plan: Mapping[str, Any]) -> PrivacyPlan:
    try:
        return PrivacyPlan.from_json(json.dumps(plan))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{directory / LEDGER}: its plan cannot be read: {error}") from None


def _checks(directory: Path) -> dict[str, Any]:
    file = directory / CHECKS
    found = _read(file) if file.exists() else {}
    precision = _part(file, found, "precision")
    if precision is not None:
        says = (precision.get("format"), precision.get("version"))
        if says != (_PRECISION, _PRECISION_VERSION):
            raise ValueError(
                f"{file}: precision is {says[0]}, version {says[1]}; this release of eqx_dp reads "
                f"{_PRECISION}, version {_PRECISION_VERSION}"
            )
    return {"precision": precision, "privacy": _part(file, found, "privacy")}


def _audit(directory: Path) -> dict[str, Any] | None:
    file = directory / AUDIT
    if not file.exists():
        return None
    found = _read(file)
    return {name: _part(file, found, name) for name in ("neighbours", "canaries")}


def _part(file: Path, found: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What one check found; a ValueError unless it says whether all was well."""
    part = found.get(name)
    if part is None or (isinstance(part, dict) and isinstance(part.get("ok"), bool)):
        return cast("dict[str, Any] | None", part)
    raise ValueError(f'{file}: {name!r} must be null, or an object with "ok": true or false')


def _read(file: Path) -> dict[str, Any]:
    try:
        return _plain(read_json(file), file.name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}. Restore it from a backup.") from None


def _plain(value: Any, name: str, deepest: int = _DEEPEST) -> Any:
    """The same with texts for numbers that JSON does not know; a ValueError if it is too deep."""
    if not deepest:
        raise ValueError(f"{name} is nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {key: _plain(inner, name, deepest - 1) for key, inner in pairs}
    if isinstance(value, list):
        return [_plain(inner, name, deepest - 1) for inner in cast("list[Any]", value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _metrics(file: Path) -> dict[str, list[tuple[int, float | None]]]:
    """Figures by name; what is no line of a run's metrics is passed over, as the run does."""
    found: dict[str, list[tuple[int, float | None]]] = {}
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}. Make it readable.") from None
    for line in lines:
        try:
            figures = json.loads(line)
        except (RecursionError, ValueError):
            continue
        if not isinstance(figures, dict) or not _is_count(figures.get("step")):
            continue
        for name, value in cast("dict[str, Any]", figures).items():
            if name not in ("step", "seconds", "epsilon") and _is_figure(value):
                found.setdefault(name, []).append((figures["step"], finite_or_none(value)))
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


def _is_figure(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and abs(value) <= 1e308)


def _epsilon_over_steps(plan: PrivacyPlan, released: int) -> list[tuple[int, float | None]]:
    """Closer at the beginning, where epsilon rises fast."""
    shares = np.linspace(0, 1, _FIGURES) ** 2
    steps = sorted({released, *(round(float(share) * plan.steps) for share in shares)})
    return [(step, finite_or_none(plan.epsilon(step))) for step in steps]
