"""Which examples a step draws, in which slots, and how many slots there are."""

import dataclasses
import decimal
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eqx_dp.privacy import PoissonSampler, PrivacyPlan, Users
from eqx_dp.privacy.sampling import OVERFLOW_PROBABILITY
from tests.tiers import curated

STEPS = 1500


def drawn(sampler, step):
    indices, is_padding_example = sampler.batch(step, peek=True)
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


@pytest.mark.parametrize(("n", "q"), [(10**9, 1e-7), (2**53, 1e-14), (400, 0.97)])
def test_counts_and_places_of_other_data(n, q):
    sampler = PoissonSampler(n, q, seed=3)
    batches = [drawn(sampler, step) for step in range(400)]
    assert chi_square_of_counts(np.array(list(map(len, batches))), stats.binom(n, q)) > 1e-3
    if n > 10**6:
        assert stats.kstest(np.concatenate(batches) / n, "uniform").pvalue > 1e-3


def test_every_example_is_drawn_with_the_sampling_probability(inclusions):
    assert chi_square_of_counts(inclusions.sum(axis=1), stats.binom(50, 0.3)) > 1e-3
    z = (inclusions.sum(axis=0) - STEPS * 0.3) / math.sqrt(STEPS * 0.3 * 0.7)
    low, high = stats.chi2.interval(1 - 1e-3, df=50)
    assert low < np.sum(z**2) < high


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


def test_steps_and_seeds_are_independent(inclusions):
    for lag in (1, 2, 7):
        assert abs(overlap_score(inclusions[lag:], inclusions[:-lag])) < 4
    other = PoissonSampler(num_examples=50, sampling_prob=0.3, seed=12)
    took_part = np.zeros((500, 50), dtype=bool)
    for step in range(500):
        took_part[step, drawn(other, step)] = True
    # Nor is one seed the other, some steps on.
    for one, two in ((0, 0), (0, 1), (1, 0)):
        score = overlap_score(took_part[one:499], inclusions[two : 499 - one + two])
        assert abs(score) < 4


def test_any_example_is_in_any_slot():
    """So that one more example moves only one other: the last."""
    sampler, places = PoissonSampler(40, 0.5, seed=5), [[] for _ in range(40)]
    pairs = 0
    for step in range(STEPS):
        batch = drawn(sampler, step)
        for slot, example in enumerate(batch):
            places[example].append((slot + 0.5) / len(batch))
        pairs += np.sum(np.diff(batch) > 0) - (len(batch) - 1) / 2
    assert all(stats.kstest(of_one, "uniform").pvalue > 1e-5 for of_one in places)
    assert abs(pairs) < 4 * math.sqrt(STEPS * 19 / 4)  # neighbouring slots rise as often as fall


RUN = {"num_examples": 10**6, "sampling_prob": 1e-4, "seed": 7}
OTHERS = [
    ({"num_examples": 10**6 + 1}, 3),
    ({"sampling_prob": 1e-4 * (1 + 1e-9)}, 3),
    ({"seed": 7 + 2**128}, 3),
    ({"seed": b"\7"}, 3),
    ({"seed": 7 + 3 * 2**32}, 0),
    ({}, 4),
]


@pytest.mark.parametrize(("change", "step"), OTHERS)
def test_another_run_or_step_is_another_sample(change, step):
    one, other = drawn(PoissonSampler(**RUN), 3), drawn(PoissonSampler(**RUN | change), step)
    assert np.intersect1d(one, other).size <= 3


@pytest.mark.parametrize("change", [{"pad_to": 64}, {"steps": 10}, {"overflow_probability": 1e-17}])
def test_the_shape_of_batches_does_not_change_the_sample(change):
    batches = [drawn(PoissonSampler(**(RUN | arguments)), 3) for arguments in ({}, change)]
    np.testing.assert_array_equal(*batches)


@pytest.mark.parametrize("hosts", [1, 2, 7])
def test_batches_stay_what_they_are(hosts):
    # An experiment with a seed repeats under a later release, and on more or fewer hosts. If this
    # fails, the way from (seed, step) to a batch has changed.
    whole = PoissonSampler(num_examples=10**6, sampling_prob=4e-6, seed=2**100 + 1)
    parts = on_hosts(hosts, whole)
    known = {0: [352973, 382174, 491426, 700789, 872552], 10**6: [289349, 752806]}
    for step, expected in known.items():
        assert sorted(int(i) for part in parts for i in drawn(part, step)) == expected


