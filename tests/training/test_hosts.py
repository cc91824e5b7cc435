"""Two hosts train together, stop together, and go on together."""

import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from eqx_dp.training.parts import problem_of, read_list

import eqx_dp as dp
from tests.training import host as one_host
from tests.training import runs
from tests.training.host import PLAN, STEPS
from tests.training.runs import assert_agrees


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Hosts:
    """Two processes of `tests.training.host`, and what they print."""

    def __init__(self, directory, cache, pause=0.1, how=""):
        port = free_port()
        self.directory = directory
        self.outputs = [directory.parent / f"host{host}.txt" for host in range(2)]
        self.processes = []
        for host, output in enumerate(self.outputs):
            arguments = [str(x) for x in (host, port, directory, cache, pause, how)]
            with output.open("w") as stream:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.training.host", *arguments],
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                    )
                )

    def until_step(self, number):
        """Waits until both have taken it."""
        end = time.monotonic() + 400
        while not all(f"step {number}\n" in output.read_text() for output in self.outputs):
            assert all(process.poll() is None for process in self.processes), self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.02)

    def until_said(self, host, words):
        """What a host has printed; its watchdog may outlive it for a while."""
        end = time.monotonic() + 120
        while words not in (output := self.outputs[host].read_text()) and time.monotonic() < end:
            time.sleep(0.02)
        return output

    def statuses(self):
        """A host whose collective hangs is ended by JAX's heartbeat, after 100 s."""
        try:
            return [process.wait(400) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def said(self):
        return "\n".join(output.read_text()[-3000:] for output in self.outputs)


def params(directory, cache, how=""):
    """What a run ends with that nothing disturbs (any more); forked, for speed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.fire", "tests.training.host"])
    port = free_port()
    outputs = [directory.parent / f"host{host}.txt" for host in range(2)]
    processes = [
        context.Process(
            target=one_host.forked,
            args=(output, host, port, str(directory), str(cache), 0, how),
        )
        for host, output in enumerate(outputs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
        process.kill()
    said = "\n".join(output.read_text()[-3000:] for output in outputs)
    assert [process.exitcode for process in processes] == [0, 0], said
    assert assert_agrees(directory, PLAN) == STEPS
    return list(np.load(directory.parent / "params.npz").values())


def assert_both_stop_when_asked(directory, cache):
    """SIGTERM to one: both save the same step."""
    hosts = Hosts(directory, cache)
    hosts.until_step(3)
    hosts.processes[1].terminate()
    assert hosts.statuses() == [0, 0], hosts.said()
    saved = assert_agrees(directory, PLAN)
    assert 3 <= saved < STEPS
    for output in hosts.outputs:
        assert re.findall(r"step (\d+)\n", output.read_text())[-1] == str(saved)


def assert_one_stops_without_the_other(directory, cache, victim, step):
    """Host `victim` is killed after a step of the run."""
    hosts = Hosts(directory, cache)
    hosts.until_step(step)
    hosts.processes[victim].kill()
    statuses = hosts.statuses()
    assert statuses[victim] == -signal.SIGKILL
    assert statuses[1 - victim] != 0
    output = hosts.until_said(1 - victim, "eqx_dp: ")
    message = re.search(
        rf"eqx_dp: Host {victim} of 2 ended without a word after step (\d+)\. "
        rf"Host {1 - victim} has taken (\d+) steps and stops.* "
        r"The last checkpoint is that of step (\d+) in (\S+)\. "
        r"Start the program again on all hosts",
        output,
    )
    assert message, output[-3000:]
    assert int(message[1]) >= step
    assert int(message[2]) >= step
    assert int(message[3]) == assert_agrees(directory, PLAN) >= 3
    assert message[4] == str(directory)
    assert problem_of(runs.latest(directory)) is None


@pytest.mark.slow
def test_two_hosts_stop_and_go_on_together(tmp_path):
    """One run, stopped once and killed twice, ends with the parameters of an undisturbed one.

    Host 0 runs JAX's coordinator, so that its loss is another story than that of host 1.
    """
    for folder in ("cache", "whole", "disturbed"):
        (tmp_path / folder).mkdir()
    cache, directory = tmp_path / "cache", tmp_path / "disturbed" / "run"
    whole = params(tmp_path / "whole" / "run", cache)
    assert_both_stop_when_asked(directory, cache)
    assert_one_stops_without_the_other(directory, cache, victim=0, step=12)
    assert_one_stops_without_the_other(directory, cache, victim=1, step=18)
    for a, b in zip(params(directory, cache), whole, strict=True):
        np.testing.assert_array_equal(a, b)
    listed = read_list(runs.latest(directory))
    assert {name.split("/")[1] for name in listed if ".process" in name} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }


@pytest.mark.slow
def test_two_hosts_stop_within_a_call(tmp_path):
    """They are asked in the middle of one: both take the same steps, and no call more than that."""
    for folder in ("cache", "run"):
        (tmp_path / folder).mkdir()
    hosts = Hosts(tmp_path / "run" / "run", tmp_path / "cache", 0.3, "several")
    hosts.until_step(6)  # of 6 to 8
    hosts.processes[1].terminate()
    assert hosts.statuses() == [0, 0], hosts.said()
    saved = assert_agrees(hosts.directory, PLAN)
    assert 8 <= saved < STEPS  # JAX needs a moment to tell both
    assert saved % 5 in (3, 4, 0)  # where calls end: a checkpoint is due after every fifth step
    for output in hosts.outputs:
        assert re.findall(r"step (\d+)\n", output.read_text())[-1] == str(saved)


@pytest.mark.slow
def test_two_hosts_share_a_draw_and_make_a_model(tmp_path):
    """They end as one process on two devices does, up to rounding, and read one another's part."""
    for folder in ("cache", "run"):
        (tmp_path / folder).mkdir()
    of_two = params(tmp_path / "run" / "run", tmp_path / "cache", "shared")
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    rules = dp.ShardingRules(mesh, accumulators="examples")
    step = runs.make(PLAN, sharding=rules, shared=True)
    of_one = runs.trainer(None, step).run(init_model=runs.small_model)
    for a, b in zip(of_two, runs.leaves(of_one.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
