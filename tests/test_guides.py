"""The code of README and of the guides runs from top to bottom, as a reader would type it."""

import importlib.util
import json
import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import eqx_dp as dp

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "examples" / "guides").glob("*.md"))]


def code_of(page):
    """All Python of a page, each line where it stands on the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        first, its = text.count("\n", 0, block.start(1)), block[1].splitlines()
        lines[first : first + len(its)] = its
    return "\n".join(lines)


def readme(names, folder):
    """Its model learns, and it lists the presets."""
    key = jax.random.key(0)
    untrained, x, y = names["eqx"].nn.MLP(4, 1, 8, 1, key=key), names["xs"], names["ys"]
    after, before = (jnp.mean((jax.vmap(m)(x) - y) ** 2) for m in (names["model"], untrained))
    assert after < 0.2 * before
    assert 2.9 < names["plan"].epsilon() <= 3.0
    assert names["opt_state"][0].stream.counter[0] == names["plan"].steps
    assert repr(dp.available_policies()) in README.read_text(encoding="utf-8")


def devices(names, folder):
    """Parameters stay where the guide puts them."""
    _, (adam, *_) = names["opt_state"]
    assert names["model"].layers[0].weight.sharding.spec == PartitionSpec("model", None)
    assert adam.mu.layers[0].weight.sharding.spec == PartitionSpec("model", "data")


def training(names, folder):
    """A run leaves the files that the guide lists; data in files are the data."""
    run, plan = folder / "run", names["plan"]
    found = json.loads((run / "privacy.json").read_text())
    assert found["steps_released"] == plan.steps
    assert (found["epsilon"], found["randomness"]) == (plan.epsilon(), "fresh")
    assert len(list((run / "ledger").glob("*.json"))) == 2
    assert (run / "checks.json").exists()
    assert (run / "metrics.jsonl").exists()
    at = np.array([149, 0, 1_499, 100])
    np.testing.assert_array_equal(names["table"][at]["x"], names["xs"][at])
    assert int(names["state"].step) == len(names["slots"]) == 5


def own_loop(names, folder):
    """All steps of both starts count; the noise of the second start is fresh, its key unsaved."""
    assert names["released"] == names["plan"].steps
    noise, _ = names["opt_state"]
    assert noise.stream.counter[0] < names["plan"].steps
    saved = (folder / "own_run" / "state.eqx").read_bytes()
    assert np.asarray(jax.random.key_data(noise.stream.key)).tobytes() not in saved


class DataLoader:
    """That of PyTorch, as far as a guide uses it: PyTorch need not be installed."""

    def __init__(self, dataset, batch_sampler, collate_fn):
        self.batches = (collate_fn([dataset[i] for i in batch]) for batch in batch_sampler)

    def __iter__(self):
        return self.batches


# What has to hold after the code of a page has run.
AFTER = {"README": readme, "devices": devices, "training": training, "own_loop": own_loop}


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=() if p == README else pytest.mark.slow, id=p.stem) for p in PAGES],
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, unchecked):
    monkeypatch.chdir(tmp_path)
    drawn = random.Random(0)  # the same run every time; not the same bytes at every call
    monkeypatch.setattr("secrets.token_bytes", lambda n=32: drawn.randbytes(n))
    names, code = {"__name__": page.stem}, code_of(page)
    if importlib.util.find_spec("torch") is None:
        names |= {"DataLoader": DataLoader, "Dataset": object}
        code = code.replace("from torch.utils.data import DataLoader, Dataset", "")
    exec(compile(code, page, "exec"), names)
    AFTER.get(page.stem, lambda names, folder: None)(names, tmp_path)


def test_pages_are_short_and_none_that_is_looked_at_is_gone():
    assert {page.stem for page in PAGES} >= AFTER.keys()
    assert {page.name for page in PAGES if len(page.read_text("utf-8").splitlines()) > 200} == set()
