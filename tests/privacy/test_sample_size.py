"""How many examples a sample holds, against sums over all of its sizes and against the sampler."""

import math

import numpy as np
import pytest
from scipy import stats

from eqx_dp.privacy import PoissonSampler, SampleSize, Sampling

SAMPLES = [
    SampleSize(slots=30, num_examples=50, sampling_prob=0.3),
    SampleSize(slots=7, num_examples=10_000, sampling_prob=1e-4),
    SampleSize(slots=48, num_examples=40, sampling_prob=1.0),
    SampleSize(slots=5, num_examples=400, sampling_prob=0.5),  # nearly always cut
    SampleSize(slots=3, num_examples=0, sampling_prob=0.5),
    SampleSize(slots=0, num_examples=0, sampling_prob=0.5),
]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_microbatches_of_the_first_device(sample, size, devices):
    """It has one example more than the others, if the examples cannot be divided evenly."""
    sizes = np.arange(sample.num_examples + 1)
    weights = stats.binom.pmf(sizes, sample.num_examples, sample.sampling_prob)
    slots = max(1, sample.slots // devices)
    held = np.minimum(np.ceil(sizes / devices), slots if sample.slots else 0)
    expected = math.fsum(weights * np.ceil(held / size))
    if sample.slots % devices == 0:
        found = sample.microbatches(size, slots)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert sample.mean == pytest.approx(math.fsum(sizes * weights), rel=1e-9)


@pytest.mark.parametrize("tau", [1e-12, 1e-15])
@pytest.mark.parametrize(
    ("num_examples", "prob"), [(60_000, 1 / 60), (1000, 0.5), (100, 0.99), (10**9, 1e-7)]
)
def test_the_data_set_is_found_from_the_capacity(num_examples, prob, tau):
    sampler = PoissonSampler(num_examples, prob, seed=1, overflow_probability=tau)
    found = Sampling(prob, tau).of(sampler.capacity)
    assert (found.slots, found.sampling_prob) == (sampler.capacity, prob)
    # One slot more is one example more in the mean, or less.
    assert num_examples <= found.num_examples <= num_examples + 1.1 / prob
    # No larger data set has that capacity.
    for count, same in ((found.num_examples, True), (found.num_examples + 1, False)):
        larger = PoissonSampler(count, prob, seed=1, overflow_probability=tau)
        assert (larger.capacity == sampler.capacity) == same
