"""The notebooks are what the scripts give, and they run."""

import importlib
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
pytest.importorskip("jupytext")


@pytest.fixture(scope="module")
def notebooks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".docs")
        return importlib.import_module("notebooks")


def test_notebooks_are_what_the_scripts_give(notebooks):
    assert sorted(notebooks.NAMES) == NOTEBOOKS
    for name in NOTEBOOKS:
        written = (FOLDER / f"{name}.ipynb").read_text("utf-8")
        assert written == notebooks.written(name), "run: python .docs/notebooks.py"


def test_a_notebook_has_all_of_its_script(notebooks):
    found = notebooks.notebook("names")
    kinds = [cell.cell_type for cell in found.cells]
    assert kinds == ["markdown"] + ["code"] * (len(kinds) - 1)
    assert found.cells[-2].source == "main([])"
    source = "\n\n\n".join(cell.source for cell in found.cells)
    script = (ROOT / "examples" / "names.py").read_text("utf-8")
    defined = [line for line in script.splitlines() if line.startswith(("def ", "class ", "@"))]
    assert len(defined) > 8
    assert all(line in source for line in defined)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, notebooks, tmp_path, fast, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("XLA_FLAGS", fast["XLA_FLAGS"])
    folder = tmp_path / "examples" / "notebooks"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "digits.py", folder.parent)
    found = notebooks.notebook(name)
    # A few steps: the scripts' own tests take them all.
    found.cells[-2].source = 'main(["--epsilon", "1", "--steps", "4"])'
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(found, timeout=600, resources=resources).execute()
    said = "".join(output.get("text", "") for output in found.cells[-2].outputs)
    assert "epsilon=1.00 delta=1e-05" in said
    (picture,) = found.cells[-1].outputs
    assert "image/png" in picture["data"]
