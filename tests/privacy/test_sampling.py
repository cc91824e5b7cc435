import dataclasses
import decimal
import itertools
import logging
import math
import tracemalloc
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eqx_dp.privacy import OVERFLOW_PROBABILITY, PoissonSampler

STEPS = 1500


def drawn(sampler, step):
    indices, is_padding_example = sampler.batch(step)
    return indices[~is_padding_example]


def on_hosts(hosts, sampler):
    return [dataclasses.replace(sampler, hosts=hosts, host=host) for host in range(hosts)]


def with_room_for(capacity, sampler):
    """The same sampler with less room than any overflow probability below 1 leaves."""
    sampler.__dict__["capacity"] = capacity
    return sampler


@pytest.fixture(scope="module", params=[1, 3], ids=["one host", "three hosts"])
def inclusions(request):
    """Which of 50 examples, each drawn with probability 0.3, took part in which step."""
    hosts = on_hosts(request.param, PoissonSampler(num_examples=50, sampling_prob=0.3, seed=11))
    took_part = np.zeros((STEPS, 50), dtype=int)
    for step, host in itertools.product(range(STEPS), hosts):
        took_part[step, drawn(host, step)] += 1
    assert took_part.max() == 1
    return took_part.astype(bool)


# Which examples are drawn.


def chi_square_of_counts(counts, distribution):
    """p-value of counts against a discrete distribution, in bins of about equal probability."""
    edges = np.unique(distribution.ppf(np.linspace(0, 1, 16)[1:-1]))
    bins = np.searchsorted(edges, counts)
    observed = np.bincount(bins, minlength=len(edges) + 1)
    probabilities = np.diff(np.concatenate([[0.0], distribution.cdf(edges), [1.0]]))
    return stats.chisquare(observed, probabilities * len(counts)).pvalue


def test_counts_are_binomial(inclusions):
    assert chi_square_of_counts(inclusions.sum(axis=1), stats.binom(50, 0.3)) > 1e-3


def test_counts_of_large_data_are_binomial():
    sampler = PoissonSampler(num_examples=10**9, sampling_prob=1e-7, seed=3)
    counts = np.array([len(drawn(sampler, step)) for step in range(400)])
    assert chi_square_of_counts(counts, stats.binom(10**9, 1e-7)) > 1e-3


def test_every_example_is_drawn_with_the_sampling_probability(inclusions):
    z = (inclusions.sum(axis=0) - STEPS * 0.3) / math.sqrt(STEPS * 0.3 * 0.7)
    low, high = stats.chi2.interval(1 - 1e-3, df=50)
    assert low < np.sum(z**2) < high


def test_examples_of_large_data_are_drawn_uniformly():
    sampler = PoissonSampler(num_examples=10**12, sampling_prob=1e-9, seed=4)
    positions = np.concatenate([drawn(sampler, step) for step in range(50)])
    assert stats.kstest(positions / 10**12, "uniform").pvalue > 1e-3


def test_examples_are_pairwise_independent(inclusions):
    correlations = np.corrcoef(inclusions.T.astype(float))
    of_pairs = correlations[np.triu_indices(50, k=1)]
    assert np.abs(of_pairs).max() < 5 / math.sqrt(STEPS)
    # Batches of one fixed size would show here: their correlation is -1/49 for every pair.
    assert abs(of_pairs.mean()) < 5 / math.sqrt(STEPS * len(of_pairs))


def overlap_score(one, other):
    """How far batches share more or fewer examples than independent ones would, in deviations."""
    trials, q = one.size, 0.3
    shared = np.count_nonzero(one & other)
    return (shared - trials * q**2) / math.sqrt(trials * q**2 * (1 - q**2))


def test_steps_are_independent(inclusions):
    for lag in (1, 2, 7):
        assert abs(overlap_score(inclusions[lag:], inclusions[:-lag])) < 4


