"""Two processes with four devices each do what one with eight does."""

import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.sharding.host import train


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    """What each of two hosts has seen."""
    folder, port = tmp_path_factory.mktemp("hosts"), free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharding.host", str(host), "2", str(port), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
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


@pytest.fixture(scope="module")
def one_host():
    return train(0, 1)


def named(found, name):
    return [found[key] for key in sorted(found) if key.startswith(name)]


def test_both_hosts_end_with_the_same_parameters(two_hosts):
    first, second = (named(found, "param") for found in two_hosts)
    assert first
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_they_are_those_of_one_host(two_hosts, one_host):
    for a, b in zip(named(two_hosts[0], "param"), named(one_host, "param"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_noise_is_the_same_bit_for_bit(two_hosts, one_host):
    for found in two_hosts:
        for a, b in zip(named(found, "noise"), named(one_host, "noise"), strict=True):
            assert np.any(a != 0)
            np.testing.assert_array_equal(a, b)


def test_their_samples_make_up_that_of_one_host(two_hosts, one_host):
    parts = [found["indices"] for found in two_hosts]
    assert parts[0].shape == parts[1].shape
    for step, whole in enumerate(one_host["indices"]):
        union = np.concatenate([part[step] for part in parts])
        np.testing.assert_array_equal(np.sort(union[union >= 0]), whole[whole >= 0])


def test_epsilon_is_the_same(two_hosts, one_host):
    assert [found["epsilon"] for found in two_hosts] == [one_host["epsilon"]] * 2
