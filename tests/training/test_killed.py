"""A run that is killed, starved or told to stop goes on with fresh randomness, and counts right."""

import os
import random
import signal
import time

import pytest

import eqx_dp as dp
from tests.tiers import curated
from tests.training import fire, runs
from tests.training.fire import PLAN, STEPS, Place
from tests.training.processes import Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with Fleet(tmp_path_factory.mktemp("cache")) as made:
        yield made


def assert_counted(place, hosts=1):
    """The ledger never says fewer steps than were taken, and never more than the plan's."""
    recording = place.recording
    if not (place.files / "ledger").is_dir():
        assert recording.taken == 0
        return 0
    noted = sum(entry["steps"] for entry in runs.entries(place.files))
    assert recording.taken <= noted <= PLAN.steps
    if recording.taken:
        assert recording.taken <= runs.stated(place.files)["steps_released"]
        recording.assert_fresh(hosts)
    return noted


def killed(fleet, place, moments, hosts):
    """One start, killed at a random moment; False if it was over before."""
    save_every = moments.choice((1, 2, 3))
    if hosts == 1 and moments.random() < 0.5:
        run = fleet.start(fire.killed_at_a_file, place, save_every, moments.randint(1, 80))
        return run.result() == -signal.SIGKILL
    started = fleet.hosts(hosts, fire.train, place, save_every)
    is_going = started[0].until_step(moments.randint(0, 2))
    time.sleep(moments.uniform(0, 0.15 if hosts == 1 else 0.5))
    for one in moments.sample(started, hosts):
        one.process.kill()
        time.sleep(moments.uniform(0, 0.05))
    for one in started:
        one.result()
    return is_going


def ends(fleet, place, hosts):
    """The run goes on to its end, or says that no steps are left."""
    noted, before = assert_counted(place, hosts), place.recording.taken
    started = fleet.hosts(hosts, fire.train, place, 2)
    statuses = [one.result() for one in started]
    if noted < STEPS:
        assert statuses == [0] * hosts, [one.found for one in started]
        assert place.recording.taken == before + STEPS - noted
    elif statuses != [0] * hosts:
        assert isinstance(started[0].found, dp.CheckpointError)
        assert "all 20 steps" in str(started[0].found)
    assert assert_counted(place, hosts) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "hosts", "is_store", "seed"),
    [(8, 1, False, 1), (8, 1, True, 2), (5, 2, False, 3), (5, 2, True, 4)],
)
def test_killed_at_random_moments(kills, hosts, is_store, seed, fleet, tmp_path):
    """Over several directories: a new one as soon as the plan of one is used up."""
    moments, number, done = random.Random(seed), 0, 0
    place = Place(tmp_path / "0", is_store)
    while done < kills or (hosts == 1 and number == 0):
        done += killed(fleet, place, moments, hosts)
        if assert_counted(place, hosts) == STEPS:
            ends(fleet, place, hosts)
            number += 1
            place = Place(tmp_path / str(number), is_store)
    ends(fleet, place, hosts)
    places = [Place(tmp_path / str(one)) for one in range(number + 1)]
    everything = [noise for one in places for noise in one.recording.noises]
    assert len(set(everything)) == len(everything) > STEPS / 2


