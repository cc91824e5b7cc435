"""Calibration: the least noise for a budget."""

import dataclasses
import math

import pytest

from eqx_dp import sampling
from eqx_dp.privacy import NeighboringRelation, PrivacyPlan
from eqx_dp.privacy.accounting import ROUNDING_DELTA
from eqx_dp.privacy.finite_precision import PRECISION_EPSILON

RELATIONS = list(NeighboringRelation)
README = {"epsilon": 3.0, "delta": 1e-5, "sampling_prob": 0.01, "steps": 1000}

# Epsilon, delta, sampling probability, steps, neighboring relation; and the noise multiplier that
# dp_accounting.calibrate_dp_mechanism finds by PLDAccountant at the plan's own discretization, to
# 1e-4 of it, for the delta that overflow leaves.
SEARCHED = [
    (3.0, 1e-5, 0.01, 1000, 0, 0.8136660734000987),
    (300.0, 1e-5, 1.0, 1000, 0, 1.532497398050392),
    (3.0, 1e-11, 0.9, 1, 1, 1.8752505479402921),
    (0.1973926871970626, 1.1374811737870442e-10, 2.7203057531455936e-06, 1642, 1, 0.271020573194),
    (1.8, 1.1e-10, 4.08e-05, 100000, 0, 0.6149056503730959),
    (0.01, 1e-9, 0.001, 100000, 2, 1689.3363597052967),
    (10.0, 1e-9, 1 - 2.0**-53, 100000, 0, 205.87731056484722),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", SEARCHED)
def test_noise_is_that_of_a_fine_search(row):
    epsilon, delta, sampling_prob, steps, relation, expected = row
    known = {"delta": delta, "sampling_prob": sampling_prob, "steps": steps}
    known["neighboring_relation"] = RELATIONS[relation]
    plan = PrivacyPlan.calibrate(epsilon=epsilon, **known)
    assert plan == PrivacyPlan(noise_multiplier=plan.noise_multiplier, **known)
    assert plan.epsilon() <= epsilon
    # Rounding makes epsilon jump up and down where there is little more delta than it may lose.
    jumps = delta < 1000 * steps * ROUNDING_DELTA
    tolerance = 1e-2 if jumps else 1.5e-4
    # What is charged for finite precision is not in the noise that was searched.
    charged = 2.5 * PRECISION_EPSILON / epsilon
    assert -tolerance < math.log(plan.noise_multiplier / expected) < tolerance + charged
    little = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier * (1 - tolerance))
    least = epsilon * (1 - 1e-12) - PRECISION_EPSILON
    assert little.epsilon() > (least * (1 - tolerance) if jumps else least)


@pytest.mark.slow
def test_epochs_are_steps():
    known = {"epsilon": 3.0, "delta": 1e-5, "sampling_prob": 0.7}
    assert PrivacyPlan.calibrate(epochs=21, **known).steps == 30 < 21 / 0.7  # in float64
    kinds = sampling.Poisson(0.01), sampling.Poisson(0.3), sampling.CyclicPoisson(0.5, 7)
    for kind, steps in zip((*kinds, sampling.BallsInBins(7)), (100, 4, 14, 7), strict=True):
        known = {"epsilon": 3.0, "delta": 1e-5, "sampling": kind}
        assert PrivacyPlan.calibrate(epochs=1, **known).steps == steps
        for both in ({}, {"epochs": 1, "steps": 1}):
            with pytest.raises(ValueError, match="steps must be given, or epochs"):
                PrivacyPlan.calibrate(**known, **both)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # Fewer than delta of the examples are ever drawn.
        ({"epsilon": 0.1, "delta": 0.01, "sampling_prob": 1e-3, "steps": 1}, "hardly any noise"),
        ({"epsilon": 1e7, "sampling_prob": 0.5, "steps": 3}, "hardly any noise"),
        ({"epsilon": 1e300}, "hardly any noise"),
        # What is left of delta is less than dp_accounting leaves out of its sums.
        (
            {"epsilon": 0.1, "delta": 4.5e-15, "sampling_prob": 1e-3, "steps": 10},
            "epsilon is out of reach",
        ),
        ({"epsilon": 1e-5}, "greater than 5e-05, which finite precision is charged"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        PrivacyPlan.calibrate(**README | change)
