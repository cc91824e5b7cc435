"""The argument of `eqx_dp/privacy/overflow.md`, put to numbers.

One step on a small data set of scalars, with a batch far too small: the densities of its release
can be written out, cut batches included. What the plan claims of overflow, with the probability
that it really has in place of 1e-12, must hold for them at every order of the divergence; even for
an observer who is told which of the other examples were drawn, as the argument allows.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import eqx_dp as dp
from eqx_dp.privacy import Sampler

pytestmark = pytest.mark.optimized

X = np.linspace(-12.0, 12.0, 6001)
# A kink of slope s costs the trapezoidal rule s dx^2 / 8, and here s stays below 40.
INTEGRATION_ERROR = 1e-4
ORDERS = np.exp(np.linspace(-3, 3, 13))


def cut(batch, capacity, stddev):
    """Density over X of what is released of a batch: cut to `capacity`, summed, noised."""
    kept = list(itertools.combinations(batch, min(len(batch), capacity)))
    return sum(stats.norm.pdf(X, sum(part), stddev) for part in kept) / len(kept)


def release(others, x, q, capacity, stddev):
    """For each draw from the others, the density of that draw and of the release over X.

    The data set is the others and x, where x is not None.
    """
    densities = []
    for size in range(len(others) + 1):
        for batch in itertools.combinations(others, size):
            density = cut(batch, capacity, stddev)
            if x is not None:
                density = (1 - q) * density + q * cut((*batch, x), capacity, stddev)
            densities.append(q**size * (1 - q) ** (len(others) - size) * density)
    return np.stack(densities)


def divergence(p, r, order):
    return np.trapezoid(np.maximum(p - order * r, 0), X).sum()


def excess(p, r, relation, q, stddev):
    """The most by which p and r are further apart than the worst case without a cut."""
    at = {shift: stats.norm.pdf(X, shift, stddev) for shift in (-1, 0, 1)}
    mixture = {sign: (1 - q) * at[0] + q * at[sign] for sign in (-1, 1)}
    upper, lower = {
        "add": (at[0], mixture[1]),
        "remove": (mixture[1], at[0]),
        "replace": (mixture[1], mixture[-1]),
    }[relation]
    return max(divergence(p, r, order) - divergence(upper, lower, order) for order in ORDERS)


def capacity_for(n, q, tau):
    return next(c for c in range(n + 1) if stats.binom.sf(c, n, q) <= tau)


gradients = st.floats(-1, 1) | st.sampled_from([-1.0, 1.0])


@pytest.mark.parametrize("relation", ["add", "remove", "replace"])
@settings(max_examples=40, deadline=None)
@given(
    others=st.lists(gradients, max_size=4),
    pair=st.tuples(gradients, gradients),
    q=st.floats(0.02, 0.98),
    tau=st.floats(0.01, 0.7),
    stddev=st.floats(0.3, 2),
)
def test_a_cut_costs_at_most_the_overflow_probability(relation, others, pair, q, tau, stddev):
    one, other = {"add": (None, pair[0]), "remove": (pair[0], None), "replace": pair}[relation]
    # The capacity of each side follows from its own size; both overflow with probability tau or
    # less, and no more than the largest probability that they have is claimed to be enough.
    sizes = [len(others) + (x is not None) for x in (one, other)]
    capacities = [capacity_for(n, q, tau) for n in sizes]
    p, r = (
        release(others, x, q, capacity, stddev)
        for x, capacity in zip((one, other), capacities, strict=True)
    )
    paid = max(stats.binom.sf(c, n, q) for c, n in zip(capacities, sizes, strict=True))
    assert excess(p, r, relation, q, stddev) <= paid + INTEGRATION_ERROR


@pytest.mark.parametrize(("relation", "one", "other"), [("remove", 1, None), ("replace", 1, -1)])
def test_a_cut_costs_about_half_of_it_at_worst(relation, one, other):
    # So that what is paid is neither nothing nor far too much: in a full batch the example takes
    # the place of its opposite, which moves the sum by twice its norm.
    q, capacity, stddev = 0.1, 2, 0.4
    p, r = (release([-1.0] * 2, x, q, capacity, stddev) for x in (one, other))
    paid = stats.binom.sf(capacity, 3, q)
    assert 0.4 * paid < excess(p, r, relation, q, stddev) <= paid


@pytest.mark.parametrize("others", [(-1.0,) * 3, (1.0, -1.0, -1.0), (0.5,) * 4])
@pytest.mark.parametrize("tau", [0.02, 0.07, 0.2])
def test_cuts_of_steps_that_depend_on_each_other(others, tau):
    """Two steps of two bins: what is released is in the plane."""
    x, step = np.linspace(-7, 7, 281, retstep=True)
    stddev = 0.7
    capacity = Sampler(
        len(others) + 1, dp.sampling.BallsInBins(2), seed=1, overflow_probability=tau
    ).capacity

    def of_step(batch):
        kept = list(itertools.combinations(batch, min(len(batch), capacity)))
        return sum(stats.norm.pdf(x, sum(part), stddev) for part in kept) / len(kept)

    def of_both(first, second):
        return np.outer(of_step(first), of_step(second))

    pairs = []  # for each draw from the others: with the example, and without it
    for places in itertools.product([0, 1], repeat=len(others)):
        batch = [[g for g, place in zip(others, places, strict=True) if place == t] for t in (0, 1)]
        with_x = of_both([1.0, *batch[0]], batch[1]) + of_both(batch[0], [1.0, *batch[1]])
        pairs.append((with_x / 2, of_both(*batch)))
    worst = (of_both([1.0], []) + of_both([], [1.0])) / 2, of_both([], [])

    def delta(p, q, order):
        return np.maximum(p - order * q, 0).sum() * step**2

    for order, way in itertools.product(ORDERS, (1, -1)):
        found = np.mean([delta(*pair[::way], order) for pair in pairs])
        assert found <= delta(*worst[::way], order) + 2 * tau + INTEGRATION_ERROR
