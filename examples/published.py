"""Runs the recipes of `mnist.py` and writes the table of accuracy against epsilon into the pages.

Runs are kept in `published.jsonl`, one a line. Those that are missing are run where `--data` is
given; the table is made of all that are there, beside what papers report. It stands between two
marks in README and in the guide "Choose the numbers".

    python examples/published.py --data FOLDER --seeds 5
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import mnist
import numpy as np

HERE = Path(__file__).parent
RUNS = HERE / "published.jsonl"
PAGES = (HERE.parent / "README.md", HERE / "guides" / "choosing.md")
BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"
EPSILONS = (1.0, 3.0, 8.0)


class Paper(NamedTuple):
    """What was published on a recipe."""

    title: str
    published: str


PAPERS = {
    "tanh": Paper(
        "convolutions, tanh",
        "98.1 at 2.93 ([Papernot et al., 2021](https://arxiv.org/abs/2007.14191))",
    ),
    "scatter": Paper(
        "scattering, linear",
        "98.7 at 3, with private statistics ([Tramèr and Boneh, 2021](https://arxiv.org/abs/2011.11660))",
    ),
    "ours": Paper("the same, whitened", ""),
}


def read_runs(file: Path) -> list[dict[str, Any]]:
    """The runs of a file, none if it is not there."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def shown(accuracies: list[float]) -> str:
    """Their mean, with the lowest and the highest of several."""
    if len(accuracies) < 2:
        return "".join(f"{x:.2f}" for x in accuracies)
    return f"{np.mean(accuracies):.2f} ({min(accuracies):.2f} to {max(accuracies):.2f})"


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: a row for each recipe that was run, with mean, lowest and highest accuracy."""
    names = [f"epsilon {epsilon:g}" for epsilon in EPSILONS]
    head = ["recipe of `examples/mnist.py`", *names, "seeds", "minutes a run", "published"]
    lines = [head, ["---", *["---:"] * (len(EPSILONS) + 2), "---"]]
    for name, paper in PAPERS.items():
        its = [run for run in runs if run["recipe"] == name]
        found = [[100 * x["accuracy"] for x in its if x["epsilon"] == one] for one in EPSILONS]
        cells = [shown(x) for x in found]
        seeds = "/".join(str(len(x)) for x in found)
        minutes = f"{np.median([run['minutes'] for run in its]):.1f}" if its else ""
        if its:
            title = f"`{name}`: {paper.title}"
            lines.append([title, *cells, seeds, minutes, paper.published])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(page: str, table: str) -> str:
    """A page with the table between its marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"The page must hold {BEGIN!r}, and then {END!r}.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="MNIST's folder: what is missing is run")
    parser.add_argument("--recipe", choices=PAPERS, nargs="+", default=list(PAPERS), help="(all)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row (default 5)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where runs are kept")
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES, help="pages with marks")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments: Any = parse_arguments(words)
    if arguments.data is not None:
        images = mnist.load_images(arguments.data)
        for name in arguments.recipe:
            done = {(x["recipe"], x["epsilon"], x["seed"]) for x in read_runs(arguments.runs)}
            wanted = [
                (epsilon, seed)
                for seed in range(arguments.seeds)
                for epsilon in EPSILONS
                if (name, epsilon, seed) not in done
            ]
            # Without a run that is missing, features are not computed.
            for run in mnist.measured(name, images, wanted) if wanted else ():
                with arguments.runs.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
                print(run, flush=True)
    made = table(read_runs(arguments.runs))
    for page in arguments.page:
        page.write_text(with_table(page.read_text("utf-8"), made), "utf-8")
    print(made)


if __name__ == "__main__":
    main()