def test_seeds_are_independent(inclusions):
    other = PoissonSampler(num_examples=50, sampling_prob=0.3, seed=12)
    took_part = np.zeros((500, 50), dtype=bool)
    for step in range(500):
        took_part[step, drawn(other, step)] = True
    assert abs(overlap_score(took_part, inclusions[:500])) < 4
    # Nor is one seed the other, some steps on.
    assert abs(overlap_score(took_part, inclusions[1:501])) < 4
    assert abs(overlap_score(took_part[1:], inclusions[:499])) < 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((7 + 3 * 2**32, 2), (7, 3 + 2 * 2**32)),
        ((5, 0), (0, 5)),
        ((2**127, 0), (0, 2**63)),
        ((2**32, 0), (0, 1)),
    ],
)
def test_seed_and_step_are_not_mixed_up(one, other):
    batches = [
        drawn(PoissonSampler(num_examples=10**6, sampling_prob=1e-4, seed=seed), step)
        for seed, step in (one, other)
    ]
    assert np.intersect1d(*batches).size <= 3


# A pure function of seed and step.


def test_a_step_needs_none_before_it():
    one_by_one = PoissonSampler(num_examples=1000, sampling_prob=0.05, seed=1)
    batches = [one_by_one.batch(step) for step in range(1001)]
    at_once = PoissonSampler(num_examples=1000, sampling_prob=0.05, seed=1).batch(1000)
    for ours, theirs in zip(at_once, batches[1000], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("hosts", [1, 2, 7])
def test_batches_stay_what_they_are(hosts):
    # An experiment with a seed repeats under a later release, and on more or fewer hosts. If this
    # fails, either the way from (seed, step) to a generator has changed, or numpy's streams have.
    whole = PoissonSampler(num_examples=10**6, sampling_prob=4e-6, seed=2**100 + 1)
    parts = on_hosts(hosts, whole)
    assert [[i for part in parts for i in drawn(part, step)] for step in (0, 1, 10**6)] == [
        [107326, 143535, 524277],
        [559882],
        [436064, 796278],
    ]


def test_cut_batches_stay_what_they_are():
    sampler = PoissonSampler(10**6, 4e-6, seed=2**100 + 1, overflow_probability=0.9)
    assert [drawn(sampler, step).tolist() for step in (0, 1, 10**6)] == [
        [143535, 524277],
        [559882],
        [436064, 796278],
    ]


def test_numbers_of_numpy_will_do():
    ours = PoissonSampler(num_examples=100, sampling_prob=0.5, seed=3, pad_to=8)
    numpys = PoissonSampler(
        num_examples=np.int32(100),
        sampling_prob=np.float64(0.5),
        seed=np.uint8(3),
        pad_to=np.int64(8),
        hosts=np.int32(1),
        host=np.uint8(0),
    )
    assert ours == numpys
    assert type(numpys.num_examples) is int
    np.testing.assert_array_equal(ours.batch(4)[0], numpys.batch(np.int16(4))[0])


@pytest.mark.parametrize("seed", [987654321, b"987654321"])
def test_the_seed_is_not_shown(seed):
    assert "987654321" not in repr(PoissonSampler(10, 0.5, seed=seed))


# What tells runs apart.

RUN = {"num_examples": 10**6, "sampling_prob": 1e-4, "seed": 7}


@pytest.mark.parametrize(
    "change",
    [
        {"num_examples": 10**6 + 1},
        {"sampling_prob": 1e-4 * (1 + 1e-9)},
        {"seed": 7 + 2**128},
        {"seed": 7 + 2**32},
        {"seed": 2**4000},
        {"seed": b"\7"},
        {"seed": b"7" * 300},
    ],
)
def test_another_run_is_another_sample(change):
    batches = [drawn(PoissonSampler(**(RUN | arguments)), 3) for arguments in ({}, change)]
    assert np.intersect1d(*batches).size <= 3


@pytest.mark.parametrize(
    "change",
    [{"pad_to": 64}, {"steps": 10}, {"hosts": 1}, {"overflow_probability": 1e-17}],
)
def test_the_shape_of_batches_does_not_change_the_sample(change):
    batches = [drawn(PoissonSampler(**(RUN | arguments)), 3) for arguments in ({}, change)]
    np.testing.assert_array_equal(*batches)


# Examples and mask together.


def as_given(kind, array):
    return {"numpy": np.asarray, "jax": jnp.asarray}[kind](array)


@pytest.mark.parametrize("kind", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bool", "bfloat16"])
def test_taken_examples_are_those_of_the_batch(kind, dtype):
    sampler = PoissonSampler(num_examples=60, sampling_prob=0.2, seed=3, pad_to=8)
    # No example is zero, so that padding is told from each of them.
    xs = as_given(kind, np.arange(1, 121).reshape(60, 2).astype(jnp.dtype(dtype)))
    for step in range(5):
        (x,), is_padding_example = sampler.take(step, xs)
        indices, mask = sampler.batch(step)
        np.testing.assert_array_equal(is_padding_example, mask)
        assert (type(x), x.dtype, x.shape) == (type(xs), xs.dtype, (sampler.capacity, 2))
        np.testing.assert_array_equal(x[~mask], np.asarray(xs)[indices[~mask]])
        assert not np.asarray(x[mask]).any()
    assert mask.any()


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 40),
    st.floats(0.01, 1),
    st.integers(1, 9),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), max_size=2),
)
def test_taken_trees_keep_their_structure(n, q, pad_to, hosts, shape):
    xs = np.arange(1, n * math.prod(shape) + 1).reshape(n, *shape)
    sources = {"x": xs, "more": [xs[..., None], None]}, xs.astype(np.float32)
    for part in on_hosts(hosts, PoissonSampler(n, q, seed=5, pad_to=pad_to)):
        examples, is_padding_example = part.take(1, *sources)
        assert jax.tree.structure(examples) == jax.tree.structure(sources)
        indices = part.batch(1)[0]
        for taken, source in zip(jax.tree.leaves(examples), jax.tree.leaves(sources), strict=True):
            assert taken.dtype == source.dtype
            np.testing.assert_array_equal(
                taken[~is_padding_example], source[indices[~is_padding_example]]
            )
            assert not taken[is_padding_example].any()


