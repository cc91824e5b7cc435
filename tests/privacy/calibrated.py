"""Noise found at the plan's own discretization alone, which is slow: what calibration must find.

python -m tests.privacy.calibrated --check     # calibrates all recorded plans
python -m tests.privacy.calibrated --record 60 # searches again, for many minutes
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from eqx_dp.privacy import NeighboringRelation, PrivacyPlan
from eqx_dp.privacy.accounting import (
    LEAST_NOISE,
    ROUNDING_DELTA,
    Run,
    discretization,
    epsilon_of,
    event_of,
)
from eqx_dp.privacy.finite_precision import PRECISION_EPSILON

RECORDED = Path(__file__).with_name("calibrated.json")
TOLERANCE = 1e-4
# epsilon, delta, sampling probability, steps, neighboring relation.
CHOSEN = [
    (3.0, 1e-5, 0.01, 1000, 0),
    (8.0, 1e-5, 512 / 1437, 300, 0),
    (3.0, 1e-5, 0.15, 300, 1),
    (0.5, 1e-6, 0.01, 2000, 2),
    (1.0, 1e-9, 0.05, 400, 0),
    (0.01, 1e-5, 1.0, 10, 0),
    (300.0, 1e-5, 1.0, 1000, 0),
    (100.0, 1e-5, 1e-2, 10**6, 0),
    (100.0, 1e-5, 0.5, 10**6, 1),
    (0.01, 1e-7, 0.5, 10**6, 0),
    (100.0, 1e-4, 1e-6, 10**6, 0),
    (1.8, 1.1e-10, 4.08e-5, 100_000, 0),
    (100.0, 1e-11, 1e-6, 100, 0),
    (0.01, 1e-11, 1e-6, 1, 1),
    (3.0, 1e-11, 0.9, 1, 1),
    (20.0, 1e-11, 0.3, 5, 1),
    (100.0, 1e-5, 0.5, 10, 1),
    (0.01, 1e-9, 1e-3, 10**5, 2),
    (10.0, 1e-9, 1 - 2.0**-53, 10**5, 0),
]


def requests(count: int) -> list[dict[str, Any]]:
    """The chosen ones, and more at random over the whole range."""
    rng, found = random.Random(7), list(CHOSEN)
    while len(found) < count:
        epsilon, delta = 10 ** rng.uniform(-2, 2), 10 ** rng.uniform(-11, -4)
        sampling_prob = 10 ** rng.uniform(-6, 0) if rng.random() < 0.9 else 1.0
        steps = round(10 ** rng.uniform(0, 6))
        if delta > 1.01 * steps * ROUNDING_DELTA:
            found.append((epsilon, delta, sampling_prob, steps, rng.randrange(3)))
    return [as_request(*values) for values in found]


def as_request(
    epsilon: float, delta: float, sampling_prob: float, steps: int, relation: int
) -> dict[str, Any]:
    return {
        "epsilon": epsilon,
        "delta": delta,
        "sampling_prob": sampling_prob,
        "steps": steps,
        "neighboring_relation": list(NeighboringRelation)[relation],
    }


def searched(request: dict[str, Any]) -> float | None:
    """The least noise by Brent's method; None where hardly any noise is enough."""
    known = {name: value for name, value in request.items() if name != "epsilon"}
    draft, budget = PrivacyPlan(noise_multiplier=1.0, **known), request["epsilon"]
    run = Run(draft.sampling_prob, draft.steps, draft.neighboring_relation)
    delta = draft.delta - draft._overflow_delta()
    enough = max(
        1.0, run.sampling_prob * math.sqrt(run.steps * 2 * math.log(1.25 / delta)) / budget
    )
    while epsilon_of(run, enough, delta) > budget:
        enough *= 2
    while epsilon_of(run, enough / 2, delta) <= budget:
        enough /= 2
        if epsilon_of(run, LEAST_NOISE, delta) <= budget:
            return None
    little = max(enough / 2, LEAST_NOISE)
    log_noise = dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(run.relation, discretization(run, little)),
        lambda log_noise: event_of(run, math.exp(log_noise)),
        budget,
        delta - run.steps * ROUNDING_DELTA,
        dp_accounting.ExplicitBracketInterval(math.log(little), math.log(enough)),
        tol=TOLERANCE,
    )
    noise_multiplier = math.exp(log_noise)
    while epsilon_of(run, noise_multiplier, delta) > budget:
        noise_multiplier *= 1 + TOLERANCE
    return noise_multiplier


def recorded() -> list[tuple[dict[str, Any], float | None]]:
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))
    return [(as_request(*values), noise_multiplier) for *values, noise_multiplier in rows]


def check(request: dict[str, Any], expected: float | None) -> None:
    """That calibration finds the noise that is expected, and keeps to the budget."""
    if expected is None:
        with pytest.raises(ValueError, match="hardly any noise"):
            PrivacyPlan.calibrate(**request)
        return
    found = PrivacyPlan.calibrate(**request)
    assert found.epsilon() <= request["epsilon"]
    # Rounding makes epsilon jump up and down where there is little more delta than it may lose.
    is_rounded = request["delta"] < 10 * request["steps"] * ROUNDING_DELTA
    difference = math.log(found.noise_multiplier / expected)
    # What is charged for finite precision is not in the recorded noise.
    charged = 2.5 * PRECISION_EPSILON / request["epsilon"]
    tolerance = 1e-2 if is_rounded else 1.5 * TOLERANCE
    assert -tolerance < difference < tolerance + charged, difference


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.privacy.calibrated")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--record", type=int, help="how many plans")
    options = parser.parse_args()
    if options.check:
        for request, expected in recorded():
            check(request, expected)
            print(request, expected)
        return
    rows = []
    for request in requests(options.record):
        values = list(request.values())
        relation = list(NeighboringRelation).index(values.pop())
        rows.append(json.dumps([*values, relation, searched(request)]))
        print(rows[-1], flush=True)
    RECORDED.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