# Examples and mask together.


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 40),
    st.floats(0.01, 1),
    st.integers(1, 9),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(["float32", "int32", "uint8", "bool", "bfloat16"]),
)
def test_taken_examples_are_those_of_the_batch(n, q, pad_to, hosts, shape, dtype):
    xs = np.arange(1, n * math.prod(shape) + 1).reshape(n, *shape).astype(jnp.dtype(dtype))
    sources = {"x": xs, "more": [xs[..., None], None]}, xs, jnp.asarray(xs)
    for part in on_hosts(hosts, PoissonSampler(n, q, seed=5, pad_to=pad_to)):
        examples, is_padding_example = part.take(1, *sources)
        assert jax.tree.structure(examples) == jax.tree.structure(sources)
        indices = part.batch(1, peek=True)[0]
        for taken, source in zip(jax.tree.leaves(examples), jax.tree.leaves(sources), strict=True):
            assert (type(taken), taken.dtype) == (type(source), source.dtype)
            expected = np.asarray(source)[indices[~is_padding_example]]
            np.testing.assert_array_equal(taken[~is_padding_example], expected)
            # What adds nothing if the mask is forgotten, where the dtype has it.
            nothing = np.nan if "float" in dtype else 0
            np.testing.assert_array_equal(np.asarray(taken[is_padding_example], float), nothing)


def test_a_step_is_asked_for_once():
    users, xs = Users(np.arange(60), 1), np.ones(60)
    for ask in (
        PoissonSampler.batch,
        lambda *asked, **peek: PoissonSampler.take(*asked, xs, **peek),
        users.rows,
        lambda *asked, **peek: users.take(*asked, xs, **peek),
    ):
        sampler = PoissonSampler(60, 0.2)
        for step in (3, 0, 1):
            np.testing.assert_equal(ask(sampler, step, peek=True), ask(sampler, step))
            with pytest.raises(ValueError, match=rf"has drawn step {step} before.*over all epochs"):
                ask(sampler, step)


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ((), "at least one source"),
        ((np.ones(59),), r"source 0 has shape \(59,\), and the data set has 60"),
        ((np.ones(60), {"x": jnp.ones((1, 60))}), r"source 1 at x has shape \(1, 60\)"),
        ((None,), "source 0 holds no arrays"),
        (([1.0] * 60,), r"source 0 at 0 is a float, not an array"),
    ],
)
def test_what_is_no_source_is_refused(sources, reason):
    with pytest.raises(ValueError, match=reason):
        PoissonSampler(num_examples=60, sampling_prob=0.2, seed=3).take(0, *sources)


# Slots, hosts and devices.


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(1e-6, 1.0),
    st.integers(0, 2**200) | st.binary(min_size=1),
    st.integers(0, 2**64 - 1),
    st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 12)),
    st.booleans(),
)
def test_all_get_what_one_host_would(n, q, seed, step, shape, shared):
    pad_to, devices, hosts = shape
    whole = PoissonSampler(n, q, seed=seed)
    options = {"seed": seed, "pad_to": pad_to, "devices": devices, "shared": shared}
    parts = on_hosts(hosts, PoissonSampler(n, q, **options))
    assert len({part.capacity for part in parts}) == 1
    assert parts[0].capacity % math.lcm(pad_to, devices) == 0
    dealt = []
    for part in parts:
        indices, is_padding_example = part.batch(step)
        assert indices.shape == is_padding_example.shape == (part.capacity,)
        assert (indices.dtype, is_padding_example.dtype) == (np.int64, np.bool_)
        np.testing.assert_array_equal(is_padding_example, indices == -1)
        slots = indices.reshape(devices, -1) < 0
        assert (np.diff(slots, axis=1) >= 0).all()  # examples first, then padding
        assert np.ptp(slots.sum(axis=1)) <= 1
        dealt.append(drawn(part, step))
        assert all(int(index) in part.owned for index in dealt[-1])
    if shared:
        assert np.ptp(list(map(len, dealt))) <= 1
    together = np.concatenate(dealt)
    assert np.unique(together).size == together.size
    np.testing.assert_array_equal(np.sort(together), np.sort(drawn(whole, step)))


def test_devices_are_dealt_to_in_turn():
    """So that the last example, if it leaves, leaves one device alone."""
    one, three = (PoissonSampler(300, 0.3, seed=1, devices=d).batch(0)[0] for d in (1, 3))
    one = one[one >= 0]
    for device, of_device in enumerate(np.split(three, 3)):
        np.testing.assert_array_equal(of_device[of_device >= 0], one[device::3])


