"""A run that is killed, starved or told to stop ends as if nothing had happened."""

import json
import multiprocessing
import os
import random
import re
import signal
import time

import numpy as np
import pytest

from eqx_dp.training.parts import problem_of
from tests.training import fire
from tests.training.fire import PLAN, STEPS
from tests.training.runs import assert_agrees, latest


class Run:
    """A process of `fire.start`."""

    def __init__(self, context, cache, scenario, directory, *arguments):
        self._channel, other = context.Pipe(duplex=False)
        target = (scenario, directory, cache, other, *arguments)
        self.process = context.Process(target=fire.start, args=target)
        self.process.start()
        other.close()

    def until_step(self, count):
        """Waits until so many steps have been taken by this process; false if it ended before."""
        try:
            for _ in range(count):
                assert self._channel.poll(120)
                self._channel.recv()
        except EOFError:
            return False
        return True

    def result(self):
        """What the scenario returned, and the warnings; None if it did not return."""
        found = None
        try:
            while self._channel.poll(120):
                message = self._channel.recv()
                found = found if isinstance(message, int) else message
        except EOFError:
            pass
        self.process.join(120)
        return found


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.fire", "tests.training.host"])
    cache, started = tmp_path_factory.mktemp("cache"), []

    def start(scenario, directory, *arguments):
        started.append(Run(context, cache, scenario, directory, *arguments))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.join()


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """What a run leaves that nothing disturbs."""
    found, warnings = start(fire.train, tmp_path_factory.mktemp("whole")).result()
    assert warnings == []
    return found


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_whole(directory):
    """The checkpoint that counts is, to the last byte."""
    assert problem_of(latest(directory)) is None


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments(kills, start, whole, tmp_path):
    """Half of them at a random thing that is done with a file, half by the clock."""
    moments, counts, during_saves = random.Random(0), 0, 0
    for kill in range(kills):
        save_every = moments.choice((1, 2))
        if kill % 2:
            run = start(fire.killed_at_a_file, tmp_path, save_every, moments.randint(1, 120))
        else:
            run = start(fire.train, tmp_path, save_every)
            assert run.until_step(moments.randint(1, 2))
            time.sleep(moments.uniform(0, 0.15))
            run.process.kill()
        assert run.result() is None, "it was over before it was killed"
        assert run.process.exitcode == -signal.SIGKILL
        now = assert_agrees(tmp_path, PLAN)
        assert now >= counts
        counts = now
        if counts:
            assert_whole(tmp_path)
        during_saves += any(int(folder.name) > counts for folder in tmp_path.glob("0*"))
    assert during_saves >= kills // 4
    assert 0 < counts < STEPS
    found, _ = start(fire.train, tmp_path).result()
    assert_equal(found, whole)
    assert assert_agrees(tmp_path, PLAN) == STEPS


def test_asked_to_stop_it_saves_and_goes(start, whole, tmp_path):
    run = start(fire.train, tmp_path, 1000)  # nothing is saved but for the signal
    assert run.until_step(3)
    os.kill(run.process.pid, signal.SIGTERM)
    run.result()
    assert run.process.exitcode == 0
    assert 3 <= assert_agrees(tmp_path, PLAN) < STEPS
    assert_whole(tmp_path)
    found, warnings = start(fire.train, tmp_path).result()
    assert warnings == []
    assert_equal(found, whole)


def test_interrupted_it_saves_and_says_so(start, whole, tmp_path):
    run = start(fire.interrupted, tmp_path)
    assert run.until_step(3)
    os.kill(run.process.pid, signal.SIGINT)
    message, warnings = run.result()
    assert warnings == []
    saved = assert_agrees(tmp_path, PLAN)
    assert 3 <= saved < STEPS
    assert f"The run is saved up to step {saved}, in {tmp_path / f'{saved:08d}'}." in message
    assert (tmp_path / f"released_at_most.{saved:08d}").exists()
    assert_whole(tmp_path)
    found, _ = start(fire.train, tmp_path).result()
    assert_equal(found, whole)


def test_interrupted_twice_it_ends_at_once(start, whole, tmp_path):
    run = start(fire.interrupted_twice, tmp_path)
    assert run.until_step(5)  # and waits for a minute
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert run.process.is_alive()
    for _ in range(20):  # on a busy machine the first may not have been heard yet
        os.kill(run.process.pid, signal.SIGINT)
        run.process.join(1)
        if not run.process.is_alive():
            break
    assert run.process.exitcode == -signal.SIGINT
    assert assert_agrees(tmp_path, PLAN) == 4
    assert (tmp_path / "released_at_most.00000006").exists()
    found, _ = start(fire.train, tmp_path).result()
    assert_equal(found, whole)


def test_a_full_disk_is_told_and_outlived(start, whole, tmp_path):
    (found, seen), warnings = start(fire.with_a_full_disk, tmp_path, 3, 5).result()
    assert_equal(found, whole)
    assert seen == [2]  # while it was full, the last good one counted
    failed = [int(re.search(r"state of step (\d+)", text)[1]) for text in warnings]
    assert failed[:2] == [3, 4]
    assert failed[2:] in ([5], [])  # which may still be under way when there is room again
    for text in warnings:
        assert "last good checkpoint: it is that of step 2, and whole" in text
        assert "too large" in text or "EFBIG" in text or "File" in text
    assert assert_agrees(tmp_path, PLAN) == STEPS
    assert_whole(tmp_path)


def test_a_disk_that_stays_full_leaves_the_last_checkpoint(start, whole, tmp_path):
    (found, _), warnings = start(fire.with_a_full_disk, tmp_path, 4, STEPS).result()
    assert_equal(found, whole)
    assert len(warnings) == STEPS - 3
    assert assert_agrees(tmp_path, PLAN) == 3
    assert_whole(tmp_path)
    assert max(int(folder.name) for folder in tmp_path.glob("0*")) == 3
    found, warnings = start(fire.train, tmp_path).result()
    assert warnings == []
    assert_equal(found, whole)


def test_a_source_that_fails_stops_a_run_that_can_be_resumed(start, whole, tmp_path):
    message, _ = start(fire.with_a_failing_source, tmp_path, 8).result()
    assert message.startswith("data, a Failing: the source raised OSError when")
    assert "the disk has gone" not in message
    assert assert_agrees(tmp_path, PLAN) == 6
    assert_whole(tmp_path)
    found, _ = start(fire.train, tmp_path).result()
    assert_equal(found, whole)


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_steps(start, tmp_path):
    seen, warnings = start(fire.for_ten_thousand_steps, tmp_path).result()
    assert warnings == []
    assert set(seen) == set(range(1000, 10_001, 1000))
    assert seen[10_000] - seen[2_000] < 3, seen
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 10_001))
