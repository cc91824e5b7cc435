"""The command that measures what a run holds at its start."""

import jax
import jax.numpy as jnp
import pytest

from tests.benchmarks import starting


@pytest.mark.exhaustive
def test_command(tmp_path):
    path = tmp_path / "table.md"
    ways = ["init, of a function", "resume, of a function"]
    starting.main(["--ways", *ways, "--depth", "2", "--width", "64", "--markdown", str(path)])
    written = path.read_text()
    for way in ways:
        lines = [line for line in written.splitlines() if line.startswith(f"| {way} |")]
        assert len(lines) == 2
        for line in lines:
            assert line.split("|")[3].strip() == "1.00"  # one state, and nothing beside it
    assert f"at most {starting.GOAL} x the state" in written


def test_layers_compute():
    model = starting.Stacked(2, 8, jax.random.key(0))
    assert starting.loss(model, jnp.ones(8)).shape == ()
