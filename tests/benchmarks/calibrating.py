"""How long a plan's calibration takes, beside dp_accounting's own at its default settings.

python -m tests.benchmarks.calibrating --markdown tests/benchmarks/results/calibrating.md
"""

import argparse
import functools
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dp_accounting
from dp_accounting.pld import PLDAccountant
from rich.console import Console

import eqx_dp as dp
from eqx_dp.privacy import NeighboringRelation
from eqx_dp.privacy.accounting import epsilon_of
from tests.benchmarks.timing import interleaved, ratios

from . import report

ADD_OR_REMOVE_ONE, REPLACE_ONE, REPLACE_SPECIAL = NeighboringRelation


def request(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
) -> dict[str, Any]:
    return {
        "epsilon": epsilon,
        "delta": delta,
        "sampling_prob": sampling_prob,
        "steps": steps,
        "neighboring_relation": relation,
    }


# dp_accounting's search needs gigabytes or many minutes for the second kind.
BESIDE_PEER = {
    "README": request(3.0, 1e-5, 0.01, 1_000),
    "examples/digits.py": request(3.0, 1e-5, 0.3, 100),
    "examples/gpt.py": request(8.0, 1e-6, 0.05, 300),
    "replacement, 2,000 steps": request(1.0, 1e-6, 0.01, 2_000, REPLACE_ONE),
    "no sampling": request(1.0, 1e-5, 1.0, 100),
}
ALONE = {
    "100,000 steps of 4e-5, delta 1.1e-10": request(1.8, 1.1e-10, 4.08e-5, 100_000),
    "epsilon 100, 1,000,000 steps, half the data": request(100.0, 1e-5, 0.5, 10**6),
    "the same, replacement": request(100.0, 1e-5, 0.5, 10**6, REPLACE_ONE),
    "epsilon 100, 1,000,000 steps of 1 %": request(100.0, 1e-5, 0.01, 10**6),
    "epsilon 0.01, 1,000,000 steps, half the data": request(0.01, 1e-7, 0.5, 10**6),
    "epsilon 20, 5 steps of 30 %, delta 1e-11, replacement": request(
        20.0, 1e-11, 0.3, 5, REPLACE_ONE
    ),
    "epsilon 100, 100 steps of 1e-6, delta 1e-11": request(100.0, 1e-11, 1e-6, 100),
}
TINY = {"tiny": request(1.0, 1e-3, 1.0, 1)}


def calibrated(asked: dict[str, Any]) -> float:
    epsilon_of.cache_clear()
    return dp.PrivacyPlan.calibrate(**asked).noise_multiplier


def calibrated_by_dp_accounting(asked: dict[str, Any]) -> float:
    known = {name: value for name, value in asked.items() if name != "epsilon"}
    found = dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(asked["neighboring_relation"]),
        lambda noise_multiplier: dp.PrivacyPlan(noise_multiplier=noise_multiplier, **known).event(),
        asked["epsilon"],
        asked["delta"],
    )
    return float(found)


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def line(name: str, asked: dict[str, Any], repeats: int) -> tuple[str, ...]:
    noise: dict[str, float] = {}

    def calibrate(contender: str, find: Callable[[dict[str, Any]], float]) -> None:
        noise[contender] = find(asked)

    contenders = {"ours": functools.partial(calibrate, "ours", calibrated)}
    if name not in ALONE:
        contenders["peer"] = functools.partial(calibrate, "peer", calibrated_by_dp_accounting)
    seconds = interleaved(contenders, repeats, seconds_of)
    cells = (name, f"{noise['ours']:.6g}", f"{min(seconds['ours']):.2f}")
    if name in ALONE:
        return (*cells, "-", "-", "-")
    return (
        *cells,
        f"{min(seconds['peer']):.2f}",
        report.with_quartiles(ratios(seconds["peer"], seconds["ours"])),
        f"{noise['ours'] / noise['peer'] - 1:+.1e}",
    )


_COLUMNS = (
    "plan",
    "noise multiplier",
    "best s",
    "dp_accounting, best s",
    "dp_accounting / this (quartiles)",
    "noise beside dp_accounting's",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.calibrating",
        description="Time of PrivacyPlan.calibrate beside dp_accounting.calibrate_dp_mechanism.",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(argv)
    plans = TINY if options.tiny else BESIDE_PEER | ALONE
    console, rows = Console(width=160), list[tuple[str, ...]]()
    for name, plan in plans.items():
        console.print(f"calibrating: {name}", style="dim")
        rows.append(line(name, plan, options.repeats))
    table = report.Cells("Calibration", _COLUMNS, rows)
    console.print(report.for_terminal(table))
    if options.markdown is not None:
        told = ["--repeats", str(options.repeats), "--markdown", str(options.markdown)]
        report.write_markdown(
            options.markdown,
            shlex.join(["python", "-m", "tests.benchmarks.calibrating", *told]),
            [table],
            "How long calibration takes",
            "`PrivacyPlan.calibrate` finds a noise multiplier within 1.0002 of the least. Beside "
            "it `dp_accounting.calibrate_dp_mechanism` at its default settings: `PLDAccountant`, "
            "and a bracket that it finds itself. Both take turns in one process; times are "
            "compared round by round, with the quartiles of the rounds' ratios. A plan takes what "
            "float64 may lose and what overflow costs from delta first; dp_accounting does not. "
            "Plans with `-` are beyond dp_accounting's search: it accounts for noise so small that "
            "losses take gigabytes or many minutes.",
        )


if __name__ == "__main__":
    main()
