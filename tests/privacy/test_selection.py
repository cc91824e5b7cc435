"""The best of a random number of runs, against all outcomes and against Renyi divergences."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, stats

import eqx_dp as dp
from eqx_dp.privacy.selection import Tuned

PLAN = dp.PrivacyPlan(0.25, 60, noise_multiplier=4.0, delta=1e-5)


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Outcomes of one run on two data sets, the better ones behind."""

    on: tuple[np.ndarray, np.ndarray]
    delta: float
    charged: float = 0.0

    def epsilon(self):
        def excess(epsilon):
            p, q = self.on
            return max(np.maximum(a - np.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p)))

        delta = self.delta
        return 0.0 if excess(0) <= delta else optimize.brentq(lambda x: excess(x) - delta, 0, 50)


def chosen(outcomes, mean):
    """The outcome of the best run, by the generating function of their number."""
    z = np.append(0, np.cumsum(outcomes))
    return np.diff(z / (z + mean * (1 - z)))


@pytest.mark.parametrize("mean", [1.5, 20.0])
@pytest.mark.parametrize("moved", [0.3, 2.0])
def test_epsilon_covers_all_outcomes(moved, mean):
    edges = np.linspace(-5, 6, 60)
    p, q = (np.diff(stats.norm.cdf(edges, x), prepend=0, append=1) + 1e-12 for x in (0, moved))
    known = p / p.sum(), q / q.sum()
    tuned = Tuned(Outcomes(known, 1e-4), mean)
    # The best are those of one data set, next those of the other: a choice costs most.
    orders = [np.roll(np.arange(len(p))[::way], -top) for top in (0, 20, 25, 30) for way in (1, -1)]
    best = [tuple(chosen(outcomes[order], mean) for outcomes in known) for order in orders]
    truth = max(Outcomes(pair, 1e-4).epsilon() for pair in best)
    assert truth <= tuned.epsilon() < 1.12 * truth


def test_a_tuned_plan_costs_less_than_by_renyi_divergences_and_composes():
    tuned = PLAN.tuned(10)
    by_renyi = RdpAccountant().compose(RepeatAndSelectDpEvent(PLAN.event(), 10, 1))
    assert PLAN.epsilon() < tuned.epsilon() < by_renyi.get_epsilon(1e-5)
    counts = [tuned.draw() for _ in range(3000)]
    assert min(counts) == 1
    assert abs(np.mean(counts) - 10) < 5 * np.std(counts) / math.sqrt(3000)
    both = dp.compose(tuned, PLAN)
    assert dp.compose(tuned).epsilon() == pytest.approx(tuned.epsilon(), abs=1e-3)
    assert both.epsilon() == dp.compose((tuned.epsilon(), 1e-5), PLAN, delta=2e-5).epsilon()
    assert tuned.epsilon() < both.epsilon() < tuned.epsilon() + PLAN.epsilon()
    for unknown in (tuned, (1.0, 1e-6)):  # dp_accounting must not pass over what it cannot count
        with pytest.raises(dp_accounting.UnsupportedEventError):
            RdpAccountant().compose(dp.compose(PLAN, unknown).event())
    with pytest.raises(ValueError, match="mean must be above 1"):
        PLAN.tuned(1.0)
