import sys

sys.path.insert(0, ".docs")
import jupytext, notebooks

for n in notebooks.NAMES:
    p = notebooks.EXAMPLES / "notebooks" / f"{n}.ipynb"
    made = notebooks.cleaned(jupytext.read(p))
    p.write_text(jupytext.writes(made, fmt="ipynb").rstrip("\n") + "\n", "utf-8")
    assert notebooks.source(jupytext.read(p)) == notebooks.source(notebooks.notebook(n)), n
