"""check_privacy says of honest steps that they are fine, and of none that leaks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.checks.honest_steps import HONEST, UNDECIDED, with_optimizer_named
from tests.checks.leaking_noise_steps import NOISE
from tests.checks.leaking_steps import STEPS
from tests.checks.privacy_steps import cases, report_on
from tests.optimizers import AROUND, offered

LEAKING = cases([*STEPS, *NOISE])


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_step_is_fine(name):
    case = HONEST[name]()
    report = report_on(case)
    assert report.ok, str(report)
    if case.noise_multiplier is not None:
        least = min(release.noise_multiplier for release in report.releases)
        assert least == pytest.approx(case.noise_multiplier, rel=1e-3)


@pytest.mark.parametrize("make", [make for steps in UNDECIDED.values() for make in steps.values()])
def test_an_honest_step_may_be_undecided_and_is_no_violation(make):
    report = report_on(make())
    assert report.undecided, str(report)
    assert not report.violations, str(report)


@pytest.mark.parametrize("name", LEAKING)
def test_a_step_that_leaks_is_not_fine(name):
    report = report_on(LEAKING[name]())
    assert report.violations or report.undecided, str(report)
    assert not any("the check failed" in finding.found for finding in report.undecided), str(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*offered(), *AROUND}))
def test_every_optimizer_of_optax_behind_the_noise_is_fine(name):
    report = report_on(with_optimizer_named(name))
    assert report.ok, str(report)


VIOLATIONS = {
    "no_noise": "release",
    "noise_of_half_the_plan": "noise",
    "for_a_mean_on_a_sum": "noise",
    "of_another_relation": "noise",
    "one_noise_for_four_losses": "noise",
    "two_losses_with_the_noise_of_one": "noise",
    "one_batch_four_times": "noise",
    "adam_before_the_noise": "noise",
    "inner_step_without_noise": "release",
    "constant_key": "fresh noise",
    "not_advanced": "fresh noise",
    "counter_not_advanced": "fresh noise",
    "one_key_for_two_losses": "fresh noise",
    "none": "padding",
    "mean_loss_returned": "release",
    "aux_returned": "release",
    "sum_without_noise_returned": "release",
    "learning_rate_from_the_loss": "release",
    "loss_printed": "side door",
    "update_skipped_when_the_loss_is_high": "side door",
}
"""Plain misuses, and a rule that each breaks for certain."""


@pytest.mark.parametrize(("name", "rule"), VIOLATIONS.items())
def test_a_plain_misuse_is_a_violation(name, rule):
    report = report_on(LEAKING[name]())
    assert rule in {finding.rule for finding in report.violations}, str(report)


MULTIPLIERS = {
    "noise_of_half_the_plan": 0.6,
    "for_a_mean_on_a_sum": 0.24,
    "gradient_scaled_before_the_noise": 0.12,
    "one_noise_for_four_losses": 0.3,
    "two_losses_with_the_noise_of_one": 1.2 / math.sqrt(2),
    "one_batch_four_times": 0.6,
    "copied": 0.6,
}


@pytest.mark.parametrize(("name", "multiplier"), MULTIPLIERS.items())
def test_the_true_noise_multiplier_is_told(name, multiplier):
    report = report_on(LEAKING[name]())
    assert report.noise_multiplier == pytest.approx(multiplier, rel=1e-3), str(report)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": 8}, "a.b": 8, "['a']['b']": 8, "a/b": 8, "": [8]},
        {"a": 8, "b": (2, 4), "c": (8, 1)},
    ],
)
def test_leaves_have_noise_of_their_own(tree):
    zeros = jax.tree.map(jnp.zeros, tree, is_leaf=lambda x: isinstance(x, tuple))
    noises = [np.ravel(leaf) for leaf in jax.tree.leaves(dp.add_noise(zeros, jax.random.key(0), 1))]
    # Single numbers coincide, on the grid of certified noise.
    assert len({tuple(noise) for noise in noises}) == len(noises)
