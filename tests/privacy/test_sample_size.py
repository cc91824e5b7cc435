"""How many examples a sample holds, against sums over all of its sizes and against the sampler."""

import math
import sys

import numpy as np
import pytest
from scipy import stats

from eqx_dp.privacy import PoissonSampler, PrivacyPlan, SampleSize, Sampling

SAMPLES = [
    SampleSize(slots=30, num_examples=50, sampling_prob=0.3),
    SampleSize(slots=12, num_examples=12, sampling_prob=0.9),
    SampleSize(slots=7, num_examples=10_000, sampling_prob=1e-4),
    SampleSize(slots=40, num_examples=40, sampling_prob=1.0),
    SampleSize(slots=48, num_examples=40, sampling_prob=1.0),
    SampleSize(slots=5, num_examples=400, sampling_prob=0.5),  # nearly always cut
    SampleSize(slots=3, num_examples=0, sampling_prob=0.5),
    SampleSize(slots=0, num_examples=0, sampling_prob=0.5),
]


def exact(sample, value):
    """The expected value of a function of how many slots hold an example."""
    sizes = np.arange(sample.num_examples + 1)
    weights = stats.binom.pmf(sizes, sample.num_examples, sample.sampling_prob)
    return math.fsum(
        w * value(min(int(k), sample.slots)) for k, w in zip(sizes, weights, strict=True)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30, 1000])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_microbatches(sample, size):
    found = sample.microbatches(size)
    assert isinstance(found, float)
    assert found == pytest.approx(exact(sample, lambda k: -(-k // size)), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("sample", SAMPLES[:2], ids=str)
def test_microbatches_of_the_first_device(sample, size, devices):
    """It has one example more than the others, if the examples cannot be divided evenly."""
    expected = exact(sample, lambda k: math.ceil(math.ceil(k / devices) / size))
    found = sample.microbatches(size, sample.slots // devices)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_mean(sample):
    sizes = np.arange(sample.num_examples + 1)
    weights = stats.binom.pmf(sizes, sample.num_examples, sample.sampling_prob)
    assert sample.mean == pytest.approx(math.fsum(sizes * weights), rel=1e-9)


@pytest.mark.parametrize(("num_examples", "prob"), [(300, 0.1), (40, 0.5), (2000, 1e-3)])
def test_what_the_sampler_draws(num_examples, prob):
    sampler = PoissonSampler(num_examples, prob, seed=5)
    sample = SampleSize(sampler.capacity, num_examples, prob)
    counts = np.array([np.sum(~sampler.batch(step)[1]) for step in range(2000)])
    for size in (1, 4, 11):
        drawn = -(-counts // size)
        assert abs(drawn.mean() - sample.microbatches(size)) < 5 * drawn.std() / math.sqrt(2000)
    assert abs(counts.mean() - sample.mean) < 5 * counts.std() / math.sqrt(2000)


@pytest.mark.parametrize("tau", [1e-12, 1e-8, 1e-15])
@pytest.mark.parametrize(
    ("num_examples", "prob"),
    [(60_000, 1 / 900), (60_000, 1 / 60), (10**6, 1e-2), (1000, 0.5), (100, 0.99), (10**9, 1e-7)],
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


@pytest.mark.parametrize("pad_to", [8, 64, 1000])
def test_a_capacity_that_was_rounded_up_allows_for_more(pad_to):
    sampler = PoissonSampler(6000, 0.01, seed=1, pad_to=pad_to)
    found = Sampling(0.01, sampler.overflow_probability).of(sampler.capacity)
    assert found.slots % pad_to == 0
    assert 6000 <= found.num_examples <= 6000 + 1.1 * pad_to / 0.01


@pytest.mark.parametrize("slots", [0, 1, 13, 5000])
def test_a_plan_that_takes_every_example(slots):
    sample = Sampling(1.0, 1e-12).of(slots)
    assert sample == SampleSize(slots, slots, 1.0)
    assert sample.mean == slots
    assert sample.microbatches(8) == -(-slots // 8)


@pytest.mark.parametrize("prob", [1e-9, 1e-17, 1e-19, 1e-30, 1e-300, sys.float_info.min, 5e-324])
def test_examples_that_are_hardly_ever_drawn(prob):
    sampler = PoissonSampler(100, prob, seed=1)
    assert sampler.capacity == 1
    sample = Sampling(prob, 1e-12).of(1)
    assert 100 <= sample.num_examples <= 2**53
    assert 0 <= sample.mean < 1e-5
    assert 0 <= sample.microbatches(1) < 1e-5


def test_a_batch_without_slots():
    sample = Sampling(0.1, 1e-12).of(0)
    assert sample == SampleSize(0, 0, 0.1)
    assert (sample.mean, sample.microbatches(1), sample.microbatches(7)) == (0, 0, 0)


def test_fewer_slots_than_anything_is_drawn_for():
    """With room for one, hardly any data set hardly ever overflows."""
    sample = Sampling(0.5, 1e-12).of(1)
    assert sample.num_examples == 1
    assert sample.microbatches(1) == pytest.approx(0.5)


def test_an_overflow_that_is_likely():
    sample = Sampling(0.25, 0.9).of(10)
    assert 10 <= sample.num_examples <= 41


def test_a_plan_says_how_it_samples():
    plan = PrivacyPlan(sampling_prob=0.01, steps=100, noise_multiplier=1.0, delta=1e-6)
    assert plan.sampling == Sampling(0.01, plan._overflow_probability)
    sampler = plan.sampler(100_000, seed=3)
    assert plan.sampling.of(sampler.capacity).mean == pytest.approx(1000, rel=1e-3)


def test_a_distribution_is_asked_for_once(monkeypatch):
    """A choice asks for every size of a large batch, at every trace."""
    asked, tails = [], stats.binom.sf
    sample = Sampling(1e-2, 1e-12).of(102_221)
    monkeypatch.setattr(stats.binom, "sf", lambda *args: asked.append(args) or tails(*args))
    sizes = range(8, sample.slots, 8)
    found = [sample.microbatches(size) for size in sizes]
    assert len(asked) == 1
    assert found == pytest.approx([max(1, sample.mean / size + 0.5) for size in sizes], abs=0.55)
