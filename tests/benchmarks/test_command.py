"""Every benchmark runs on its smallest setting, and writes its section of the page."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import (
    command,
    fully_sharded,
    noise,
    page,
    sharding,
    timing,
    tracing,
    training,
)
from tests.benchmarks.client_rows import CLIENTS, MISSING
from tests.benchmarks.rows import ROWS, tiny


def lines_of(path: Path, name: str, *options: str) -> list[dict[str, str]]:
    """The lines of the table that a part writes, by column."""
    command.main([name, "--tiny", "--rounds", "1", "--write", "--page", str(path), *options])
    text = path.read_text()
    assert text.startswith(f"# Measurements\n\n## {command.TITLES[name]}\n")
    assert f"Measured by `python -m tests.benchmarks {name} --tiny --rounds 1" in text
    drawn = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(drawn[0], cells, strict=True)) for cells in drawn[2:]]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results.md"


def is_ratio(cell: str) -> bool:
    return re.match(r"\d+\.\d\d \(\d+\.\d\d-\d+\.\d\d\)", cell) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), [("clipped_gradients", "mlp"), ("clients", "bag")])
def test_clipped_gradients(name: str, row: str, results: Path):
    (line,) = lines_of(results, name, "--rows", row, "--short")
    assert line["model"] == {**ROWS, **CLIENTS}[row](**tiny({**ROWS, **CLIENTS}[row])).title
    for who in ("auto / non-private, whole batch", "jax_privacy / auto", "optax / auto"):
        assert is_ratio(line[who]), who


@pytest.mark.slow
def test_sizes(results: Path):
    (line,) = lines_of(results, "sizes", "--rows", "bag_1M")
    assert is_ratio(line["auto / non-private"])
    assert is_ratio(line["jax_privacy / auto"])


@pytest.mark.slow
def test_step(results: Path):
    (line,) = lines_of(results, "step", "--rows", "mlp", "--batches", "2")
    parts = [
        float(line[x]) for x in ("gradient", "padding", "noise", "optimizer", "caches", "rest")
    ]
    assert sum(parts) == pytest.approx(float(line["ours / ordinary"].split()[0]), abs=0.05)


@pytest.mark.slow
def test_training(results: Path):
    (line,) = lines_of(results, "training", "--rows", "small")
    assert is_ratio(line["trainer / loop"])
    assert is_ratio(line["scan of 8 / loop"])


@pytest.mark.slow
def test_trainer_loop_and_scan_take_the_same_steps(monkeypatch: pytest.MonkeyPatch):
    """From the same start, over the same batches: after every turn they have the same model."""
    models: list[list[np.ndarray]] = []

    class Clock(training.Clock):
        def __call__(self, model):
            own = weights(model)
            super().__call__(model)
            models.append([own, *(weights(state.model) for state in self.states.values())])
            return {}

    monkeypatch.setattr(training, "Clock", Clock)
    clock = training.measured(training.small(**tiny(training.small)), training.SCANNED, rounds=2)
    assert {len(seconds) for seconds in clock.seconds.values()} == {2}
    for own, loop, scan in models:
        np.testing.assert_array_equal(own, loop)
        np.testing.assert_allclose(scan, own, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(models[0][0], models[1][0])


def weights(model) -> np.ndarray:
    """A copy: the next step uses up the model's own arrays."""
    return np.concatenate([np.array(layer.weight).ravel() for layer in model.layers])


@pytest.mark.slow
def test_noise(results: Path):
    found = lines_of(results, "noise")
    assert [line["gradients"] for line in found] == list(noise.trees(is_tiny=True))
    for kind in (noise.PLAIN, noise.CERTIFIED):
        noisy, _ = noise.prepared(kind, np.zeros(4000, np.float32)).run()
        assert np.std(noisy) == pytest.approx(1, abs=0.1), kind


