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
    """Whatever the search by coarse discretizations finds."""
    monkeypatch.setattr(
        calibration,
        "epsilon_at",
        lambda *args, in_stages: factor * accounting.epsilon_at(*args, in_stages=in_stages),
    )
    plan = PrivacyPlan.calibrate(epsilon=0.5, delta=1e-5, sampling_prob=0.05, steps=200)
    assert 0.4995 <= plan.epsilon() <= 0.5
    little = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / 1.0002)
    assert little.epsilon() > 0.5


EXPENSIVE = [
    README,
    {"epsilon": 100.0, "delta": 1e-5, "sampling_prob": 0.5, "steps": 10**6},
    {"epsilon": 20.0, "delta": 1e-11, "sampling_prob": 0.3, "steps": 5},
]


@pytest.mark.parametrize(
    "request_",
    [README, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in EXPENSIVE[1:])],
)
def test_little_is_accounted_for_finely(request_, monkeypatch):
    """The plan's own discretization once or twice, and no other that is nearly as fine."""
    fine, rough = [], []

    def epsilon_of(*args):
        fine.append(args)
        return accounting.epsilon_of(*args)

    def epsilon_at(run, noise_multiplier, left, interval, in_stages):
        rough.append(interval / accounting.discretization(run, noise_multiplier))
        return accounting.epsilon_at(run, noise_multiplier, left, interval, in_stages=in_stages)

    monkeypatch.setattr(calibration, "epsilon_of", epsilon_of)
    monkeypatch.setattr(calibration, "epsilon_at", epsilon_at)
    PrivacyPlan.calibrate(**request_)
    assert len(fine) <= 2
    assert sum(1 / factor for factor in rough) < 2
    assert min(rough) > 1


SHAPES = {
    "smooth": lambda noise: 3 / noise,
    "flat": lambda noise: 3 / math.sqrt(noise),
    "a jump": lambda noise: 10.0 if noise < 5 else 0.1,
    "nothing left": lambda noise: max(0.0, 3 / noise - 0.999999) * 1e5,
    "infinite": lambda noise: math.inf if noise < 7 else 1 / noise,
}


@pytest.mark.parametrize("start", [-5.0, 0.0, 1.0, 20.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_search_ends_close_to_the_budget_and_within_it(shape, start):
    seen = []

    def epsilon_at(noise_multiplier):
        seen.append(noise_multiplier)
        return SHAPES[shape](noise_multiplier)

    start_at = calibration._Point(start, -1.0)
    found = calibration._searched(epsilon_at, 1.0, start_at, 1e-4, is_last=True).noise_multiplier
    assert found in seen
    assert SHAPES[shape](found) <= 1 < SHAPES[shape](found / 1.00011)
    assert len(seen) < 60


@pytest.mark.parametrize("start", [-1.0, 1.0986, 4.0])
def test_a_search_ends_where_epsilon_jumps_up_and_down(start):
    def epsilon_at(noise_multiplier):
        return 3 / noise_multiplier * (1 + 0.01 * math.sin(1e6 * noise_multiplier))

    start_at = calibration._Point(start, -1.0)
    found = calibration._searched(epsilon_at, 1.0, start_at, 5e-3, is_last=True).noise_multiplier
    assert epsilon_at(found) <= 1
    assert found == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize(
    ("before", "last", "following"),
    [(0.0, 0.0, 0.0), (0.0, 0.1, 0.0), (0.8, 0.1, 0.0125), (-1.0, -0.5, -0.25), (0.1, 0.2, 0.2)],
)
def test_changes_shrink_by_one_factor(before, last, following):
    assert calibration._next_change(before, last) == pytest.approx(following)
