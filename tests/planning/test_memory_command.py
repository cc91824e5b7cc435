"""`eqx-dp memory`: what it prints and refuses."""

import contextlib
import json

import pytest

from eqx_dp.__main__ import main

TINY = ("memory", "--model", "mlp", "--width", "8", "--batch", "16", "--method", "book_keeping")


def refused(capsys, *arguments):
    with contextlib.suppress(SystemExit):  # an argument that cannot be read
        assert main([*TINY, *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_json_on_eight_devices(capsys):
    assert main([*TINY, "--devices", "8", "--microbatch", "1", "--memory", "1GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (plan,) = found["plans"]
    assert plan["num_devices"] == 8
    assert plan["microbatch_size"] == 1
    assert plan["fits"] is True
    assert plan["compiled_total"] > plan["parts"]["optimizer"] > 0
    assert found["device_memory"] == 10**9
    assert found["largest_microbatch"] == {"book_keeping": 2}


@pytest.mark.parametrize("size", ["lots", "0GB", "32 PB", "-1GB", "GB"])
def test_refuses_what_is_no_memory(capsys, size):
    error = refused(capsys, f"--memory={size}")
    assert f"found {size!r}" in error
    assert "32GB" in error


def test_refuses_sizes_that_do_not_go_together(capsys):
    assert "at most 16" in refused(capsys, "--microbatch", "17")
    assert "do not divide" in refused(capsys, "--devices", "5")
    assert "JAX_NUM_CPU_DEVICES=64" in refused(capsys, "--devices", "64")
    assert "invalid choice" in refused(capsys, "--policy", "nothing")
