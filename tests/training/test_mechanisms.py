"""Each kind of sampling, correlated noise and users: two hosts train as one does."""

import jax
import numpy as np
import pytest

import eqx_dp as dp
from tests.training import runs
from tests.training.fire import Place
from tests.training.processes import Fleet

CYCLIC, STEPS = dp.sampling.CyclicPoisson(0.5, 2), 4
PLANS = {
    "fixed size": {"sampling": dp.sampling.FixedSize(16, runs.NUM_EXAMPLES)},
    "bins": {"sampling": dp.sampling.BallsInBins(4), "noise": dp.Banded.bisr(2)},
    "allocation": {"sampling": dp.sampling.RandomAllocation(2)},
    "noise drawn again": {"sampling": CYCLIC, "noise": dp.Banded.bisr(3)},
    "noise kept": {"sampling": CYCLIC, "noise": dp.Banded(strategy=(1.0, 0.5, 0.2))},
    "users": {
        "sampling": dp.sampling.Poisson(0.5),
        "unit": dp.Users(np.arange(runs.NUM_EXAMPLES) // 3, 2),
    },
}


def train(place, channel):
    """By plan what a run with a seed ends with, on a mesh of all devices."""
    return {name: trained(place.root / name / "run", name) for name in PLANS}


def trained(directory, name):
    relation = [*dp.NeighboringRelation][name == "fixed size"]
    plan = dp.PrivacyPlan(None, STEPS, 1.0, 0.01, relation, **PLANS[name])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    examples = runs.NUM_EXAMPLES if plan.unit is None else plan.unit.num_users
    step = runs.seeded(plan, sharding=dp.ShardingRules(mesh), num_examples=examples)
    state = runs.trainer(directory, step).run(runs.small_model())
    return [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(state.model)]


@pytest.mark.slow
def test_two_hosts_train_as_one(tmp_path):
    """Each plan in turn, by the same processes."""
    ended = []
    with Fleet(tmp_path / "cache") as fleet:
        for hosts in (1, 2):
            place = Place(tmp_path / str(hosts))
            started = fleet.hosts(hosts, train, place, devices=4 // hosts)
            assert [one.result() for one in started] == [0] * hosts, [x.found for x in started]
            assert all(runs.released(place.root / name / "run") == STEPS for name in PLANS)
            ended += [one.found[0] for one in started]
    for name in PLANS:
        for alone, *both in zip(*(found[name] for found in ended), strict=True):
            assert np.all(alone != 0), name
            for other in both:
                np.testing.assert_allclose(other, alone, rtol=1e-3, atol=1e-3, err_msg=name)
