"""One whole private step, as users run it, against an ordinary one and against peers.

    python -m tests.benchmarks.step --markdown table.md

Run it from the root of the repository, on a machine that does nothing else. Opacus takes part where
torch and opacus are installed.
"""

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from tests.benchmarks.timing import interleaved, ratios

from . import report
from .contenders import JAX_PRIVACY, opacus_is_installed
from .measure import at_its_best, mean_of
from .rows import ROWS, TINY
from .whole_steps import Case, Run, case_of, ordinary_contender, ours, parts, peers

GOAL = 1.25
# What takes a reasonable time on two cores.
EXPECTED: dict[str, tuple[int, ...]] = {
    "mlp": (64, 256, 1024),
    "cnn": (64, 256, 1024),
    "gpt_small": (64, 256),
    "gpt_stacked": (64,),
    "gpt_lora": (64,),
}
# Peers are slow: to find their best microbatch size, each takes a few steps at each size.
_SEARCH_ROUNDS, _SEARCH_STEPS = 1, 2


class Measured(NamedTuple):
    """What was measured of one row at one expected batch.

    Attributes:
        case: the row, our step and its batches.
        sizes: the best microbatch size of each contender, None for the whole batch.
        microbatch_size: that of our step.
        seconds: of one step, or of a part of it, by name: a number a round.
    """

    case: Case
    sizes: dict[str, int | None]
    microbatch_size: int | None
    seconds: dict[str, list[float]]

    def parts(self) -> dict[str, list[float]]:
        """Seconds of each part of our step; together they are the whole."""
        at = {name: np.asarray(seconds) for name, seconds in self.seconds.items()}
        padded = at["gradient with padding"]
        found = {
            "gradient": at["gradient"],
            "padding": padded - at["gradient"],
            "noise": at["noise"],
            "optimizer": at["optimizer"],
            "rest": at["ours"] - padded - at["noise"] - at["optimizer"],
        }
        return {name: seconds.tolist() for name, seconds in found.items()}


def measured(case: Case, rounds: int, tell: Callable[[str], None]) -> Measured:
    """Measures all contenders, each at its best, and our parts, in rounds that all share."""
    title, sizes, runs = f"{case.row.name}, {case.row.batch_size}", {}, dict[str, Run]()
    tell(f"{title}: choosing microbatches of ordinary")
    sizes["ordinary"], ordinary = at_its_best(ordinary_contender(case), case.row)
    runs |= {"ordinary": ordinary.run, "ours": ours(case), **parts(case)}
    for contender in peers(case):
        tell(f"{title}: choosing microbatches of {contender.name}")
        search = _SEARCH_ROUNDS, mean_of(_SEARCH_STEPS)
        sizes[contender.name], program = at_its_best(contender, case.row, *search)
        runs[contender.name] = program.run
    tell(f"{title}: timing {len(runs)} programs in {rounds} rounds")
    seconds = interleaved(runs, rounds, mean_of(len(case.batches)))
    return Measured(case, sizes, case.microbatch_size, seconds)


def line(found: Measured) -> tuple[str, ...]:
    """A line of the table."""
    seconds, case = found.seconds, found.case
    ordinary, own = seconds["ordinary"], seconds["ours"]
    parts = (f"{ratios(part, ordinary).median:.2f}" for part in found.parts().values())
    opacus = [name for name in seconds if name.startswith("opacus")]
    fastest = min(opacus, key=lambda name: np.median(seconds[name]), default=None)
    return (
        case.row.name,
        str(case.row.batch_size),
        str(case.slots),
        f"{case.real:.1f}",
        _size(found.microbatch_size),
        f"{1e3 * np.median(ordinary):.1f} ({_size(found.sizes['ordinary'])})",
        f"{1e3 * np.median(own):.1f}",
        report.with_quartiles(ratios(own, ordinary)),
        *parts,
        _against(found, JAX_PRIVACY),
        "-" if fastest is None else f"{fastest.split()[-1]}: {_against(found, fastest)}",
    )