class Counted(np.ndarray):
    """An array that remembers at which positions it was read."""

    def __getitem__(self, positions):
        self.read = np.asarray(positions)
        return super().__getitem__(positions)


def test_nothing_is_read_for_padding():
    sampler = PoissonSampler(num_examples=60, sampling_prob=0.2, seed=3)
    xs = np.ones((60, 2)).view(Counted)
    sampler.take(0, xs)
    np.testing.assert_array_equal(xs.read, drawn(sampler, 0))


def test_a_batch_of_any_size_is_taken_by_one_program():
    sampler, xs = PoissonSampler(num_examples=60, sampling_prob=0.2, seed=3), jnp.ones((60, 2))
    sampler.take(0, xs)
    assert len({len(drawn(sampler, step)) for step in range(6)}) > 1
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr(logging.Logger, "handle", lambda _, record: compiled.append(record))
        for step in range(6):
            sampler.take(step, xs)
    assert not compiled


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ((), "at least one source"),
        ((np.ones(59),), r"source 0 has shape \(59,\), and the sampler draws from 60"),
        ((np.ones(60), {"x": jnp.ones((1, 60))}), r"source 1 at x has shape \(1, 60\)"),
        ((np.ones(()),), r"source 0 has shape \(\)"),
        ((None,), "source 0 holds no arrays"),
        (([1.0] * 60,), r"source 0 at 0 is a float, not an array"),
    ],
)
def test_what_is_no_source_is_refused(sources, reason):
    with pytest.raises(ValueError, match=reason):
        PoissonSampler(num_examples=60, sampling_prob=0.2, seed=3).take(0, *sources)


# Shape of a batch.

