"""The commands that show where the ways cross, and what adapters could save."""

import pytest

from tests.benchmarks import crossover, lora
from tests.benchmarks.contenders import JAX_PRIVACY


@pytest.mark.slow
def test_crossover(tmp_path):
    path = tmp_path / "table.md"
    crossover.main(["--tiny", "--repeats", "1", "--markdown", str(path)])
    written = path.read_text()
    assert "| linear 8 x 8, T=4, batch 4 |" in written
    assert "head tied" in written


def test_each_way_is_forced_on_a_program_of_its_own(monkeypatch):
    """The program of one way is not that of the other, and nothing stays forced."""
    row = crossover.linear(4, 8)
    seen = []
    monkeypatch.setattr(
        crossover, "compiled", lambda make, *rest: seen.append(crossover.chosen(row))
    )
    for way in (crossover.INNER, crossover.FORMED):
        crossover._forced(way, row, None)
    assert seen == [{crossover.INNER: 1}, {crossover.FORMED: 1}]
    assert crossover.chosen(row) == {crossover.INNER: 1}


@pytest.mark.exhaustive
def test_lora(tmp_path, monkeypatch):
    monkeypatch.setattr(lora, "SIZES", (None,))
    path = tmp_path / "table.md"
    lora.main(["--tiny", "--repeats", "1", "--markdown", str(path)])
    written = path.read_text()
    for name in (lora.FORWARD, lora.FIRST, JAX_PRIVACY):
        assert f"| {name} |" in written
    assert "as fast as jax_privacy's best" in written
