"""The command that counts what a device does."""

import pytest

from tests.benchmarks import fully_sharded, sharding


@pytest.mark.slow
def test_command(tmp_path, capsys):
    path = tmp_path / "table.md"
    sharding.main(["--cases", "perceptron", "--devices", "2", "--markdown", str(path)])
    printed, written = capsys.readouterr().out, path.read_text()
    for scaling in ("strong scaling", "weak scaling"):
        assert scaling in printed
        assert scaling in written
    for name in sharding.CONTENDERS:
        assert f"| {name} | 2 |" in written


@pytest.mark.slow
def test_what_a_constraint_costs_a_device():
    """Nothing here; elsewhere the work of several devices lands on each."""
    case, constrained = sharding.perceptron(), "eqx_dp auto, constrained"
    one = sharding.measure(case, constrained, 1, case.num_examples)
    eight = sharding.measure(case, constrained, 8, case.num_examples)
    free = sharding.measure(case, "eqx_dp auto, unconstrained", 8, case.num_examples)
    assert eight.flops == free.flops <= 1.05 * one.flops / 8
    assert [c.name for c in eight.collectives] == ["all-reduce"]


@pytest.mark.slow
def test_command_of_what_a_device_holds(tmp_path, capsys):
    path = tmp_path / "table.md"
    fully_sharded.main(["--cases", "layers", "--devices", "2", "--markdown", str(path)])
    printed, written = capsys.readouterr().out, path.read_text()
    for name in fully_sharded.CONTENDERS:
        assert name in printed
        assert f"| {name} | 2 |" in written
