"""Epsilon by Monte Carlo, against exact values and the samples of jax_privacy."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from scipy import optimize, stats

import eqx_dp as dp
from eqx_dp.privacy import monte_carlo
from tests.tiers import curated

BINS, APART = dp.sampling.BallsInBins, dp.sampling.MinSeparation


def of_gaussian(moved, delta):
    """Epsilon of one Gaussian mechanism that moves by so many standard deviations."""

    def excess(epsilon):
        above, below = moved / 2 - epsilon / moved, -moved / 2 - epsilon / moved
        return stats.norm.cdf(above) - math.exp(epsilon) * stats.norm.cdf(below) - delta

    return optimize.brentq(excess, 0, 100)


@pytest.mark.parametrize(("noise", "delta"), curated([(1.0, 1e-2), (4.0, 3e-4)], [(1.0, 1e-2)]))
@pytest.mark.parametrize("column", [(1,), (1, 0.5)])
def test_one_bin_is_a_gaussian(column, noise, delta):
    """Where an example is removed, and where it is added: the larger epsilon hides the other."""
    moved = np.linalg.norm(np.convolve(np.ones(7), column)[:7]) / noise
    draw, width = monte_carlo._losses(BINS(1), np.array(column) / noise, 7)
    for is_removed in (True, False):
        found = monte_carlo._bound(draw, width, is_removed, int(1000 / delta), delta, 1e-6)
        assert 1 <= found / of_gaussian(moved, delta) < 1.1


def test_two_directions_share_the_probability_of_failure():
    draw, width = monte_carlo._losses(BINS(2), np.ones(1), 4)
    bounds = [monte_carlo._bound(draw, width, x, 10**5, 0.01, 0.005) for x in (True, False)]
    assert monte_carlo.epsilon(BINS(2), (1.0,), 4, 1.0, 0.01, confidence=0.99) == max(bounds)


def in_the_plane(modes, noise, delta):
    """Epsilon of two modes, as likely: an integral over the plane that they span."""
    x, step = np.linspace(-9, 9, 901, retstep=True)
    weight = np.outer(stats.norm.pdf(x), stats.norm.pdf(x)) * step**2
    plane = np.linalg.qr(modes.T)[1].T / noise
    points = np.stack(np.meshgrid(x, x, indexing="ij"), -1)

    def loss(y):
        return np.log(np.mean([np.exp(y @ m - m @ m / 2) for m in plane], axis=0))

    removed, added = [loss(points + m) for m in plane], [-loss(points)]

    def excess(epsilon, losses):
        return (
            np.mean([np.sum(weight * -np.expm1(np.minimum(epsilon - x, 0))) for x in losses])
            - delta
        )

    return max(optimize.brentq(excess, 0, 60, (losses,)) for losses in (removed, added))


@pytest.mark.parametrize(
    ("column", "steps", "noise", "delta"),
    [
        ((1.0,), 2, 0.6, 5e-4),
        pytest.param((1.0,), 6, 2.0, 1e-3, marks=pytest.mark.slow),
        ((1.0, 0.5), 3, 1.0, 5e-4),
        pytest.param((1, 0.3, 0.2), 6, 3.0, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_two_bins_by_an_integral(column, steps, noise, delta):
    strategy = sum(np.eye(steps, k=-i) * entry for i, entry in enumerate(column))
    modes = np.stack([strategy @ (np.arange(steps) % 2 == i) for i in (0, 1)])
    noise_of_plan = dp.Banded(strategy=column)
    plan = dp.PrivacyPlan(None, steps, noise, delta, sampling=BINS(2), noise=noise_of_plan)
    is_exact, truth = len(column) == 1, in_the_plane(modes, noise, delta)
    assert plan.accounting_confidence == (1 if is_exact else monte_carlo.CONFIDENCE)
    assert 1 <= plan.epsilon() / truth < (1.005 if is_exact else 1.1)
    alone = dp.compose(plan, delta=delta).epsilon()  # without samples
    assert 1 <= alone / truth < (1.005 if is_exact else 1.2)


@pytest.mark.parametrize("noise", [dp.Banded(strategy=(1.0, 0.5, 0.3)), dp.Banded.bisr(3)])
@pytest.mark.parametrize(("cycle", "steps"), curated([(8, 8), (9, 40), (4, 30)], [(9, 40)]))
def test_the_distribution_for_bins_is_above_samples(noise, cycle, steps):
    plan = dp.PrivacyPlan(None, steps, 3.0, 0.01, sampling=BINS(cycle), noise=noise)
    found, count = dp.compose(plan, delta=0.01).epsilon(), 200_000
    column = np.array(plan.mechanism().column()) / 3.0
    draw, _ = monte_carlo._losses(BINS(cycle), column, steps)
    for is_removed in (True, False):
        losses = draw(np.random.default_rng(1), count, is_removed)
        deltas = [-np.expm1(np.minimum(found * x - losses, 0)) for x in (1.0, 0.65)]
        error = 4 * np.std(deltas, axis=1) / math.sqrt(count)
        assert np.mean(deltas[0]) - error[0] <= 0.01
        assert is_removed <= (np.mean(deltas[1]) - error[1] > 0.01)


def test_separations_at_the_edge():
    poisson = dp.PrivacyPlan(0.2, 5, 1.0, 0.01)
    found = monte_carlo.epsilon(APART(0.2, 1), (1.0,), 5, 1.0, 0.01)
    assert 1 < found / poisson.epsilon() < 1.2
    found = monte_carlo.epsilon(APART(1.0, 3), (1.0, 0.5), 6, 1.0, 0.01)
    assert 0.9 < found / monte_carlo.epsilon(BINS(3), (1.0, 0.5), 6, 1.0, 0.01) < 1.2


@pytest.mark.parametrize("count", [100, 10**7])
@pytest.mark.parametrize("hits", [0, 3, 90])
def test_the_bound_of_a_mean_fails_as_rarely_as_it_says(hits, count):
    failure, mean = 1e-6, hits / count
    bound = monte_carlo.upper_bound(mean, count, failure)
    assert 1e-9 < stats.binom.cdf(hits, count, bound) <= failure
    assert monte_carlo.upper_bound(mean, count, 1.0) == pytest.approx(mean, abs=1e-6)


def test_fixed_size():
    noise, delta, relation = 1.0, 1e-5, NeighboringRelation.REPLACE_ONE
    kind = dp.sampling.FixedSize(100, 1000)
    found = dp.PrivacyPlan(None, 50, noise, delta, relation, sampling=kind).epsilon()
    # Poisson sampling needs less: a lower bound; more steps without sampling an upper one.
    plan = dp.PrivacyPlan(0.1, 50, noise, delta, NeighboringRelation.REPLACE_ONE)
    assert plan.epsilon() < found < of_gaussian(math.sqrt(50) / noise, delta)
