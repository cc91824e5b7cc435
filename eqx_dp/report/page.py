"""The page of a report: sections of plain sentences, pictures and tables, in one file."""

import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..trade_off import TradeOff
from ..training import versions
from .markup import Markup, everything, facts, joined, number, shown, table, text
from .picture import Line, picture
from .run import Run, attack_on, epsilon_over_steps, read_run

MARK = 'name="generator" content="eqx_dp.report"'
"""A text that every page of a report has."""

# Of a run with many names of figures, not all.
_MOST_METRICS = 24
_FALSE_ALARMS = (0.001, 0.01, 0.05, 0.1, 0.5)
_NEIGHBORS = {
    "ADD_OR_REMOVE_ONE": ("an example is added or removed", "without it"),
    "REPLACE_ONE": ("an example is replaced by any other", "with any other in its place"),
    "REPLACE_SPECIAL": ("an example is replaced by a blank", "with a blank in its place"),
}


def page_of(directory: Path) -> str:
    """The page on the run in a directory: HTML without scripts that needs no network.

    It does not depend on private data, unless the run's `evaluate` returned such data. All names of
    the run or its user are escaped. Nothing in the directory is changed.

    Raises:
        ValueError: there is no run; or a file in it is damaged, or of another release or run.
        MissingExtra: matplotlib is not installed.
    """
    run = read_run(directory)
    attack, newest = attack_on(run), run.starts[-1]
    epsilon, delta = _rounded_up(run.epsilon), run.plan.delta
    changed, other = _NEIGHBORS[run.plan.neighboring_relation.name]
    common = {
        "epsilon": epsilon,
        "delta": number(delta),
        "one_in": f"{1 / delta:,.0f}",
        "examples": f"{newest['num_examples']:,}",
        "example": "all rows of one user" if run.plan.unit else "one row of the training data",
        "changed": changed,
        "other": other,
        "released": f"{run.released:,}",
        "planned": f"{run.plan.steps:,}",
        "starts": len(run.starts),
        "times": _rounded_up(math.exp(run.epsilon)) if run.epsilon < 50 else "e^epsilon",
        "right": _of_hundred(attack.right),
    }
    kind = "promise" if math.isfinite(run.epsilon) else "no_promise"
    return text(
        "page",
        **common,
        style=text("style"),
        name=run.name,
        lead=text(f"lead_{kind}", **common),
        grows=text(f"grows_{kind}", **common),
        warnings=joined(text("bad", words=words) for words in _warnings(run)),
        seed=text("seed") if any(x["randomness"] == "seeded" for x in run.starts) else "",
        meaning=text(f"meaning_{kind}", **common),
        attack=_attack(attack) if kind == "promise" else "",
        steps=_steps(run, common) if kind == "promise" else "",
        limits=joined(text("item", words=words) for words in run.does_not_cover),
        privacy=_checked(run.checks.get("privacy")),
        precision=_checked(run.checks.get("precision"), "The run declared no policy to check."),
        audits=joined(text("audit", name=k, found=_checked(v)) for k, v in run.audits.items())
        or _checked(None),
        metrics=joined(_metric(k, v) for k, v in [*run.metrics.items()][:_MOST_METRICS])
        or text("no_metrics"),
        plan=facts({**newest["plan"], "policy": newest["policy"]}),
        versions=facts({**versions(), **newest["made_by"]}),
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    )


def _warnings(run: Run) -> list[str]:
    """The warnings at the top."""
    said = (*run.checks.values(), *run.audits.values())
    is_bad = any(isinstance(one, dict) and one.get("ok") is False for one in said)
    is_unsafe = any(start["unsafe"] for start in run.starts)
    is_certified = all(start["noise"] == "certified" for start in run.starts)
    found = {
        "There is no promise of privacy: epsilon is infinite.": math.isinf(run.epsilon),
        "The policy is unsafe: sums may have too few digits.": is_unsafe,
        "The noise is not certified: see what the promise does not cover.": not is_certified,
        "A check or an audit found something, or could not decide: see below.": is_bad,
    }
    return [words for words, is_so in found.items() if is_so]


def _attack(attack: TradeOff) -> Markup:
    found, alarms = attack.found(_FALSE_ALARMS), np.linspace(0.0, 1.0, 1001)
    points = list(zip(alarms.tolist(), attack.found(alarms).tolist(), strict=True))
    drawn = picture(
        "Examples found, at most, over false alarms; above the line of blind guessing.",
        "false alarms: share of those not in the data",
        "found: share of those in the data",
        (Line(((0.0, 0.0), (1.0, 1.0)), "--"), Line(points)),
    )
    columns = ("False alarms, of 100 not in the data", "Found, of 100 in the data, at most")
    rows = [tuple(map(_of_hundred, pair)) for pair in zip(_FALSE_ALARMS, found, strict=True)]
    return text("attack", drawn=drawn, found=rows[1][1], table=table(columns, rows))


def _steps(run: Run, common: Mapping[str, Any]) -> Markup:
    known = epsilon_over_steps(run)
    taken = [(step, epsilon) for step, epsilon in known if step <= run.released]
    ahead = [(step, epsilon) for step, epsilon in known if step >= run.released]
    drawn = picture(
        f"Epsilon rises with the number of steps, to {common['epsilon']}.",
        "steps",
        "epsilon",
        (Line(ahead, ":"), Line(taken)),
    )
    return text("steps", **common, drawn=drawn, table=table(("Steps", "Epsilon"), known))


def _checked(found: Any, otherwise: str = "This was not done.") -> Markup:
    """The verdict of a check or an audit, and its content."""
    if not isinstance(found, dict):
        return text("not_made", words=otherwise)
    if found.get("ok") is True:
        verdict = text("good", words="Nothing was found that breaks the promise.")
    elif "ok" not in found or (found.get("undecided") and not found.get("violations")):
        verdict = text("open", words="Something could not be decided. The table says what.")
    else:
        verdict = text("bad", words="Something is not as it should be. The table says what.")
    return joined((verdict, text("details", name="All that was found", inside=everything(found))))


def _metric(name: str, points: list[tuple[int, float | None]]) -> Markup:
    step, value = points[-1]
    last = "not finite" if value is None else shown(value)
    drawn = picture(f"{name} over the steps.", "steps", "", [Line(points)], from_zero=False)
    figures = table(("Step", name), points)
    return text("metric", name=name, drawn=drawn, step=f"{step:,}", last=last, figures=figures)


def _rounded_up(bound: float) -> str:
    """A bound with four significant digits, rounded up."""
    if bound <= 0 or math.isinf(bound):
        return "infinite" if bound > 0 else "0"
    unit = 10.0 ** (math.floor(math.log10(bound)) - 3)
    return number(math.ceil(bound / unit - 1e-9) * unit)


def _of_hundred(share: float) -> str:
    """A share as so many of 100, rounded up: it is a bound."""
    digits = 1 if share >= 0.001 else 3
    return f"{math.ceil(share * 100 * 10**digits - 1e-6) / 10**digits:g}"