probabilities = st.floats(1e-6, 1.0)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5000),
    probabilities,
    st.integers(0, 2**200) | st.binary(min_size=1),
    st.integers(0, 2**64 - 1),
    st.integers(1, 300),
)
def test_a_batch_is_distinct_examples_and_then_padding(n, q, seed, step, pad_to):
    sampler = PoissonSampler(n, q, seed=seed, pad_to=pad_to)
    indices, is_padding_example = sampler.batch(step)
    assert indices.shape == is_padding_example.shape == (sampler.capacity,)
    assert (indices.dtype, is_padding_example.dtype) == (np.int64, np.bool_)
    real = indices[~is_padding_example]
    assert np.all(indices[: len(real)] == real)
    assert np.all(indices[len(real) :] == -1)
    assert np.all((real >= 0) & (real < n))
    assert np.all(np.diff(real) > 0)


@pytest.mark.parametrize("pad_to", [1, 4])
def test_one_example(pad_to):
    certain = PoissonSampler(num_examples=1, sampling_prob=1.0, seed=0, pad_to=pad_to)
    assert certain.capacity == pad_to
    for step in range(20):
        assert certain.batch(step)[0].tolist() == [0] + [-1] * (pad_to - 1)
    maybe = PoissonSampler(num_examples=1, sampling_prob=0.5, seed=0)
    assert {tuple(maybe.batch(step)[0]) for step in range(50)} == {(0,), (-1,)}


def test_certain_examples_are_all_drawn():
    sampler = PoissonSampler(num_examples=37, sampling_prob=1, seed=0)
    indices, is_padding_example = sampler.batch(5)
    np.testing.assert_array_equal(indices, np.arange(37))
    assert not is_padding_example.any()


# Several hosts.


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3000),
    probabilities,
    st.integers(0, 2**200),
    st.integers(1, 40),
    st.integers(1, 12),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8),
)
def test_hosts_together_draw_what_one_would(n, q, seed, pad_to, hosts, steps):
    whole = PoissonSampler(n, q, seed=seed)
    parts = on_hosts(hosts, PoissonSampler(n, q, seed=seed, pad_to=pad_to))
    assert len({part.capacity for part in parts}) == 1
    for step in steps:
        batches = [part.batch(step) for part in parts]
        together = np.concatenate([indices[~padding] for indices, padding in batches])
        np.testing.assert_array_equal(together, drawn(whole, step))
        for part, (indices, padding) in zip(parts, batches, strict=True):
            assert indices.shape == padding.shape == (parts[0].capacity,)
            np.testing.assert_array_equal(padding, np.sort(padding))
            assert np.all(indices[padding] == -1)
            assert all(int(index) in part.owned for index in indices[~padding])


@given(st.integers(1, 50) | st.integers(1, 2**53), st.integers(1, 30))
def test_every_example_has_one_host(n, hosts):
    owned = [part.owned for part in on_hosts(hosts, PoissonSampler(n, 0.5, seed=0))]
    assert [part.start for part in owned] == [0, *(part.stop for part in owned[:-1])]
    assert owned[-1].stop == n
    sizes = [part.stop - part.start for part in owned]
    assert max(sizes) - min(sizes) <= 1


