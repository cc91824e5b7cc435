"""`eqx-dp epsilon`: what a run costs in privacy, or how much noise a budget asks for."""

import argparse
import math

from ..privacy import NeighboringRelation, PrivacyPlan
from .command import Command, positive
from .output import Curve, Table, add_output_arguments, check_output, show
from .working import working

_ROWS = 10
_RELATIONS = {relation.name.lower().replace("_", "-"): relation for relation in NeighboringRelation}
_DEFAULT = NeighboringRelation.ADD_OR_REMOVE_ONE.name.lower().replace("_", "-")


def real(text: str) -> float:
    """A finite number above 0, as an argument's type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number greater than 0")
    return value


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", type=positive, required=True, help="in the data set")
    parser.add_argument("--batch", type=positive, required=True, help="expected examples in a step")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=real, help="passes over the data set, in expectation")
    length.add_argument("--steps", type=positive, help="steps, in place of epochs")
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--epsilon", type=real, help="the budget: finds the noise multiplier")
    aim.add_argument(
        "--noise-multiplier", type=real, help="noise / sensitivity: finds what it costs"
    )
    parser.add_argument("--delta", type=real, help="(default: 1 / (10 x examples))")
    parser.add_argument(
        "--relation",
        choices=sorted(_RELATIONS),
        default=_DEFAULT,
        help=f"how neighboring data sets differ (default: {_DEFAULT})",
    )
    add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> None:
    check_output(arguments)
    with working(2) as begin:
        begin("the plan" if arguments.epsilon is None else "the noise multiplier")
        plan = _planned(arguments)
        begin("epsilon over the steps")
        table = _table(plan, arguments)
    show(table, arguments)


def _planned(arguments: argparse.Namespace) -> PrivacyPlan:
    """The plan that the arguments describe.

    Raises:
        ValueError: the batch is larger than the data set; and as `PrivacyPlan`.
    """
    examples, batch = arguments.examples, arguments.batch
    if batch > examples:
        raise ValueError(f"--batch: found {batch}; allowed: at most {examples}, the data set")
    steps = arguments.steps or max(1, round(arguments.epochs * examples / batch))
    delta = arguments.delta or 1 / (10 * examples)
    relation = _RELATIONS[arguments.relation]
    if arguments.epsilon is None:
        return PrivacyPlan(
            batch / examples,
            steps,
            arguments.noise_multiplier,
            delta,
            neighboring_relation=relation,
        )
    return PrivacyPlan.calibrate(
        epsilon=arguments.epsilon,
        delta=delta,
        sampling_prob=batch / examples,
        steps=steps,
        neighboring_relation=relation,
    )


def _table(plan: PrivacyPlan, arguments: argparse.Namespace) -> Table:
    shown = sorted({max(1, round(plan.steps * part / _ROWS)) for part in range(1, _ROWS + 1)})
    spent = [(steps, steps * plan.sampling_prob, plan.epsilon(steps)) for steps in shown]
    rows = [(f"{steps:,}", f"{epochs:.3g}", f"{epsilon:.3f}") for steps, epochs, epsilon in spent]
    notes = [
        f"noise multiplier {plan.noise_multiplier:.4g}: epsilon {spent[-1][2]:.3f}, delta "
        f"{plan.delta:.3g}, after {plan.steps:,} steps",
        f"each of {arguments.examples:,} examples is in a step with probability "
        f"{plan.sampling_prob:.4g} (Poisson sampling); neighbors: {arguments.relation}",
        f"dp.PrivacyPlan(sampling_prob={plan.sampling_prob!r}, steps={plan.steps}, "
        f"noise_multiplier={plan.noise_multiplier!r}, delta={plan.delta!r})"
        if arguments.relation == _DEFAULT
        else "the plan as JSON, for dp.PrivacyPlan.from_json: --json",
        "for certified noise; with certified=False, true delta is, for every epsilon, at least "
        f"{plan.uncertified_delta(1):.2g}, and {plan.uncertified_delta(10**6):.2g} "
        "if a gradient is spread over a million parameters",
    ]
    data = {
        "plan": plan.to_json(),
        "noise_multiplier": plan.noise_multiplier,
        "delta": plan.delta,
        "steps": plan.steps,
        "sampling_prob": plan.sampling_prob,
        "spent": [
            {"steps": steps, "epochs": epochs, "epsilon": epsilon}
            for steps, epochs, epsilon in spent
        ],
    }
    points = [(float(steps), epsilon) for steps, _, epsilon in spent]
    curve = Curve("epsilon", "steps", [(1.0, plan.epsilon(1)), *points])
    title = f"noise multiplier {plan.noise_multiplier:.4g}"
    return Table(title, ("steps", "epochs", "epsilon"), rows, notes, data, [curve])


COMMAND = Command(
    "epsilon",
    "what a run costs in privacy",
    "Finds epsilon from a noise multiplier, or the noise multiplier from a budget, for a run of "
    "Poisson samples, by the accounting that a plan uses (privacy loss distributions). Shows what "
    "is spent over the steps. Nothing is trained, and no data is read.",
    _add_arguments,
    _run,
)
