"""Random allocation and bins against integrals over tiny cycles, and against samples of runs."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy import linalg, special, stats

import eqx_dp as dp
from eqx_dp.privacy import epsilon_beyond, random_allocation
from tests.benchmarks.accounting import TINY, at_least, brute_force, draws_of
from tests.tiers import curated

ANEW, BINS = dp.sampling.RandomAllocation, dp.sampling.BallsInBins
ALLOCATED = dp.PrivacyPlan(steps=300, noise_multiplier=1.0, delta=1e-5, sampling=ANEW(100))


def by_integral(bins, noise, epsilon):
    """Delta where an example is removed, and where it is added; over all bins but one."""
    x = np.linspace(-9, 9, 601)
    weight, density = stats.norm.pdf(x) * (x[1] - x[0]), np.exp(x / noise - 0.5 / noise**2)
    weights = np.ones(1)
    others = np.zeros(1)
    for _ in range(bins - 1):
        weights, others = np.outer(weights, weight).ravel(), np.add.outer(others, density).ravel()
    # E max(Y - level, 0) of a lognormal Y of mean 1 is in closed form.
    level = bins * math.exp(epsilon) - others
    logs = np.log(np.maximum(level, 1e-300)) * noise
    above = special.ndtr(0.5 / noise - logs) - level * special.ndtr(-0.5 / noise - logs)
    removed = np.sum(weights * np.where(level > 0, above, 1 - level)) / bins
    level = bins * math.exp(-epsilon) - others
    logs = np.log(np.maximum(level, 1e-300)) * noise
    below = level * special.ndtr(0.5 / noise + logs) - special.ndtr(-0.5 / noise + logs)
    return removed, np.sum(weights * np.where(level > 0, below, 0)) * math.exp(epsilon) / bins


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("bins", [1, 2, 3])
def test_delta_of_tiny_cycles_is_that_of_an_integral(bins, noise, epsilon):
    losses = random_allocation.losses(bins, noise, random_allocation.interval(bins, noise))
    found = losses._pmf_remove, losses._pmf_add
    for pmf, exact in zip(found, by_integral(bins, noise, epsilon), strict=True):
        assert exact * (1 - 1e-6) <= pmf.get_delta_for_epsilon(epsilon) + 1e-14
        assert pmf.get_delta_for_epsilon(epsilon) <= exact * 1.02 + 1e-7
        assert pmf.get_delta_for_epsilon(-700.0) >= 1  # rounding loses no probability


WIDTHS = [(7, 0.3), (100, 1.0), (1000, 8.0)]


@pytest.mark.parametrize(("bins", "noise"), curated(WIDTHS, WIDTHS[:2]))
def test_wider_intervals_and_fewer_bins_cost_more(bins, noise):
    width = random_allocation.interval(bins, noise)
    changed = [(bins, width), (bins, 2.3 * width), (bins, 9 * width), (bins - 1, 9 * width)]
    deltas = [random_allocation.losses(count, noise, x) for count, x in changed]
    for less, more in itertools.pairwise(deltas):
        for epsilon in (0.01, 0.1, 1.0, 4.0):
            found = less.get_delta_for_epsilon(epsilon)
            assert found <= more.get_delta_for_epsilon(epsilon) + 1e-15
    cut = bins * (2 * special.ndtr(-9.5) + 8e-22)  # in the ends of all steps and averages
    assert deltas[0].get_delta_for_epsilon(400.0) >= cut
    assert random_allocation._counted(2**40 + 5) == 2**20
    assert random_allocation._counted(1001) == 1000


CASES = [
    (ANEW(100), None, 300, 1.0, 1e-5, 20_000, 1.02),
    (ANEW(5), None, 25, 2.0, 1e-2, 50_000, 1.02),
    (BINS(20), None, 100, 3.0, 1e-5, 50_000, 1.02),
    (BINS(20), None, 95, 3.0, 1e-10, 50_000, 1.02),
    (BINS(9), dp.Banded(strategy=(1.0, 0.5, 0.3)), 40, 3.0, 0.01, 20_000, 1.5),
    (BINS(8), dp.Banded.bisr(3), 8, 1.0, 1e-5, 20_000, 1.3),
    (BINS(32), dp.Banded(strategy=(1.0, 0.5)), 64, 1.2, 1e-10, 20_000, 1.4),
]


@pytest.mark.parametrize(
    ("kind", "correlation", "steps", "noise", "delta", "count", "most"),
    curated(CASES, [CASES[2], CASES[5]]),
)
def test_epsilon_is_close_to_what_samples_show(kind, correlation, steps, noise, delta, count, most):
    """That of correlated noise in bins is a bound that is not tight."""
    plan = dp.PrivacyPlan(None, steps, noise, delta, sampling=kind, noise=correlation)
    stated = plan.epsilon()
    assert stated / most < at_least(draws_of(plan, stated), stated, delta, count) <= stated


@pytest.mark.parametrize("noise", [0.4, 1.0, 7.0])
@pytest.mark.parametrize(("cycle", "steps"), [(2, 5), (5, 5), (9, 40), (15, 15)])
@pytest.mark.parametrize("bands", [2, 3, 7])
def test_modes_of_bins_are_no_nearer_than_is_accounted_for(bands, cycle, steps, noise):
    """Kahane's condition, for the bins that are taken, whichever of them is the first."""
    strategy = dp.Banded.bisr(min(bands, steps))
    plan = dp.PrivacyPlan(None, steps, noise, 1e-5, sampling=BINS(cycle), noise=strategy)
    column = np.pad(strategy.column(steps), (0, steps))[:steps]
    bins = np.equal.outer(np.arange(steps) % cycle, np.arange(cycle))
    modes = linalg.toeplitz(column, np.zeros(steps)) @ bins
    products = modes.T @ modes / noise**2
    (first, *rest) = plan.mechanism().reduced(noise)
    own, shared = first[1] ** -2, sum(x[1] ** -2 for x in rest)
    apart = next(k for k in range(cycle, 0, -1) if cycle // k == first[0].bins)
    others = []
    for start in range(cycle):
        taken = (start + apart * np.arange(first[0].bins)) % cycle
        of_taken = products[np.ix_(taken, taken)]
        assert np.all(np.diag(of_taken) <= (own + shared) * (1 + 1e-9))
        others += [*of_taken[~np.eye(len(taken), dtype=bool)]]
    assert own + shared == pytest.approx(products.max(), rel=1e-9)
    assert all(x <= shared * (1 + 1e-9) + 1e-9 for x in others)
    assert shared <= max(products[np.equal.outer(*[np.arange(cycle)] * 2) < 1]) * (1 + 1e-6) + 1e-9


def test_allocation_costs_less_than_poisson_and_composes():
    assert ALLOCATED.epsilon() <= 0.955
    assert ALLOCATED.epsilon() < dp.PrivacyPlan(0.01, 300, 1.0, 1e-5).epsilon()
    assert ALLOCATED.epsilon(1) == pytest.approx(ALLOCATED.epsilon(100), 1e-5)
    assert ALLOCATED.epsilon(101) > 1.1 * ALLOCATED.epsilon(100)
    bins = dp.PrivacyPlan(None, 100, 1.0, 5e-6, sampling=BINS(100))
    for plans in (
        [bins, bins, bins],
        [bins, dp.PrivacyPlan(None, 200, 1.0, 5e-6, sampling=ANEW(100))],
    ):
        assert dp.compose(*plans, delta=1e-5).epsilon() == pytest.approx(ALLOCATED.epsilon(), 1e-3)
    with pytest.raises(ValueError, match="no tight event for RandomAllocation"):
        ALLOCATED.event()


def test_several_starts_of_one_draw_of_bins_have_no_epsilon():
    """Two of 3 steps put an example of 2 bins in 4, 3, 3 or 2 of them; one of 6 steps in 3."""
    plan = dp.PrivacyPlan(None, 3, 1.0, 1e-5, sampling=BINS(2))
    assert math.isinf(epsilon_beyond(plan, 6))
    one, cut = dataclasses.replace(plan, steps=6).epsilon(), np.linspace(0, 12, 121)
    seen = special.ndtr(np.array([[2.0], [1.0], [1.0], [0.0]]) - cut).mean(0)  # along the first
    assert np.max(seen - math.exp(one) * special.ndtr(-cut)) > 1e-5


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.049, 0.051, 1e9])
def test_allocation_at_the_edges_of_noise(noise):
    plan = dp.PrivacyPlan(None, 200, noise, 1e-5, sampling=ANEW(100))
    wanted = {0.0: math.inf, 1e-4: math.inf, 1e9: 5e-5}
    twice = dp.PrivacyPlan(1.0, 2, noise, 1e-5)  # without amplification
    assert plan.epsilon() == pytest.approx(wanted.get(noise, twice.epsilon()), rel=0.05)