def _against(found: Measured, name: str) -> str:
    ratio = ratios(found.seconds[name], found.seconds["ours"])
    return f"{report.with_quartiles(ratio)} at {_size(found.sizes[name])}"


def _size(size: int | None) -> str:
    return "whole" if size is None else str(size)


_COLUMNS = (
    "row",
    "expected",
    "slots",
    "real",
    "microbatch",
    "ordinary, ms (microbatch)",
    "ours, ms",
    "ours / ordinary (quartiles)",
    "gradient",
    "padding",
    "noise",
    "optimizer",
    "rest",
    "jax_privacy / ours, at its microbatch",
    "Opacus / ours",
)
_NOTE = f"goal: ours at most {GOAL} x ordinary on every row"
_EXPLANATION = (
    "Steps with Adam, float32, clip norm 1. `ordinary`: without privacy, on exactly the expected "
    "number of examples, whole or in microbatches, whichever is faster. `ours`: what `make_step` "
    "makes, on batches of the plan's own sampler, which have `slots` places and hold `real` "
    "examples on the mean. jax_privacy takes the same batches, Opacus their real examples, each at "
    "the best of a few microbatch sizes. Every step is waited for. All take turns in one process; "
    "a turn is the mean over all batches, and times are compared round by round, with the "
    "quartiles of the rounds' ratios.\n\n"
    "The parts of our step are programs of their own, medians over `ordinary`: `gradient` without "
    "mask on the expected number of examples, `padding` what mask and padding add to it, `noise`, "
    "`optimizer`, and `rest`, which is what the whole step takes beyond its parts (calling it from "
    "Python), or less (what the compiler saves where it sees them together)."
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.step",
        description="Time of one whole private step, and of its parts.",
    )
    parser.add_argument("--rows", nargs="+", choices=EXPECTED, default=list(EXPECTED))
    parser.add_argument("--expected", nargs="+", type=int, help="expected batches, for all rows")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--batches", type=int, default=20, help="batches a turn (default: 20)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    found = parser.parse_args(argv)
    for name in ("rounds", "batches"):
        if getattr(found, name) < 1:
            parser.error(f"--{name} must be at least 1, found {getattr(found, name)}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    console = Console(width=200)
    console.print(report.setting())
    if not opacus_is_installed():
        console.print("Opacus is left out: torch or opacus is not installed.")
    lines: list[tuple[str, ...]] = []
    with console.status("") as status:
        for name in options.rows:
            sizes = TINY[name] if options.tiny else {}
            expected = (sizes["batch"],) if options.tiny else EXPECTED[name]
            for batch in options.expected or expected:
                case = case_of(ROWS[name](**{**sizes, "batch": batch}), options.batches)
                lines.append(line(measured(case, options.rounds, status.update)))
                console.print(
                    report.for_terminal(report.Cells(case.row.title, _COLUMNS, lines[-1:]))
                )
                _write(options, lines)
    console.print(_NOTE)


def _write(options: argparse.Namespace, lines: list[tuple[str, ...]]) -> None:
    """After every line, so that what was measured is there if the rest is not."""
    if options.markdown is None:
        return
    models = [(name, ROWS[name]().title.rpartition(", batch")[0]) for name in options.rows]
    command = ["python", "-m", "tests.benchmarks.step", "--rows", *options.rows]
    if options.expected:
        command += ["--expected", *map(str, options.expected)]
    command += ["--rounds", str(options.rounds), "--batches", str(options.batches)]
    report.write_markdown(
        options.markdown,
        shlex.join(command + ["--tiny"] * options.tiny),
        [
            report.Cells("Whole steps", _COLUMNS, lines, _NOTE),
            report.Cells("Models", ("row", "model"), models),
        ],
        "What one whole private step costs",
        _EXPLANATION,
    )


if __name__ == "__main__":
    main()
