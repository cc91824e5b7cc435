"""The argument of `PrivacyPlan.overflow_delta`, put to numbers.

One step on a small data set of scalars, with a batch far too small: the densities of its release
can be written out, cut batches included. What the plan claims of overflow, with the probability
that it really has in place of 1e-12, must hold for them at every order of the divergence.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

X = np.linspace(-14.0, 14.0, 4001)
ORDERS = np.exp(np.linspace(-3, 3, 25))


def release(gradients, q, capacity, stddev):
    """Density over X of the sum of a Poisson sample, cut at random to `capacity`, plus noise."""
    density = np.zeros_like(X)
    for size in range(len(gradients) + 1):
        for batch in itertools.combinations(gradients, size):
            probability = q**size * (1 - q) ** (len(gradients) - size)
            kept = list(itertools.combinations(batch, min(size, capacity)))
            for part in kept:
                density += probability / len(kept) * stats.norm.pdf(X, sum(part), stddev)
    return density


def divergence(p, q, order):
    return np.trapezoid(np.maximum(p - order * q, 0), X)


def dominating_pair(relation, q, stddev):
    """Densities of the worst case without a cut, of one example of norm at most 1."""
    at = {shift: stats.norm.pdf(X, shift, stddev) for shift in (-1, 0, 1)}
    mixture = {sign: (1 - q) * at[0] + q * at[sign] for sign in (-1, 1)}
    return {
        "add": (at[0], mixture[1]),
        "remove": (mixture[1], at[0]),
        "replace": (mixture[1], mixture[-1]),
    }[relation]


def capacity_for(n, q, tau):
    return next(c for c in range(n + 1) if stats.binom.sf(c, n, q) <= tau)


@pytest.mark.parametrize("relation", ["add", "remove", "replace"])
@settings(max_examples=25, deadline=None)
@given(
    others=st.lists(st.floats(-1, 1), max_size=4),
    pair=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    q=st.floats(0.05, 0.95),
    tau=st.floats(0.01, 0.7),
    stddev=st.floats(0.5, 2),
)
def test_a_cut_costs_at_most_the_overflow_probability(relation, others, pair, q, tau, stddev):
    one, other = {
        "add": (others, [*others, pair[0]]),
        "remove": ([*others, pair[0]], others),
        "replace": ([*others, pair[0]], [*others, pair[1]]),
    }[relation]
    # Each side's capacity follows from its own size; both overflow with probability tau at most.
    p, r = (release(side, q, capacity_for(len(side), q, tau), stddev) for side in (one, other))
    upper, lower = dominating_pair(relation, q, stddev)
    for order in ORDERS:
        assert divergence(p, r, order) <= divergence(upper, lower, order) + tau + 1e-6


def test_a_cut_costs_something():
    # Were this no more than without a cut, nothing would have to be paid for, nor be tested above:
    # once the batch of one is full, a new example takes the place of another.
    others, q, stddev = [-1.0, -1.0, -1.0], 0.5, 0.5
    p = release(others, q, 1, stddev)
    r = release([*others, 1.0], q, 1, stddev)
    upper, lower = dominating_pair("remove", q, stddev)
    excess = max(divergence(r, p, order) - divergence(upper, lower, order) for order in ORDERS)
    assert math.isfinite(excess)
    assert excess > 0.005
