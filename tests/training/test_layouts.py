"""A fully sharded run that is killed goes on with other devices, from what was saved."""

import signal
import time

import jax
import numpy as np
import pytest

import eqx_dp as dp
from tests.sharding.fully_sharded_net import batch_of, loss, net, rules_of
from tests.training import runs
from tests.training.fire import Place
from tests.training.processes import Fleet

STEPS = 24
# Little noise: beside it a gradient that is wrong by a percent shows.
PLAN = dp.PrivacyPlan(sampling_prob=0.25, steps=STEPS, noise_multiplier=1.0, delta=1e-5)


def trainer(directory, rules, **options):
    """A trainer whose checkpoints are of every third step."""
    step = runs.make(PLAN, loss=loss, sharding=rules, ema=0.9, microbatch_size=2, method="ghost")
    return runs.trainer(directory, step, batch_of(runs.NUM_EXAMPLES), save_every=3, **options)


def train(place, channel, accumulators, steps):
    """Says each step; no device holds more than its part."""

    def says(event):
        up = event.state.model.up
        sizes = {part.data.size * jax.device_count() for part in up.addressable_shards}
        assert sizes == {up.size}
        channel.send(event.step)
        time.sleep(0.2)

    rules = rules_of(axes={"data": jax.device_count()}, accumulators=accumulators)
    trainer(place.directory, rules, callbacks=[says]).run(init_model=net, steps=steps)


def killed(place, started, beyond):
    """Kills all hosts in the middle, beyond a step that is saved; returns what is saved."""
    assert all(one.until_step(4) for one in started)
    end = time.monotonic() + 200
    while max(runs.saved(place.files), default=0) < beyond:
        assert time.monotonic() < end
        time.sleep(0.02)
    for one in started:
        one.process.kill()
    assert [one.result() for one in started] == [-signal.SIGKILL] * len(started)
    return runs.saved(place.files)[-1]


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_other_devices(tmp_path):
    """8 devices of one process, 2 processes of 4, 4 devices, and one: twice killed in between."""
    place = Place(tmp_path)
    directory = place.files
    with Fleet(tmp_path / "cache") as fleet:
        one = fleet.hosts(1, train, place, "params", STEPS, devices=8)
        first = killed(place, one, beyond=3)
        two = fleet.hosts(2, train, place, "params_once", STEPS, devices=4)
        second = killed(place, two, beyond=first + 3)
        counted = sum(entry["steps"] for entry in runs.entries(directory))
        assert 0 < first < second < counted < STEPS
        (third,) = fleet.hosts(1, train, place, "params", counted + 2, devices=4)
        assert third.result() == 0, third.found
    found = dp.load_model(directory, like=net())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(net()), strict=True):
        assert np.all(np.isfinite(a))
        assert np.max(np.abs(a - b)) > 1e-3
    state = trainer(directory, None).run(net())
    assert runs.released(directory) == STEPS
    assert int(state.step) < STEPS  # of the model: those of killed blocks are lost
