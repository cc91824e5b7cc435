"""The notebooks are what the scripts give, and they run."""

from pathlib import Path
from typing import Any

import pytest

from tests.test_examples import load

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
jupytext = pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
notebooks = load("notebooks", ROOT / ".docs")


def test_notebooks_are_what_the_scripts_give():
    assert sorted(notebooks.NAMES) == NOTEBOOKS
    for name in NOTEBOOKS:
        found = notebooks.source(read(name))
        assert found == notebooks.source(notebooks.notebook(name)), "run: python .docs/notebooks.py"


def read(name: str) -> Any:
    return jupytext.read(FOLDER / f"{name}.ipynb")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_the_run_printed_and_drew(name):
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    text = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "epsilon=3.00 delta=1e-05" in text
    assert "image/png" in cells[-1].outputs[0]["data"]
    assert not any(word in text for word in ("Warning", "/home", "/tmp", "/root", "Traceback"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, fast, monkeypatch):
    for variable, value in fast.items():
        monkeypatch.setenv(variable, value)
    found = notebooks.notebook(name)
    # A few steps: the scripts' own tests take them all.
    found.cells[-2].source = 'main(["--epsilon", "1", "--steps", "4"])'
    found = notebooks.executed(found, tmp_path)
    printed = "".join(output.get("text", "") for output in found.cells[-2].outputs)
    assert "epsilon=1.00 delta=1e-05" in printed
    (picture,) = found.cells[-1].outputs
    assert "image/png" in picture["data"]
