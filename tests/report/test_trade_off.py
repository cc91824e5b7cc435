"""The trade-off curve: above every attack, and hardly more than the best."""

import dp_accounting
import numpy as np
import pytest
from scipy.stats import norm

import eqx_dp as dp
from eqx_dp.report.trade_off import trade_off_of

pytestmark = pytest.mark.sampled(2)

ALPHAS = np.linspace(0.0005, 0.9995, 999)


def above(curve, alphas=ALPHAS):
    return np.interp(alphas, curve.false_positives, curve.true_positives)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("relation", dp.NeighboringRelation)
def test_without_sampling_it_is_that_of_two_normal_distributions(relation):
    """n steps with noise multiplier s are as one with s / sqrt(n) (Dong et al. 2022)."""
    curve = trade_off_of(dp.PrivacyPlan(1.0, 9, 2.0, 1e-5, relation), 4)
    mu = 2 / 2.0
    best = norm.cdf(norm.ppf(ALPHAS) + mu)
    assert np.all(above(curve) >= best)
    assert np.max(above(curve) - best) < 5e-4
    assert curve.right_guesses >= norm.cdf(mu / 2) >= curve.right_guesses - 1e-4


@pytest.mark.slow
def test_with_sampling_no_likelihood_ratio_test_is_above_it():
    """One step, on whose result the best attack is a threshold: noise, or a mixture of two."""
    q, sigma = 0.4, 0.8
    curve = trade_off_of(dp.PrivacyPlan(q, 1, sigma, 1e-5), 1)
    cuts = np.linspace(-6, 6, 400)
    without = norm.sf(cuts / sigma)
    taken = (1 - q) * without + q * norm.sf((cuts - 1) / sigma)
    says_yes = above(curve, without) - taken
    says_no = above(curve, 1 - taken) - (1 - without)
    assert min(says_yes.min(), says_no.min()) >= 0
    assert says_yes[without < 0.1].max() < 1e-3  # there, no attack is stronger than this one


@pytest.mark.slow
def test_it_is_the_least_that_the_accountant_allows():
    """Every epsilon and delta bounds an attack, and none of ten times as many cuts deeper."""
    plan = dp.PrivacyPlan(0.1, 50, 1.0, 1e-5)
    curve = trade_off_of(plan, 50)
    accountant = dp_accounting.pld.PLDAccountant().compose(plan.event())
    epsilons = np.linspace(0, 1.2 * plan.epsilon(), 1000)
    deltas = np.asarray(accountant.get_delta(epsilons))[:, None]
    steep = deltas + np.exp(epsilons)[:, None] * ALPHAS
    flat = 1 - np.exp(-epsilons)[:, None] * (1 - deltas - ALPHAS)
    allowed = np.minimum(1, np.minimum(steep, flat)).min(axis=0)
    assert np.min(above(curve) - allowed) > -5e-6  # what falls between two of the thousand
    assert np.max(above(curve) - allowed) < 5e-4


@pytest.mark.parametrize("plan", [dp.PrivacyPlan(0.3, 20, 1.5, 1e-5), dp.PrivacyPlan(1, 3, 9, 0.1)])
def test_it_is_a_curve(plan):
    curve = trade_off_of(plan, plan.steps)
    x, y = curve.false_positives, curve.true_positives
    assert (x[0], x[-1], y[-1]) == (0, 1, 1)
    assert 0 < y[0] <= 1.01e-5
    assert np.all(np.diff(x) > 0)
    assert np.all(np.diff(y) >= 0)
    slopes = np.diff(y) / np.diff(x)
    assert np.all(np.diff(slopes) <= 1e-6 * (1 + slopes[1:]))  # concave
    # Those who say no where others say yes are on the curve as well.
    inside = y < 1
    np.testing.assert_allclose(np.interp(1 - y, x, y)[inside], (1 - x)[inside], atol=1e-9)


def test_it_pays_for_batches_that_overflow():
    plan = dp.PrivacyPlan(1.0, 1, 3.0, 0.5)
    assert plan.overflow_delta() > 0
    exact = norm.cdf(1 / 6)
    assert trade_off_of(plan, 1).right_guesses >= exact + plan.overflow_delta() / 2


@pytest.mark.slow
def test_its_ends():
    plan = dp.PrivacyPlan(0.5, 10, 1.0, 1e-5)
    nothing = trade_off_of(plan, 0)
    np.testing.assert_array_equal(above(nothing), ALPHAS)
    assert nothing.right_guesses == 0.5
    for noise in (0.0, 1e-4):
        everything = trade_off_of(dp.PrivacyPlan(0.5, 10, noise, 1e-5), 1)
        np.testing.assert_array_equal(above(everything), 1.0)
        assert everything.right_guesses == 1
    loud = trade_off_of(dp.PrivacyPlan(0.5, 10, 0.05, 1e-5), 10)  # epsilon is in the thousands
    assert np.all(np.isfinite(loud.true_positives))
    assert np.all(above(loud) > 0.99)