@pytest.mark.parametrize(("n", "hosts", "pad_to"), [(500, 1, 1), (37, 1, 1), (37, 3, 4), (3, 5, 2)])
def test_certain_examples_are_all_drawn(n, hosts, pad_to):
    for part in on_hosts(hosts, PoissonSampler(n, 1, seed=0, pad_to=pad_to)):
        assert part.capacity == -(-n // hosts // pad_to) * pad_to
        assert sorted(drawn(part, 5)) == list(part.owned)


@given(st.integers(1, 50) | st.integers(1, 2**53), st.integers(1, 30))
def test_every_example_has_one_host(n, hosts):
    owned = [part.owned for part in on_hosts(hosts, PoissonSampler(n, 0.5, seed=0))]
    assert [part.start for part in owned] == [0, *(part.stop for part in owned[:-1])]
    assert owned[-1].stop == n
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


# Capacity, and what is beyond it.


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
@pytest.mark.parametrize("overflow_probability", [1e-12, 1.1e-18, 1e-40])
@pytest.mark.parametrize(
    ("n", "q"), [(60_000, 256 / 60_000), (1797, 0.15), (10**9, 4.08e-6), (2**53, 1e-13), (900, 0.9)]
)
def test_capacity(n, q, overflow_probability):
    options = {"seed": 0, "overflow_probability": overflow_probability}
    capacity = PoissonSampler(n, q, **options).capacity
    tau = decimal.Decimal(overflow_probability)
    assert tail(n, q, capacity) <= tau * decimal.Decimal("1.000000001")
    assert tail(n, q, capacity - 1) > tau * decimal.Decimal("0.999999999")
    padded = PoissonSampler(n, q, pad_to=64, **options).capacity
    assert padded == math.ceil(capacity / 64) * 64


def test_there_is_always_a_slot():
    assert PoissonSampler(10, 1e-15, seed=0).capacity == 1


@pytest.mark.parametrize("hosts", [1, 3, 8])
def test_shared_examples_overflow_as_one_host_would(hosts):
    part = PoissonSampler(5000, 0.02, seed=0, hosts=hosts, shared=True)
    assert stats.binom.sf(hosts * part.capacity, 5000, 0.02) <= OVERFLOW_PROBABILITY
    assert stats.binom.sf(hosts * (part.capacity - 1), 5000, 0.02) > OVERFLOW_PROBABILITY


def uniform_subsets(times_kept, sizes):
    """p-value of how often each of some examples was in uniform subsets of the given sizes."""
    number = len(times_kept)
    shares = np.asarray(sizes) / number
    variance = np.sum(shares * (1 - shares)) * number / (number - 1)
    return stats.chi2.sf(np.sum((times_kept - shares.sum()) ** 2) / variance, df=number - 1)


@pytest.mark.parametrize("hosts", curated([1, 3], [3]))
@pytest.mark.parametrize("shared", curated([False, True], [True]))
def test_overflow_is_cut_at_random(hosts, shared):
    whole = PoissonSampler(num_examples=60, sampling_prob=0.5, seed=6)
    room = 30 // hosts
    most = room * hosts if shared else room
    parts = [
        with_room_for(room, dataclasses.replace(part, shared=shared))
        for part in on_hosts(hosts, whole)
    ]
    groups = [range(60)] if shared else [part.owned for part in parts]
    times_kept, full = np.zeros(60), np.zeros(len(groups), int)
    for step in range(STEPS):
        kept = [drawn(part, step) for part in parts]
        of_groups = [np.concatenate(kept)] if shared else kept
        for i, (group, its) in enumerate(zip(groups, of_groups, strict=True)):
            own = [index for index in drawn(whole, step) if index in group]
            # Nobody is cut for what others have drawn.
            assert len(set(its)) == len(its) == min(len(own), most)
            assert set(its) <= set(own)
            if len(its) == most:
                times_kept[its] += 1
                full[i] += 1
    for group, times in zip(groups, full, strict=True):
        assert times > 0.3 * STEPS
        kept = times_kept[group.start : group.stop]
        assert uniform_subsets(kept, [most] * times) > 1e-3


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
@pytest.mark.parametrize(("q", "others"), [(0.02, 8), (0.2, 9), (0.5, 3)])
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


# Refusals.

GOOD = {"num_examples": 100, "sampling_prob": 0.5, "seed": 0, "pad_to": 1, "hosts": 3}
BAD = {
    "num_examples": (0, 2.0, True, "9", None, 2**53 + 1),
    "sampling_prob": (0, -0.1, 1.1, math.nan, math.inf, True, "0.5"),
    "seed": (-1, 1.5, False, "1", b""),
    "overflow_probability": (0, 1, -1e-12, math.nan, True, "1e-12"),
    "pad_to": (0, 1.0, True),
    "hosts": (0, 2.0, True, None, 2**53 + 1),
    "host": (3, -1, 1.0, False, None, 2**60),
    "devices": (0, 1.0, True, None),
    "shared": (1,),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "value"), [(name, x) for name, bad in BAD.items() for x in bad])
def test_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*found"):
        PoissonSampler(**(GOOD | {name: value}))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, 2**64])
def test_step_refused_by_name(step):
    with pytest.raises(ValueError, match=r"^step must be"):
        PoissonSampler(**GOOD).batch(step)


def test_a_plan_hands_on_how_a_batch_is_dealt_out():
    plan = PrivacyPlan(sampling_prob=0.05, steps=10, noise_multiplier=1.0, delta=1e-5)
    part = plan.sampler(1000, seed=7, pad_to=16, hosts=2, host=1, devices=3, shared=True)
    assert (part.num_examples, part.kind, part.steps) == (1000, plan.sampling, 10)
    assert (part.seed, part.pad_to, part.hosts, part.host) == (7, 16, 2, 1)
    assert (part.devices, part.shared, part.owned) == (3, True, range(1000))
    assert part.overflow_probability == plan._overflow_probability
    with pytest.raises(ValueError, match="below 10, the number of steps that the plan"):
        part.batch(10)
