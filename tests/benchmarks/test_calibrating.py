"""The command that measures calibration."""

import pytest

from tests.benchmarks import calibrating


@pytest.mark.slow
def test_command(tmp_path, capsys):
    path = tmp_path / "table.md"
    calibrating.main(["--repeats", "1", "--tiny", "--markdown", str(path)])
    printed, written = capsys.readouterr().out, path.read_text()
    for name in calibrating.TINY:
        assert name in printed
        assert f"| {name} |" in written


@pytest.mark.slow
def test_both_find_the_same_noise():
    (plan,) = calibrating.TINY.values()
    expected = calibrating.calibrated_by_dp_accounting(plan)
    # The plan charges for finite precision.
    assert calibrating.calibrated(plan) == pytest.approx(expected, rel=5e-4)
