"""Finds epsilon from a noise multiplier, or the noise multiplier from a budget.

For a run of Poisson samples, or of a plan of any kind in a file, by the accounting that plans use.
Shows epsilon over the steps. Nothing is trained, and no data is read.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from ..precision import refusals_name
from ..privacy import NeighboringRelation, PrivacyPlan
from ..tables import aligned

_ROWS = 10
_RELATIONS = {relation.name.lower().replace("_", "-"): relation for relation in NeighboringRelation}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--plan", type=Path, metavar="FILE", help="plan.to_json(), for all else")
    parser.add_argument("--examples", type=_count, help="in the data set")
    parser.add_argument("--batch", type=_count, help="expected examples in a step")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_real, help="passes over the data set, in expectation")
    length.add_argument("--steps", type=_count, help="steps, in place of epochs")
    aim = parser.add_mutually_exclusive_group()
    aim.add_argument("--epsilon", type=_real, help="the budget: finds the noise multiplier")
    aim.add_argument("--noise-multiplier", type=_real, help="noise / sensitivity: finds epsilon")
    parser.add_argument("--delta", type=_real, help="(default: 1 / (10 x examples))")
    parser.add_argument(
        "--relation",
        choices=[*_RELATIONS],
        default=next(iter(_RELATIONS)),
        help="how neighboring data sets differ (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _plan(arguments: argparse.Namespace) -> PrivacyPlan:
    """The plan that the arguments describe."""
    given = vars(arguments)
    needed = ("examples",), ("batch",), ("epochs", "steps"), ("epsilon", "noise_multiplier")
    if arguments.plan is not None:
        if any(given[name] for names in (*needed, ("delta",)) for name in names):
            raise ValueError("--plan: found other numbers beside it; allowed: the plan alone")
        with refusals_name(str(arguments.plan)):
            return PrivacyPlan.from_json(arguments.plan.read_text())
    for names in needed:
        if not any(given[name] for name in names):
            missing = " or ".join(f"--{name.replace('_', '-')}" for name in names)
            raise ValueError(f"{missing} is required; or a plan in a file: --plan FILE")
    examples, batch = arguments.examples, arguments.batch
    if batch > examples:
        raise ValueError(f"--batch: found {batch}; allowed: at most {examples}, the data set")
    options: dict[str, Any] = {
        "sampling_prob": batch / examples,
        "steps": arguments.steps or max(1, round(arguments.epochs * examples / batch)),
        "delta": arguments.delta or 1 / (10 * examples),
        "neighboring_relation": _RELATIONS[arguments.relation],
    }
    if arguments.epsilon is None:
        return PrivacyPlan(noise_multiplier=arguments.noise_multiplier, **options)
    return PrivacyPlan.calibrate(epsilon=arguments.epsilon, **options)


def run(arguments: argparse.Namespace) -> str:
    """The plan, and epsilon over its steps.

    Raises:
        ValueError: arguments are missing; the batch is larger than the data set; and as for
            `PrivacyPlan`.
    """
    plan = _plan(arguments)
    steps = sorted({max(1, round(plan.steps * part / _ROWS)) for part in range(1, _ROWS + 1)})
    spent = {step: plan.epsilon(step) for step in steps}
    if arguments.json:
        rows = [{"steps": step, "epsilon": epsilon} for step, epsilon in spent.items()]
        return json.dumps({"plan": json.loads(plan.to_json()), "spent": rows}, indent=2)
    attack = plan.trade_off()
    rows = [
        (f"{step:,}", f"{step * plan.sampling_prob:.3g}", f"{epsilon:.3f}")
        for step, epsilon in spent.items()
    ]
    lines = (
        *aligned([("steps", "epochs", "epsilon"), *rows]),
        "",
        f"noise multiplier {plan.noise_multiplier:.4g}: epsilon {spent[plan.steps]:.3f}, delta "
        f"{plan.delta:.3g}, after {plan.steps:,} steps",
        f"attacks guess right in at most {100 * attack.right:.1f} of 100 cases; Gaussian DP: "
        f"mu {attack.mu:.3f}, at a distance of {attack.distance:.3f}",
        f"each {'user' if plan.unit else 'example'} is in a step with probability "
        f"{plan.sampling_prob:.4g} ({type(plan.sampling).__name__} sampling); neighbors: "
        f"{plan.neighboring_relation.name.lower().replace('_', '-')}",
        f"dp.PrivacyPlan({plan.sampling_prob!r}, {plan.steps}, {plan.noise_multiplier!r}, "
        f"{plan.delta!r}, dp.NeighboringRelation.{plan.neighboring_relation.name})"
        if arguments.plan is None
        else f"dp.PrivacyPlan.from_json(pathlib.Path({str(arguments.plan)!r}).read_text())",
    )
    return "\n".join(lines)


def _count(text: str) -> int:
    """A whole number of at least 1, as an argument's type."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a whole number of at least 1")
    return int(text)


def _real(text: str) -> float:
    """A finite number above 0, as an argument's type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number greater than 0")
    return value
