"""Two processes with four devices each do what one with eight does."""

import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.sharding.host import fully_sharded, train


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_two_hosts(folder, environment, what="train"):
    """What each of two hosts has seen."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.sharding.host"),
                *(str(host), "2", str(port), str(folder), what),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for host in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output[-3000:]
    finally:
        for process in processes:
            process.kill()
    return [dict(np.load(folder / f"host{host}.npz")) for host in range(2)]


def named(found, name):
    return [found[key] for key in sorted(found) if key.startswith(name)]


@pytest.mark.slow
def test_two_hosts_do_what_one_does(tmp_path, fast):
    one, both = train(0, 1), run_two_hosts(tmp_path, fast)
    first, second = both

    assert named(first, "param")
    for a, b, alone in zip(*(named(found, "param") for found in (first, second, one)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, alone, rtol=1e-5, atol=1e-6)

    for found in both:  # noise, bit for bit
        for a, alone in zip(named(found, "noise"), named(one, "noise"), strict=True):
            assert np.any(a != 0)
            np.testing.assert_array_equal(a, alone)

    # Their samples make up that of one host.
    assert first["indices"].shape == second["indices"].shape
    for step, whole in enumerate(one["indices"]):
        union = np.concatenate([found["indices"][step] for found in both])
        np.testing.assert_array_equal(np.sort(union[union >= 0]), whole[whole >= 0])

    assert [found["epsilon"] for found in both] == [one["epsilon"]] * 2


@pytest.mark.slow
def test_two_hosts_share_parameters(tmp_path, fast):
    """Collectives within loops, one host with less to do than the other: two devices each."""
    alone, both = fully_sharded(0, 1), run_two_hosts(tmp_path, fast, "fully_sharded")
    assert len(alone) == 21
    for found in both:
        for name, expected in alone.items():
            assert np.any(expected != 0)
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)