def test_counts_of_hosts_are_binomial_and_independent():
    parts = on_hosts(3, PoissonSampler(num_examples=50, sampling_prob=0.3, seed=5))
    counts = np.array([[len(drawn(part, step)) for part in parts] for step in range(STEPS)])
    for part, of_part in zip(parts, counts.T, strict=True):
        assert chi_square_of_counts(of_part, stats.binom(len(part.owned), 0.3)) > 1e-3
    # Of a batch of one fixed size they would have a correlation of -1/2.
    for one, other in itertools.combinations(counts.T, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(STEPS)


@pytest.mark.parametrize(("pad_to", "capacity"), [(1, 13), (4, 16)])
def test_certain_examples_are_all_drawn_by_their_hosts(pad_to, capacity):
    for part in on_hosts(3, PoissonSampler(37, 1, seed=0, pad_to=pad_to)):
        indices, is_padding_example = part.batch(5)
        assert part.capacity == len(indices) == capacity
        assert indices[~is_padding_example].tolist() == list(part.owned)


def test_a_host_that_owns_nothing_has_padding():
    parts = on_hosts(5, PoissonSampler(num_examples=3, sampling_prob=1, seed=0, pad_to=2))
    assert sorted(len(part.owned) for part in parts) == [0, 0, 1, 1, 1]
    for part in parts:
        assert part.batch(0)[0].tolist() == ([*part.owned, -1, -1])[:2]


# Capacity.


def exact_tail(n, q, capacity):
    """P(Binomial(n, q) > capacity), in rational numbers."""
    p = Fraction(q)
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(capacity + 1, n + 1))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40),
    st.floats(1e-7, 1.0),
    st.integers(1, 7),
    st.integers(1, 6),
    st.sampled_from([1e-3, 1e-12, 1e-17, 1e-25]),
)
def test_capacity_is_the_smallest_that_hardly_overflows(n, q, pad_to, hosts, overflow_probability):
    whole = PoissonSampler(n, q, seed=0, pad_to=pad_to, overflow_probability=overflow_probability)
    parts = on_hosts(hosts, whole)
    capacity, most = parts[0].capacity, max(len(part.owned) for part in parts)
    tau = Fraction(overflow_probability) / (1 if hosts == 1 else 2 * hosts)
    assert capacity % pad_to == 0
    assert exact_tail(most, q, capacity) <= tau * (1 + Fraction(1, 10**9))
    if capacity > pad_to:
        assert exact_tail(most, q, capacity - pad_to) > tau * (1 - Fraction(1, 10**9))


@pytest.mark.parametrize(
    ("n", "q"),
    [
        (60_000, 256 / 60_000),
        (1797, 0.15),
        (10**9, 1e-6),
        (10**12, 1e-9),
        (10**6, 0.999),
        (500, 1.0),
    ],
)
def test_capacity_of_large_data(n, q):
    capacity = PoissonSampler(n, q, seed=0).capacity
    assert n * q <= capacity <= n
    assert stats.binom.sf(capacity, n, q) <= OVERFLOW_PROBABILITY
    assert stats.binom.sf(capacity - 1, n, q) > OVERFLOW_PROBABILITY
    padded = PoissonSampler(n, q, seed=0, pad_to=64).capacity
    assert padded == math.ceil(capacity / 64) * 64


def tail(n, q, capacity):
    """P(Binomial(n, q) > capacity) in fifty digits, its terms added until they are none."""
    with decimal.localcontext(prec=50):
        q, first = decimal.Decimal(q), capacity + 1
        none_of_the_rest = ((1 - q).ln() * (n - first)).exp()
        term = math.comb(n, first) * q**first * none_of_the_rest
        total, k = decimal.Decimal(0), first
        while term > total * decimal.Decimal("1e-30"):
            total, term, k = total + term, term * (n - k) / (k + 1) * q / (1 - q), k + 1
        return total


# Down to what a plan of delta 1e-10 and 10^5 steps asks of each of 10^4 hosts, and below.
@pytest.mark.parametrize("overflow_probability", [1e-12, 1.1e-18, 5e-23, 1e-40])
@pytest.mark.parametrize(
    ("n", "q"), [(60_000, 256 / 60_000), (1797, 0.15), (10**9, 4.08e-6), (2**53, 1e-13), (900, 0.9)]
)
def test_capacity_in_the_far_tail(n, q, overflow_probability):
    capacity = PoissonSampler(n, q, seed=0, overflow_probability=overflow_probability).capacity
    tau = decimal.Decimal(overflow_probability)
    assert tail(n, q, capacity) <= tau * decimal.Decimal("1.000000001")
    assert tail(n, q, capacity - 1) > tau * decimal.Decimal("0.999999999")


def test_capacity_has_room_for_one():
    assert PoissonSampler(num_examples=10, sampling_prob=1e-15, seed=0).capacity == 1


