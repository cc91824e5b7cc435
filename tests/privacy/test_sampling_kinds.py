"""Kinds of sampling: their draws against a plain draw of each example, and their capacities."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

import eqx_dp as dp
from eqx_dp.privacy import Sampler
from tests.privacy.test_sampling import on_hosts
from tests.tiers import curated

KINDS = [
    dp.sampling.Poisson(0.2),
    dp.sampling.CyclicPoisson(0.6, 3),
    dp.sampling.FixedSize(7, 30),
    dp.sampling.BallsInBins(4),
    dp.sampling.RandomAllocation(4),
]
STEPS, RUNS, EXAMPLES = 9, 250, 30


def plain(kind, random):
    """Which of the examples take part in which step, one example after the other."""
    took_part = np.zeros((STEPS, EXAMPLES), bool)
    if isinstance(kind, dp.sampling.FixedSize):
        for step in range(STEPS):
            took_part[step, random.permutation(EXAMPLES)[: kind.batch_size]] = True
        return took_part
    cycle, prob = getattr(kind, "cycle", 1), getattr(kind, "sampling_prob", 1.0)
    for example in range(EXAMPLES):
        place = random.integers(cycle)
        for step in range(STEPS):
            if isinstance(kind, dp.sampling.RandomAllocation) and step % cycle == 0:
                place = random.integers(cycle)  # anew in each cycle
            took_part[step, example] = step % cycle == place and random.random() < prob
    return took_part


def drawn(kind, run, order=range(STEPS)):
    sampler = Sampler(EXAMPLES, kind, seed=2**64 + run)
    took_part = np.zeros((STEPS, EXAMPLES), int)
    for step in order:
        indices, is_padding_example = sampler.batch(step, peek=True)
        took_part[step, indices[~is_padding_example]] += 1
    assert took_part.max() <= 1
    return took_part.astype(bool)


def chi_square(one, other):
    """p-value of two lists of counts having one distribution."""
    values, codes = np.unique(np.concatenate([one, other]), return_inverse=True)
    table = [np.bincount(part, minlength=len(values)) for part in np.split(codes, [len(one)])]
    table = np.array(table)[:, np.sum(table, axis=0) > 20]
    return 1.0 if table.shape[1] < 2 else stats.chi2_contingency(table).pvalue


@pytest.mark.parametrize("kind", curated(KINDS, KINDS[1:5]), ids=str)
def test_draws_are_those_of_a_plain_draw(kind):
    random = np.random.default_rng(5)
    ours = np.array([drawn(kind, run) for run in range(RUNS)])
    truth = np.array([plain(kind, random) for _ in range(RUNS)])
    assert abs(ours.mean() - kind.step_prob) < 5 * math.sqrt(0.25 / ours.size)
    # Each example's steps, of all 2^9; the sizes of batches; those of two steps together.
    codes = [np.einsum("rse,s->re", x, 2 ** np.arange(STEPS)).ravel() for x in (ours, truth)]
    assert chi_square(*codes) > 1e-3
    sizes = [x.sum(2) for x in (ours, truth)]
    for step in (0, 1, STEPS - 1):
        assert chi_square(*(size[:, step] for size in sizes)) > 1e-3
        assert chi_square(*(size[:, step] + size[:, step // 2] for size in sizes)) > 1e-3
    # Examples are as likely as each other, pairs too.
    together = np.corrcoef(ours.reshape(-1, EXAMPLES).T.astype(float))
    expected = -1 / (EXAMPLES - 1) if isinstance(kind, dp.sampling.FixedSize) else 0.0
    deviations = (together[np.triu_indices(EXAMPLES, 1)] - expected) * math.sqrt(RUNS * STEPS)
    assert np.abs(deviations).max() < 9  # steps of an example are not independent
    assert np.abs(ours.mean((0, 1)) - kind.step_prob).max() < 5 * math.sqrt(0.25 / RUNS / 2)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_batch_depends_on_seed_and_step_alone(kind):
    expected = drawn(kind, 1)
    np.testing.assert_array_equal(drawn(kind, 1, order=[8, 0, 3, 2, 7, 6, 5, 4, 1]), expected)
    assert (drawn(kind, 2) != expected).any()
    whole = Sampler(EXAMPLES, kind, seed=3)
    relation = [*dp.NeighboringRelation][isinstance(kind, dp.sampling.FixedSize)]
    plan = dp.PrivacyPlan(None, 12, 1.0, 1e-5, relation, sampling=kind)
    assert dp.PrivacyPlan.from_json(plan.to_json()) == plan
    for shared in (False, True):
        parts = on_hosts(3, dataclasses.replace(whole, devices=2, shared=shared))
        assert len({part.capacity for part in parts}) == 1
        together = np.concatenate([part.batch(4, peek=True)[0] for part in parts])
        indices = whole.batch(4, peek=True)[0]
        dealt, all_at_once = (np.sort(its[its >= 0]) for its in (together, indices))
        np.testing.assert_array_equal(dealt, all_at_once)


@pytest.mark.parametrize("hosts", [1, 2, 5])
@pytest.mark.parametrize("tau", [0.01, 0.2])
@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_one_more_example_has_a_slot(kind, hosts, tau):
    """What `overflow.md` takes away: the others leave no room, on the host of the example."""
    capacity = Sampler(EXAMPLES, kind, seed=1, overflow_probability=tau, hosts=hosts).capacity
    part, allowed = -(-EXAMPLES // hosts), tau if hosts == 1 else tau / (2 * hosts)
    most, of_others = part, stats.binom(part - 1, kind.step_prob)
    if isinstance(kind, dp.sampling.FixedSize):
        most = min(part, kind.batch_size)
        of_others = stats.hypergeom(EXAMPLES - 1, part - 1, kind.batch_size)
    assert capacity == most or of_others.sf(capacity - 1) <= allowed
    assert capacity <= most


BAD = [
    ("sampling_prob", dp.sampling.CyclicPoisson, (0.0, 3)),
    ("cycle", dp.sampling.CyclicPoisson, (0.5, 0)),
    ("cycle", dp.sampling.BallsInBins, (2.5,)),
    ("batch_size", dp.sampling.FixedSize, (31, 30)),
    ("num_examples", Sampler, (31, dp.sampling.FixedSize(7, 30))),
    ("kind", Sampler, (31, 0.5)),
    ("devices", lambda *known: Sampler(*known, devices=2**53 + 1), (31, KINDS[0])),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "make", "arguments"), BAD)
def test_refused_by_name(name, make, arguments):
    with pytest.raises(ValueError, match=f"^{name} must .*found"):
        make(*arguments)
