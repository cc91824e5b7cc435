"""Mutants of privacy-critical code: how many survive the tests?

A mutant is a module with one small change: an operator, a comparison, a constant, a dropped term, a
swapped branch, a call left out. `tests/benchmarks/mutation/modules.toml` says which tests should
find the mutants of which module, and explains those that no test can find. A mutant is killed if a
test fails, if the module cannot be imported, or if the tests take longer than 10 minutes. With
`--log` mutants that the file has are not run again; `--minutes` ends the run in time, and `--sample
100` takes 100 of each module at random.
"""

import argparse
import json
import random
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .command import Part
from .mutation.changes import Mutant, mutants
from .page import Table

ROOT = Path(__file__).parents[2]
MODULES = Path(__file__).with_name("mutation") / "modules.toml"
KILLED, SURVIVED, EXPLAINED = "killed", "survived", "explained"


class Module(NamedTuple):
    """A row of `modules.toml`.

    Attributes:
        file: of the package.
        tests: what should find its mutants: files, or tests of a file.
        explained: by a mutant's text, why no test can find it.
    """

    file: str
    tests: tuple[str, ...]
    explained: dict[str, str]


def modules() -> list[Module]:
    """The rows of the file; modules that are gone, or have another name, are passed over."""
    known = tomllib.loads(MODULES.read_text("utf-8"))
    explained = known["explained"]
    files = ((f"eqx_dp/{name}.py", tests) for name, tests in known["tests"].items())
    return [
        Module(file, tuple(f"tests/{name}.py" for name in tests), explained.get(file, {}))
        for file, tests in files
        if (ROOT / file).exists()
    ]


class Runner:
    """A process that runs tests on mutants: `mutation/runner.py`."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.benchmarks.mutation.runner"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def run(self, module: Module, mutant: Mutant | None) -> tuple[str, float]:
        """Whether a mutant survives its tests, and the seconds; None: the module as it is."""
        start = time.monotonic()
        place = None if mutant is None else (mutant.place, mutant.turn)
        asked = json.dumps({"file": module.file, "tests": module.tests, "place": place})
        assert self._process.stdin
        assert self._process.stdout
        print(asked, file=self._process.stdin, flush=True)
        is_green = json.loads(self._process.stdout.readline())
        return SURVIVED if is_green else KILLED, time.monotonic() - start

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    log = options.log
    lines = log.read_text().splitlines() if log and log.exists() else []
    known = {(one["file"], one["text"], one["line"]): one for one in map(json.loads, lines)}
    runner = Runner()
    sample = options.sample or (1 if options.tiny else 5 if options.short else None)
    end = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, str]] = []
    for module in modules():
        if options.only and not any(part in module.file for part in options.only):
            continue
        source = (ROOT / module.file).read_text("utf-8")
        made = mutants(source)
        random.Random(options.seed).shuffle(made)
        chosen = made[:sample]
        if time.monotonic() < end and any(_key(module, one) not in known for one in chosen):
            unchanged, seconds = runner.run(module, None)
            if unchanged != SURVIVED:
                sys.exit(f"without a change, the tests of {module.file} are not green")
            print(f"{module.file}: {seconds:.0f} s a run", flush=True)
        found = [
            _found(module, mutant, runner, known, log)
            for mutant in chosen
            if _key(module, mutant) in known or time.monotonic() < end
        ]
        counts = {name: found.count(name) for name in (KILLED, EXPLAINED, SURVIVED)}
        left = max(1, counts[KILLED] + counts[SURVIVED])
        rows.append(
            {"module": module.file, "mutants": str(len(made)), "run": str(len(found))}
            | {name: str(count) for name, count in counts.items()}
            | {"survive": f"{100 * counts[SURVIVED] / left:.0f} %"}
        )
    runner.end()
    if rows:
        yield Table("Mutants", rows)


def _key(module: Module, mutant: Mutant) -> tuple[str, str, int]:
    return module.file, mutant.text, mutant.line


def _found(
    module: Module, mutant: Mutant, runner: Runner, known: dict[Any, Any], log: Path | None
) -> str:
    """Whether tests kill a mutant, from the log or by a run."""
    if mutant.text in module.explained:
        return EXPLAINED
    key = _key(module, mutant)
    if key not in known:
        status, seconds = runner.run(module, mutant)
        known[key] = {"file": module.file, "line": mutant.line}
        known[key] |= {"text": mutant.text, "status": status, "seconds": round(seconds)}
        if log:
            with log.open("a") as file:
                file.write(json.dumps(known[key]) + "\n")
        if status == SURVIVED:
            print(f"{module.file}:{mutant.line} {mutant.text}", flush=True)
    return known[key]["status"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", help="modules whose path holds one of these")
    parser.add_argument("--sample", type=int, help="so many mutants of each module, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are taken")
    parser.add_argument("--minutes", type=float, default=1e9, help="when to stop")
    parser.add_argument(
        "--log", type=Path, help="a file of JSON lines to append to, and go on from"
    )


PART = Part(__doc__, tables, add_options)