@pytest.mark.slow
@pytest.mark.parametrize("is_store", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_at_once_stay_within_the_plan(is_store, fleet, tmp_path):
    place = Place(tmp_path, is_store)
    started = [fleet.start(fire.train, place, 3) for _ in range(2)]
    statuses = [one.result() for one in started]
    assert assert_counted(place) <= STEPS
    for status, one in zip(statuses, started, strict=True):
        assert status == 0 or isinstance(one.found, dp.CheckpointError), one.found
    if assert_counted(place) < STEPS:
        ends(fleet, place, 1)


@pytest.mark.parametrize("number", curated([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_asked_to_stop_it_loses_no_step(number, fleet, tmp_path):
    place = Place(tmp_path)
    run = fleet.start(fire.slowly, place)
    assert run.until_step(3)
    os.kill(run.process.pid, number)
    status = run.result()
    taken = place.recording.taken
    assert 3 <= taken < STEPS
    assert [entry["ended"] for entry in runs.entries(place.files)] == [True]
    assert runs.released(place.files) == taken == runs.saved(place.files)[-1]
    message = f"saved at step {taken} of {STEPS} in {place.directory}; start again to go on."
    if number == signal.SIGTERM:
        assert status == 143
        assert f"eqx_dp: {message}" in (tmp_path / "stderr.txt").read_text()
    else:
        assert "KeyboardInterrupt" in run.found
        assert message in run.found
    run = fleet.start(fire.train, place)
    assert (run.result(), run.found) == (0, (STEPS, []))
    assert place.recording.taken == STEPS == runs.released(place.files)
    place.recording.assert_fresh()


@pytest.mark.slow
def test_interrupted_twice_it_ends_at_once(fleet, tmp_path):
    place = Place(tmp_path)
    run = fleet.start(fire.interrupted_twice, place)
    assert run.until_step(5)  # and waits for a minute
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert run.process.is_alive()
    while run.process.is_alive():  # on a busy machine the first may not have been heard yet
        os.kill(run.process.pid, signal.SIGINT)
        run.process.join(1)
    assert run.process.exitcode == -signal.SIGINT
    assert assert_counted(place) == 6  # the block counts
    ends(fleet, place, 1)


@pytest.mark.slow
def test_two_hosts_stop_together_and_one_does_not_wait_for_a_dead_one(fleet, tmp_path):
    """SIGTERM to one host stops both at one step; a host that is killed ends the other."""
    place = Place(tmp_path)
    started = fleet.hosts(2, fire.slowly, place)
    assert all(one.until_step(3) for one in started)
    started[1].process.terminate()
    assert [one.result() for one in started] == [143, 143]
    taken = place.recording.taken
    assert 3 <= taken == runs.released(place.files) == runs.saved(place.files)[-1] < STEPS
    place = Place(tmp_path / "other")
    for victim in (0, 1):
        started = fleet.hosts(2, fire.slowly, place, 2)
        assert all(one.until_step(1) for one in started)
        started[victim].process.kill()
        assert started[1 - victim].result() not in (0, None)
        assert_counted(place, 2)
    ends(fleet, place, 2)


@pytest.mark.slow
def test_a_full_disk_takes_no_step_that_is_not_noted(fleet, tmp_path):
    place = Place(tmp_path)
    run = fleet.start(fire.with_a_full_disk, place, 64)
    assert run.result() == 1
    assert isinstance(run.found, dp.CheckpointError)
    assert "cannot be noted in" in str(run.found)
    assert "Make room" in str(run.found)
    assert run.steps == 6
    assert sum(entry["steps"] for entry in runs.entries(place.files)) == 6
    run = fleet.start(fire.with_a_full_disk, place, 2**40)
    assert run.result() == 0, run.found
    assert runs.released(place.files) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        # There is room for the ledger's files, and none for the arrays.
        (fire.with_a_full_disk, (16_384,)),
        # Orbax's threads would keep the process, and wait 20 minutes for what was not made.
        (fire.with_saves_swept_away, ()),
    ],
)
def test_checkpoints_that_fail_are_told_and_the_ledger_counts_on(
    scenario, arguments, fleet, tmp_path
):
    place = Place(tmp_path)
    run = fleet.start(scenario, place, *arguments)
    assert run.result() == 0, run.found
    steps, warned = run.found
    assert steps == runs.released(place.files) == STEPS
    assert len(warned) >= 8, warned
    assert all("A checkpoint could not be written" in text for text in warned)
    # Orbax logs nothing of it; tensorstore and asyncio print tracebacks of their own.
    assert "Save Finalize thread" not in (tmp_path / "stderr.txt").read_text()
