"""A fully sharded run that is killed, and goes on with other devices, ends as an unsharded one."""

import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import numpy as np
import pytest

from tests.sharding.fully_sharded_net import net
from tests.training.layouts import PLAN, STEPS, trainer
from tests.training.runs import assert_agrees
from tests.training.test_hosts import free_port


class Processes:
    """The processes of a run on one layout of devices, and what they print."""

    def __init__(self, folder, environment, hosts, devices, *options):
        self.directory, port = folder / "run", free_port()
        told = (self.directory, folder / "cache", *options)
        self.outputs = [folder / f"host{host}.txt" for host in range(hosts)]
        self.processes = []
        for host, output in enumerate(self.outputs):
            arguments = [str(x) for x in (host, hosts, devices, port, *told)]
            with output.open("w") as stream:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.training.layouts", *arguments],
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )

    def killed_after(self, step):
        """Kills all of them in the middle, beyond a step that is saved; returns what is saved."""
        end = time.monotonic() + 400
        try:
            while not (self.all_said(f"step {step + 1}\n") and self.saved() >= step):
                assert all(process.poll() is None for process in self.processes), self.said()
                assert time.monotonic() < end, self.said()
                time.sleep(0.02)
        finally:
            for process in self.processes:
                process.kill()
        statuses = [process.wait(400) for process in self.processes]
        assert statuses == [-signal.SIGKILL] * len(statuses), self.said()
        return self.saved()

    def saved(self):
        return assert_agrees(self.directory, PLAN)

    def all_said(self, line):
        return all(line in output.read_text() for output in self.outputs)

    def ended(self):
        """Waits until they have taken their steps."""
        try:
            assert [x.wait(400) for x in self.processes] == [0] * len(self.processes), self.said()
        finally:
            for process in self.processes:
                process.kill()

    def said(self):
        return "\n".join(output.read_text()[-3000:] for output in self.outputs)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_other_devices(tmp_path, fast):
    """8 devices of one process, 2 processes of 4, 4 devices, and one: twice killed in between.

    The two processes take three steps a call. Model, Adam's moments and average are those of a run
    without a mesh that nothing disturbs.
    """
    directory = tmp_path / "run"
    first = Processes(tmp_path, fast, 1, 8, "params", STEPS, 1).killed_after(step=3)
    second = Processes(tmp_path, fast, 2, 8, "params_once", STEPS, 3).killed_after(first + 3)
    third = second + 2
    Processes(tmp_path, fast, 1, 4, "params", third, 1).ended()
    assert 0 < first < second < third == assert_agrees(directory, PLAN) < STEPS
    found = trainer(directory, None).run(net())
    expected = trainer(None, None).run(net())
    assert assert_agrees(directory, PLAN) == int(found.step) == int(expected.step) == STEPS
    before = jax.tree.leaves(net())
    leaves = [jax.tree.leaves(eqx.filter(x, eqx.is_inexact_array)) for x in (found, expected)]
    assert len(leaves[0]) == 4 * len(before)  # parameters, two moments, the average
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(before, jax.tree.leaves(expected.model), strict=True):
        assert np.max(np.abs(a - b)) > 1e-3  # which is far more
