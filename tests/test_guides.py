"""The code of README and of the guides runs from top to bottom, as a reader would type it."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import eqx_dp as dp

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = {page.stem: page for page in sorted((ROOT / "examples" / "guides").glob("*.md"))}


def code_of(page: Path) -> str:
    """All Python of a page, each line where it stands on the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        first, its = text.count("\n", 0, block.start(1)), block[1].splitlines()
        lines[first : first + len(its)] = its
    return "\n".join(lines)


@pytest.fixture
def run(tmp_path, monkeypatch, unchecked):
    """Runs a page in an empty folder; returns the names that it has made."""
    monkeypatch.chdir(tmp_path)
    drawn = random.Random(0)  # the same run every time; not the same bytes at every call
    monkeypatch.setattr("secrets.token_bytes", lambda n=32: drawn.randbytes(n))

    def run(page: Path) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": page.stem}
        exec(compile(code_of(page), page, "exec"), names)
        return names

    return run


@pytest.mark.parametrize("page", [README, *GUIDES.values()], ids=lambda page: page.stem)
def test_a_page_has_at_most_200_lines(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 200


QUICK = {"precision", "ten_minutes"}


@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(guide, marks=() if guide in QUICK else pytest.mark.slow)
        for guide in sorted(GUIDES.keys() - {"devices", "own_loop", "training"})
    ],
)
def test_the_code_of_a_guide_runs(guide, run):
    run(GUIDES[guide])


def test_readme_runs_and_its_model_learns(run):
    names = run(README)
    key = jax.random.key(0)
    untrained, x, y = names["eqx"].nn.MLP(4, 1, 8, 1, key=key), names["xs"], names["ys"]
    after, before = (jnp.mean((jax.vmap(m)(x) - y) ** 2) for m in (names["model"], untrained))
    assert after < 0.2 * before
    assert 2.9 < names["plan"].epsilon() <= 3.0
    assert names["opt_state"][0].step == names["plan"].steps


def test_readme_lists_the_presets():
    assert repr(dp.available_policies()) in README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_parameters_stay_where_the_guide_puts_them(run):
    names = run(GUIDES["devices"])
    _, (adam, *_) = names["opt_state"]
    assert names["model"].layers[0].weight.sharding.spec == PartitionSpec("model", None)
    assert adam.mu.layers[0].weight.sharding.spec == PartitionSpec("model", "data")


@pytest.mark.slow
def test_a_run_leaves_what_the_guide_says(run, tmp_path):
    names = run(GUIDES["training"])
    folder, plan = tmp_path / "run", names["plan"]
    found = json.loads((folder / "privacy.json").read_text())
    assert found["steps_released"] == names["state"].step == plan.steps == 100
    assert (found["epsilon"], found["randomness"]) == (plan.epsilon(), "fresh")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [20, 40, 60]
    assert len(list((folder / "ledger").glob("*.json"))) == 2
    assert (folder / "checks.json").exists()
    assert (folder / "checkpoints" / "100").is_dir()
    for number in (0, 1):
        found = json.loads((tmp_path / f"from-files-{number}" / "privacy.json").read_text())
        assert found["steps_released"] == 5
    one, other = (source[np.array([149, 0, 1_499, 100])] for source in named_sources(names))
    for a, b, expected in zip(one, other, (names["xs"], names["ys"]), strict=True):
        np.testing.assert_array_equal(a, expected[[149, 0, 1_499, 100]])
        np.testing.assert_array_equal(a, b)


def named_sources(names):
    return names["rows"], names["Parquet"]("examples.parquet", ["x", "y"])


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_with_fresh_noise(run, tmp_path):
    names = run(GUIDES["own_loop"])
    assert names["released"] == 100
    noise, _ = names["opt_state"]
    assert noise.step == 40  # of the second start alone
    assert names["report"].ok
    saved = (tmp_path / "own_run" / "state.eqx").read_bytes()
    assert np.asarray(jax.random.key_data(noise.key)).tobytes() not in saved