def test_overflow_is_cut_at_random():
    sampler = PoissonSampler(40, 0.5, seed=2, overflow_probability=0.9)
    assert sampler.capacity < 20
    times_drawn, full = np.zeros(40), 0
    for step in range(STEPS):
        indices = drawn(sampler, step)
        if len(indices) == sampler.capacity:
            times_drawn[indices] += 1
            full += 1
    # Nine in ten are full, most of them cut; uniform subsets of one size have this covariance.
    assert full > 0.85 * STEPS
    share = sampler.capacity / 40
    z = (times_drawn - full * share) / math.sqrt(full * share * (1 - share) * 40 / 39)
    low, high = stats.chi2.interval(1 - 1e-3, df=39)
    assert low < np.sum(z**2) < high


HOSTS, OWNED = 3, 20


@pytest.fixture
def crowded():
    """The hosts of 60 examples, with room for half of what each owns; and one that is not cut."""
    whole = PoissonSampler(num_examples=HOSTS * OWNED, sampling_prob=0.5, seed=6)
    assert whole.capacity > 50
    return [with_room_for(OWNED // 2, part) for part in on_hosts(HOSTS, whole)], whole


def uniform_subsets(times_kept, sizes):
    """p-value of how often each of some examples was in uniform subsets of the given sizes."""
    number = len(times_kept)
    shares = np.asarray(sizes) / number
    variance = np.sum(shares * (1 - shares)) * number / (number - 1)
    return stats.chi2.sf(np.sum((times_kept - shares.sum()) ** 2) / variance, df=number - 1)


def test_overflow_of_a_host_is_cut_at_random(crowded):
    parts, whole = crowded
    times_kept, full, cut = np.zeros(HOSTS * OWNED), np.zeros(HOSTS, int), 0
    together = [drawn(whole, step) for step in range(STEPS)]
    for step, (host, part) in itertools.product(range(STEPS), enumerate(parts)):
        kept, all_drawn = drawn(part, step), together[step]
        own = [index for index in all_drawn if index in part.owned]
        # Nobody is cut for what others have drawn.
        assert len(kept) == min(len(own), part.capacity)
        assert set(kept) <= set(own)
        cut += len(own) > part.capacity
        if len(kept) == part.capacity:
            times_kept[kept] += 1
            full[host] += 1
    assert cut > 0.15 * STEPS
    for host, part in enumerate(parts):
        assert full[host] > 0.3 * STEPS
        times = times_kept[part.owned.start : part.owned.stop]
        assert uniform_subsets(times, [part.capacity] * full[host]) > 1e-3


def test_hosts_cut_one_draw_independently(crowded, monkeypatch):
    """The first 12 examples of the first host and of the second are drawn, ten of each kept."""
    one_draw = np.concatenate([np.arange(12), OWNED + np.arange(12)])

    class Generator(np.random.Generator):
        def choice(self, a, size, **options):
            return super().choice(a, size, **options) if isinstance(a, np.ndarray) else one_draw

    parts, _ = crowded
    monkeypatch.setattr(np.random, "Generator", Generator)
    kept = np.zeros((STEPS, 2, 12), bool)
    for step, host in itertools.product(range(STEPS), range(2)):
        kept[step, host, drawn(parts[host], step) - parts[host].owned.start] = True
    assert np.all(kept.sum(axis=2) == 10)
    for host in range(2):
        assert uniform_subsets(kept[:, host].sum(axis=0), [10] * STEPS) > 1e-3
    # Two of twelve places are cut; of independent cuts, this many fall on the same place.
    both = np.count_nonzero(~kept[:, 0] & ~kept[:, 1], axis=1)
    same = stats.hypergeom(12, 2, 2)
    assert abs(both.mean() - same.mean()) < 4 * same.std() / math.sqrt(STEPS)


def lost_to_cuts(without_x, with_x, x):
    """What `PrivacyPlan.overflow_delta` takes away: one side has the example x, one has not.

    Both are all hosts' samplers, on data sets that are the same but for the example in place x.
    """
    others, q = without_x[0].num_examples, with_x[0].sampling_prob
    batches = np.array(list(itertools.product([False, True], repeat=others)))
    sizes = batches.sum(axis=1)
    probability = q**sizes * (1 - q) ** (others - sizes)

    def overflows(hosts, batches):
        parts = [batches[:, part.owned.start : part.owned.stop].sum(axis=1) for part in hosts]
        return np.max(parts, axis=0) > hosts[0].capacity

    either = overflows(without_x, batches) | overflows(with_x, np.insert(batches, x, False, 1))
    if_x_is_drawn = overflows(with_x, np.insert(batches, x, True, 1))
    return np.sum(probability * np.where(either, 1.0, q * if_x_is_drawn))


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("q", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("others", [3, 8, 9])
def test_neighbors_lose_no_more_than_is_paid_for(hosts, q, others):
    owned, closest = math.ceil(others / hosts), 0.0
    for capacity, factor in itertools.product(range(1, owned), (1, hosts, 2 * hosts)):
        # What some capacity overflows with, times this: some are chosen with nothing to spare.
        tau = factor * float(stats.binom.sf(capacity, owned, q)) * (1 + 1e-9)
        if tau >= 1:
            continue
        without_x, with_x = (
            on_hosts(hosts, PoissonSampler(n, q, seed=0, overflow_probability=tau))
            for n in (others, others + 1)
        )
        lost = max(lost_to_cuts(without_x, with_x, x) for x in range(others + 1))
        assert lost <= tau
        closest = max(closest, lost / tau)
    if (hosts, q, others) == (3, 0.02, 8):
        # What is paid for either side alone would not do for both.
        assert closest > 0.8


# Cost.


def peak_bytes(sampler):
    sampler.batch(0)
    tracemalloc.start()
    try:
        sampler.batch(1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [10**9, 10**12])
def test_memory_is_that_of_a_batch_not_of_the_data(n):
    small = PoissonSampler(num_examples=10**4, sampling_prob=0.1, seed=0)
    large = PoissonSampler(num_examples=n, sampling_prob=1000 / n, seed=0)
    assert peak_bytes(large) < 2 * peak_bytes(small)
    assert peak_bytes(large) < 100 * large.capacity


def test_memory_of_a_host_is_that_of_all_hosts_batches():
    whole = PoissonSampler(num_examples=10**9, sampling_prob=1e-5, seed=0)
    for part in (on_hosts(4, whole)[2], on_hosts(100, whole)[2]):
        assert peak_bytes(part) < 100 * whole.capacity


@pytest.mark.parametrize("share", [0.01, 0.04, 0.06, 0.5, 1.0])
def test_memory_of_a_large_batch_is_a_constant_a_place(share):
    sampler = PoissonSampler(num_examples=10**6, sampling_prob=share, seed=0)
    assert peak_bytes(sampler) < 200 * sampler.capacity


# Refusals.

GOOD = {"num_examples": 100, "sampling_prob": 0.5, "seed": 0, "pad_to": 1, "hosts": 3}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("num_examples", value) for value in (0, -3, 2.0, True, "9", None, 2**53 + 1)],
        *[("sampling_prob", value) for value in (0, -0.1, 1.1, math.nan, math.inf, True, "0.5")],
        *[("seed", value) for value in (-1, 1.5, False, "1", b"")],
        *[("overflow_probability", value) for value in (0, 1, -1e-12, math.nan, True, "1e-12")],
        *[("pad_to", value) for value in (0, -8, 1.0, True)],
        *[("hosts", value) for value in (0, -2, 2.0, True, None, 2**53 + 1)],
        *[("host", value) for value in (3, -1, 1.0, False, None, 2**60)],
    ],
)
def test_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*found"):
        PoissonSampler(**(GOOD | {name: value}))


def test_a_host_out_of_range_is_told_how_many_there_are():
    with pytest.raises(ValueError, match=r"host must be at most 2; found 3"):
        PoissonSampler(**GOOD, host=3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, 2**64])
def test_step_refused_by_name(step):
    with pytest.raises(ValueError, match=r"^step must be"):
        PoissonSampler(**GOOD).batch(step)
