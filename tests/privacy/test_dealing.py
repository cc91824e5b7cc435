"""Examples dealt out to devices and hosts, and large data sets drawn block by block."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eqx_dp.privacy import PoissonSampler, PrivacyPlan

STEPS = 1000


def on_hosts(hosts, *args, **options):
    return [PoissonSampler(*args, hosts=hosts, host=i, **options) for i in range(hosts)]


def by_device(sampler, step):
    """What each device of a host gets."""
    return [x[x >= 0] for x in np.split(sampler.batch(step)[0], sampler.devices)]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(1e-4, 1.0),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 5),
    st.booleans(),
)
def test_all_get_as_many(n, q, devices, hosts, pad_to, shared):
    whole = PoissonSampler(n, q, seed=3)
    parts = on_hosts(hosts, n, q, seed=3, pad_to=pad_to, devices=devices, shared=shared)
    assert len({part.capacity for part in parts}) == 1
    assert parts[0].capacity % math.lcm(pad_to, devices) == 0
    for step in range(3):
        dealt = [by_device(part, step) for part in parts]
        for part, of_host in zip(parts, dealt, strict=True):
            sizes = [len(x) for x in of_host]
            assert max(sizes) - min(sizes) <= 1
            slots = part.batch(step)[0].reshape(devices, -1)
            assert (np.diff(slots < 0, axis=1) >= 0).all()  # examples first, then padding
            assert all(int(index) in part.owned for x in of_host for index in x)
        sizes = [sum(map(len, of_host)) for of_host in dealt]
        if shared:
            assert max(sizes) - min(sizes) <= 1
        # In the order of the slots, hosts and devices hold what one of them would.
        together = np.concatenate([x for of_host in dealt for x in of_host])
        one, is_padding_example = whole.batch(step)
        np.testing.assert_array_equal(together, one[~is_padding_example])


def test_of_one_host_the_capacity_is_as_without_devices():
    alone, eight = (PoissonSampler(60_000, 0.01, seed=0, pad_to=8, devices=d) for d in (1, 8))
    assert alone.capacity == eight.capacity


def test_shared_examples_need_few_more_slots_than_are_expected():
    n, expected, hosts = 10**6, 4096, 64
    parts = [
        PoissonSampler(n, expected / n, seed=0, devices=8, hosts=hosts, host=3, shared=shared)
        for shared in (True, False)
    ]
    shares = [hosts * part.capacity / expected for part in parts]
    assert shares[0] <= 1.15
    assert shares[1] > 2
    # No sampler could do with so few where each host has its own examples: one of ten overflows.
    assert stats.binom.sf(1.15 * expected / hosts, n // hosts, expected / n) > 0.1


def test_shared_examples_overflow_as_one_host_would():
    tau = 1e-3
    for hosts in (1, 3, 8):
        part = PoissonSampler(
            5000, 0.02, seed=0, hosts=hosts, shared=True, overflow_probability=tau
        )
        assert stats.binom.sf(hosts * part.capacity, 5000, 0.02) <= tau
        assert stats.binom.sf(hosts * (part.capacity - 1), 5000, 0.02) > tau


def test_shared_examples_are_cut_together():
    parts = on_hosts(3, 30, 1.0, seed=9, shared=True)
    for part in parts:
        object.__setattr__(part, "capacity", 4)
    kept = np.zeros(30)
    for step in range(STEPS):
        dealt = [part.batch(step)[0] for part in parts]
        together = np.concatenate(dealt)
        assert len(set(together)) == 12  # no example twice, and every slot is taken
        np.testing.assert_array_equal(together, np.sort(together))
        kept[together] += 1
    share = 12 / 30
    z = (kept - STEPS * share) / math.sqrt(STEPS * share * (1 - share) * 30 / 29)
    assert stats.chi2.sf(np.sum(z**2), df=29) > 1e-3


def test_the_law_and_pairs():
    n, q = 50, 0.3
    sampler = PoissonSampler(n, q, seed=11)
    drawn = np.zeros((STEPS, n))
    for step in range(STEPS):
        indices = sampler.batch(step)[0]
        drawn[step, indices[indices >= 0]] = 1
    counts = drawn.sum(axis=1)
    z = (drawn.sum(axis=0) - STEPS * q) / math.sqrt(STEPS * q * (1 - q))
    assert stats.chi2.sf(np.sum(z**2), df=n) > 1e-3
    assert abs(counts.mean() - n * q) < 4 * math.sqrt(n * q * (1 - q) / STEPS)
    assert abs(counts.var() / (n * q * (1 - q)) - 1) < 4 * math.sqrt(2 / STEPS)
    # Pairs are independent: the largest of 1,225 correlations.
    pairs = np.corrcoef(drawn.T)[np.triu_indices(n, 1)]
    assert np.max(np.abs(pairs)) < 5 / math.sqrt(STEPS)


@pytest.mark.parametrize("n", [10**9, 2**53])
def test_a_batch_of_a_huge_data_set_takes_no_more_than_a_batch(n):
    indices = PoissonSampler(n, 100 / n, seed=0).batch(0)[0]
    assert 20 < np.sum(indices >= 0) < 200


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "value"), [*[("devices", x) for x in (0, 1.0, True, None)], ("shared", 1)]
)
def test_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*found"):
        PoissonSampler(100, 0.5, seed=0, **{name: value})


def test_a_plan_hands_on_how_a_batch_is_dealt_out():
    plan = PrivacyPlan(sampling_prob=0.05, steps=10, noise_multiplier=1.0, delta=1e-5)
    part = plan.sampler(1000, seed=7, hosts=2, host=1, devices=3, shared=True)
    assert (part.devices, part.shared, part.owned) == (3, True, range(1000))
