"""Calibration: the least noise for a budget, and how much it accounts for to find it."""

import dataclasses
import math

import pytest

from eqx_dp.privacy import NeighboringRelation, PrivacyPlan, accounting, calibration
from tests.privacy import calibrated

REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
README = {"epsilon": 3.0, "delta": 1e-5, "sampling_prob": 0.01, "steps": 1000}


# One of three stands for all, and one of eighteen in short; `calibrated --check` goes through all.
RECORDED = calibrated.recorded()[::3]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        *RECORDED[::6],
        *(
            pytest.param(*one, marks=pytest.mark.exhaustive)
            for i, one in enumerate(RECORDED)
            if i % 6
        ),
    ],
)
def test_noise_is_that_of_a_fine_search(request_, expected):
    calibrated.check(request_, expected)


def test_the_rest_of_the_plan_is_what_was_asked_for():
    plan = PrivacyPlan.calibrate(**README | {"neighboring_relation": REPLACE_SPECIAL})
    expected = PrivacyPlan(0.01, 1000, plan.noise_multiplier, 1e-5, REPLACE_SPECIAL)
    assert plan == expected


# Refusals.


@pytest.mark.parametrize(
    "request_",
    [
        # Fewer than delta of the examples are ever drawn.
        {"epsilon": 0.1, "delta": 0.01, "sampling_prob": 1e-3, "steps": 1},
        {"epsilon": 1e7, "delta": 1e-5, "sampling_prob": 0.5, "steps": 3},
        {"epsilon": 1e300, "delta": 1e-5, "sampling_prob": 0.01, "steps": 100},
    ],
)
def test_budget_that_protects_no_one_is_refused(request_):
    with pytest.raises(ValueError, match="hardly any noise"):
        PrivacyPlan.calibrate(**request_)


def test_budget_out_of_reach_is_refused():
    # What is left of delta is less than dp_accounting leaves out of its sums.
    with pytest.raises(ValueError, match=r"epsilon 0\.1 is out of reach"):
        PrivacyPlan.calibrate(epsilon=0.1, delta=4.5e-15, sampling_prob=1e-3, steps=10)


# The way to it.


@pytest.mark.parametrize("factor", [0.5, 0.9995, 1.0005, 2.0])
def test_the_plans_word_counts(factor, monkeypatch):
    """Whatever the search by a coarse discretization finds."""
    monkeypatch.setattr(
        calibration, "epsilon_at", lambda *args: factor * accounting.epsilon_at(*args)
    )
    plan = PrivacyPlan.calibrate(epsilon=0.5, delta=1e-5, sampling_prob=0.05, steps=200)
    assert 0.4995 <= plan.epsilon() <= 0.5
    little = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / 1.0002)
    assert little.epsilon() > 0.5


def test_little_is_accounted_for_finely(monkeypatch):
    """The plan's own discretization takes most of the time."""
    fine = []

    def epsilon_of(*args):
        fine.append(args)
        return accounting.epsilon_of(*args)

    monkeypatch.setattr(calibration, "epsilon_of", epsilon_of)
    PrivacyPlan.calibrate(**README)
    assert len(set(fine)) <= 6


SHAPES = {
    "smooth": lambda noise: 3 / noise,
    "flat": lambda noise: 3 / math.sqrt(noise),
    "a jump": lambda noise: 10.0 if noise < 5 else 0.1,
    "nothing left": lambda noise: max(0.0, 3 / noise - 0.999999) * 1e5,
    "infinite": lambda noise: math.inf if noise < 7 else 1 / noise,
    "up and down": lambda noise: 3 / noise * (1 + 1e-5 * math.sin(1e6 * noise)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("roughly", [0.5, 0.9, 1.0, 5.0])
def test_a_search_ends_close_to_the_budget_and_within_it(shape, roughly, monkeypatch):
    of_noise = SHAPES[shape]
    monkeypatch.setattr(
        calibration, "epsilon_at", lambda run, noise, left, interval: roughly * of_noise(noise)
    )
    monkeypatch.setattr(calibration, "epsilon_of", lambda run, noise, delta: of_noise(noise))
    run = accounting.Run(0.01, 100, NeighboringRelation.ADD_OR_REMOVE_ONE)
    found = calibration.least_noise(run, 1e-5, 1.0)
    assert of_noise(found) <= 1 < of_noise(found / 1.0003)
