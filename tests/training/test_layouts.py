"""A fully sharded run that is killed goes on with other devices, from what was saved."""

import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import eqx_dp as dp
from tests.sharding.fully_sharded_net import net
from tests.training.layouts import STEPS, trainer
from tests.training.processes import free_port
from tests.training.runs import entries, released, saved


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
        there = (self.directory / "checkpoints").is_dir()
        return max(saved(self.directory), default=0) if there else 0

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
    """8 devices of one process, 2 processes of 4, 4 devices, and one: twice killed in between."""
    directory = tmp_path / "run"
    first = Processes(tmp_path, fast, 1, 8, "params", STEPS).killed_after(step=3)
    second = Processes(tmp_path, fast, 2, 8, "params_once", STEPS).killed_after(first + 3)
    counted = sum(entry["steps"] for entry in entries(directory))
    assert 0 < first < second < counted < STEPS
    Processes(tmp_path, fast, 1, 4, "params", counted + 2).ended()
    found = dp.load_model(directory, like=net())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(net()), strict=True):
        assert np.all(np.isfinite(a))
        assert np.max(np.abs(a - b)) > 1e-3
    state = trainer(directory, None).run(net())
    assert released(directory) == STEPS
    assert int(state.step) < STEPS  # of the model: those of killed blocks are lost