@pytest.mark.parametrize("kind", curated([ANEW(100), BINS(100)], [BINS(100)]))
def test_a_plan_of_bins_is_calibrated(kind):
    plan = dp.PrivacyPlan.calibrate(epsilon=2.0, delta=1e-10, steps=400, sampling=kind)
    assert 1.998 < plan.epsilon() <= 2.0
    assert dp.PrivacyPlan.from_json(plan.to_json()) == plan


# Every sampler, with all of its draws.


@pytest.mark.parametrize("plan", curated(TINY, [x for x in TINY if x.steps == 1]))
def test_epsilon_is_not_below_brute_force(plan):
    found = brute_force(plan, {1: 2000, 3: 20, 4: 6}[plan.steps])
    assert 0.5 * plan.epsilon() < found <= plan.epsilon()


# Batches of a fixed size.


def test_fixed_size_is_the_amplified_gaussian_and_composes():
    """One of three examples is drawn: +1 replaces -1 beside two of -1; by integrals."""
    share, noise, relation = 1 / 3, 1.5, dp.NeighboringRelation.REPLACE_ONE
    x, step = np.linspace(-9, 10, 3001, retstep=True)
    here = stats.norm.pdf(x) * (1 - share + share * np.exp((x - 0.5 / noise) / noise))
    there = stats.norm.pdf(x)
    plan = dp.PrivacyPlan(None, 2, noise, 1e-3, relation, sampling=dp.sampling.FixedSize(1, 3))
    for steps, most in ((1, 1.001), (2, 1.15)):
        found = plan.epsilon(steps)
        p, q = (y if steps == 1 else np.outer(y, y) for y in (here, there))
        exact = np.sum(np.maximum(p - math.exp(found) * q, 0)) * step**steps
        assert exact <= 1e-3 * (1 + 1e-6)
        assert np.sum(np.maximum(p - math.exp(found / most) * q, 0)) * step**steps > 1e-3
    assert dp.compose(plan, plan).epsilon() > plan.epsilon() > plan.epsilon(1)


OF_FIXED_SIZE = [(1.0, 50, 0.1), (2.0, 1000, 0.01)]


@pytest.mark.parametrize(("noise", "steps", "share"), curated(OF_FIXED_SIZE, OF_FIXED_SIZE[1:]))
def test_fixed_size_costs_more_than_poisson_and_less_than_by_renyi_divergences(noise, steps, share):
    relation, gaussian = dp.NeighboringRelation.REPLACE_ONE, dp_accounting.GaussianDpEvent(noise)
    kind = dp.sampling.FixedSize(round(1000 * share), 1000)
    found = dp.PrivacyPlan(None, steps, noise, 1e-5, relation, sampling=kind).epsilon()
    assert dp.PrivacyPlan(share, steps, noise, 1e-5, relation).epsilon() < found
    step = dp_accounting.SampledWithoutReplacementDpEvent(1000, kind.batch_size, gaussian)
    accountant = RdpAccountant(neighboring_relation=relation).compose(step, steps)
    assert found < accountant.get_epsilon(1e-5)