@pytest.mark.exhaustive  # three minutes
def test_mechanisms(results: Path):
    command.main(["mechanisms", "--tiny", "--rounds", "1", "--write", "--page", str(results)])
    assert re.search(r"\| bisr, 4 draws \| [\d.]+ \| [\d.]+ \(", results.read_text())


@pytest.mark.slow
def test_accounting(results: Path):
    command.main(["accounting", "--tiny", "--rounds", "1", "--write", "--page", str(results)])
    assert re.search(r"users \|.*\| 1\.0\d\d \|", results.read_text())


@pytest.mark.slow
def test_tracing(results: Path):
    found = lines_of(results, "tracing", "--short")
    assert [line["contender"] for line in found] == list(tracing.CONTENDERS)
    assert found[1]["trace and lower / jax_privacy"] == "1.00 (1.00-1.00)"


@pytest.mark.slow
def test_sharding(results: Path):
    """A constraint costs nothing here; elsewhere the work of several devices lands on each."""
    found = {(line["contender"], line["devices"]): line for line in lines_of(results, "sharding")}
    own, free = found["eqx_dp auto", "8"], found["eqx_dp auto, unconstrained", "8"]
    assert own["MFLOP a device"] == free["MFLOP a device"]
    assert own["collectives"] == "1 all-reduce"
    assert set(found) == {(name, count) for name in sharding.CONTENDERS for count in "18"}


@pytest.mark.slow
def test_fully_sharded(results: Path):
    lines = lines_of(results, "fully_sharded")
    found = {(line["contender"], line["devices"]): float(line["together"]) for line in lines}
    assert set(found) == {(name, count) for name in fully_sharded.CONTENDERS for count in "28"}
    assert found["ghost", "8"] < found["ghost", "2"] / 2


@pytest.mark.slow
def test_mutants(results: Path):
    """Three of a small module, whose tests are quick: each is found."""
    chosen = ("--only", "privacy/chacha", "--tests", "privacy/test_chacha", "--sample", "3")
    found = lines_of(results, "mutants", *chosen, "--limit", "4")
    (total,) = (line for line in found if line["module"] == "all")
    assert (total["run"], total["killed"]) == ("3", "3")


@pytest.mark.exhaustive  # two minutes; memory of a GPT: tests/test_plan_gpt.py
def test_large_gpt(results: Path):
    contenders = "non-private", "ghost", "jax_privacy"
    found = lines_of(
        results, "large_gpt", "--mesh", "4x2", "--batch", "2", "--contenders", *contenders
    )
    assert [line["step"] for line in found] == list(contenders)
    plain, ghost, _ = (float(line["compiled, GiB of a device"]) for line in found)
    assert ghost < 3 * plain


def test_the_page_has_a_section_for_each_part(capsys: pytest.CaptureFixture[str]):
    titles = re.findall(r"^## (.*)$", page.PAGE.read_text(), re.MULTILINE)
    assert titles == list(command.TITLES.values())
    command.main(["--list"])
    assert all(name in capsys.readouterr().out for name in ["large_gpt"])


def test_all_says_which_parts_failed(monkeypatch: pytest.MonkeyPatch):
    run: list[Sequence[str]] = []

    def failing(argv: Sequence[str], **_: object):
        run.append(argv[3:])
        return type("Done", (), {"returncode": int("noise" in argv)})

    monkeypatch.setattr(command.subprocess, "run", failing)
    with pytest.raises(SystemExit, match="their sections stay as they were: noise"):
        command.main(["all", "--short"])
    assert run == [[name, "--write", "--short"] for name in command.TITLES]


def test_the_fastest_rounds_are_compared():
    """A disturbance that slows down a whole round leaves the ratios alone."""
    assert timing.compared([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == "2.00 (2.00-2.00)"
    assert timing.compared([3.0, 2.0], [1.0, 1.0]) == "2.00 (2.25-2.75)"


def test_libraries_of_clients_are_installed_or_named():
    assert set(MISSING) <= {"maf", "neural_ode", "gpt_named"}
