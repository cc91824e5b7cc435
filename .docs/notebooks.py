"""Makes the notebooks of examples/notebooks from the scripts, by jupytext.

    python .docs/notebooks.py

The docstring of a script becomes the first cell, its classes and functions one cell each, and the
call of `main` the last. A test holds that the notebooks are what the scripts give.
"""

import ast
import re
from pathlib import Path
from typing import Any

import jupytext

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("digits", "mnist", "names")


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
    """The notebook of a script, the same every time."""
    found = jupytext.reads(as_cells(name), fmt="py:percent")
    found.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(found.cells):
        cell.id, cell.metadata = f"{name}-{number}", {}
    return found


def written(name: str) -> str:
    """The notebook as it stands in its file."""
    return jupytext.writes(notebook(name), fmt="ipynb").rstrip("\n") + "\n"


if __name__ == "__main__":
    folder = EXAMPLES / "notebooks"
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.ipynb").write_text(written(name), "utf-8")
