"""The command that measures tracing and compiling."""

import jax
import pytest

from tests.benchmarks import tracing
from tests.benchmarks.contenders import NON_PRIVATE


@pytest.mark.exhaustive
def test_command(tmp_path):
    path = tmp_path / "table.md"
    depths = (1, 2)
    told = ["--tiny", "--rounds", "1", "--depths", *map(str, depths)]
    tracing.main([*told, "--markdown", str(path)])
    written = path.read_text()
    for row in tracing.rows(is_tiny=True, depths=depths):
        assert f"## {row.title}" in written
    lines = [line for line in written.splitlines() if line.startswith("| jax_privacy |")]
    assert len(lines) == 4
    assert all(line.count("1.00 (1.00-1.00)") == 2 for line in lines)
    for name, goal in tracing.GOALS.items():
        assert f"{name}: trace and lower at most {goal.tracing:g} x" in written


@pytest.mark.slow
def test_each_stage_is_timed_from_cold_caches():
    """The loss is traced every time anew, and compiled."""
    row, times = tracing.rows(is_tiny=True, depths=(1,))[0], []

    def counted(params, frozen, *batch):
        times.append(1)
        return jax.tree.map(lambda leaf: 2 * leaf, params)

    for expected in (1, 2):
        seconds = tracing.stages(counted, row)
        assert len(times) == expected
        assert all(stage > 0 for stage in seconds)
    assert NON_PRIVATE in tracing.CONTENDERS
