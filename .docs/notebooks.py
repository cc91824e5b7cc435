"""Makes the notebooks of examples/notebooks from the scripts, by jupytext, and runs them.

    python .docs/notebooks.py [NAME ...]

The docstring of a script becomes the first cell, its classes and functions one cell each, and the
call of `main` the last. Of the outputs, printed text and pictures are kept: no progress bars, no
warnings, no paths of this machine. A test compares the cells with the scripts.
"""

import ast
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbclient

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("digits", "mnist_small", "names")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def as_cells(name: str) -> str:
    """The script with the marks of cells (jupytext's percent format)."""
    source = (EXAMPLES / f"{name}.py").read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = docstring.partition("\n")
    about = (
        f"# {title}\n{rest}\n\nMade from `examples/{name}.py`; `main` takes its options as a list."
    )
    code = source.split('"""', 2)[2].strip()
    code, _, _ = code.partition('\n\n\nif __name__ == "__main__":')
    # The formatter leaves two empty lines between what belongs into cells of its own.
    blocks = re.split(r"\n\n\n", code)
    if "from digits import" in code:
        blocks[0] = (
            'import sys\n\nsys.path.insert(0, "..")  # digits.py, of which a part is used\n\n'
            + blocks[0]
        )
    blocks += ["main([])", f'from IPython.display import Image\n\nImage("out/{name}.png")']
    written = "\n".join(f"# {line}".rstrip() for line in about.splitlines())
    return f"# %% [markdown]\n{written}\n\n" + "\n\n".join(f"# %%\n{one}" for one in blocks) + "\n"


def notebook(name: str) -> Any:
    """The notebook of a script, without outputs, the same every time."""
    found = jupytext.reads(as_cells(name), fmt="py:percent")
    found.metadata = METADATA
    for number, cell in enumerate(found.cells):
        cell.id, cell.metadata = f"{name}-{number}", {}
    return found


def executed(found: Any, folder: Path) -> Any:
    """The notebook with the outputs of a run in a folder."""
    (folder / "examples" / "notebooks").mkdir(parents=True)
    (folder / "examples" / "digits.py").write_text((EXAMPLES / "digits.py").read_text("utf-8"))
    resources = {"metadata": {"path": str(folder / "examples" / "notebooks")}}
    nbclient.NotebookClient(found, timeout=3_600, resources=resources).execute()
    return cleaned(found)


def cleaned(found: Any) -> Any:
    """The notebook with printed text and pictures alone."""
    found.metadata = METADATA
    for cell in found.cells:
        cell.metadata = {}  # without the times of the run
        if cell.cell_type == "code":
            cell.outputs = list(_shown(cell.outputs))
    return found


def _shown(outputs: Iterable[Any]) -> Iterator[Any]:
    """All printed text in one output, then the pictures."""
    printed = [one for one in outputs if one.get("name") == "stdout"]
    if printed:
        printed[0].text = "".join(one.text for one in printed)
        yield printed[0]
    for one in outputs:
        picture = one.get("data", {}).get("image/png")
        if picture is not None:
            one.data, one.metadata = {"image/png": picture}, {}
            yield one


def source(found: Any) -> str:
    """The text of a notebook's cells, without outputs."""
    for cell in found.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return jupytext.writes(found, fmt="ipynb")


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            made = executed(notebook(name), Path(folder))
        text = jupytext.writes(made, fmt="ipynb").rstrip("\n") + "\n"
        (EXAMPLES / "notebooks" / f"{name}.ipynb").write_text(text, "utf-8")
