"""Mutants of privacy-critical code: how many survive the tests?

A mutant is a module with one small change: an operator, a comparison, a constant, a dropped term, a
swapped branch, a call left out. `tests/benchmarks/mutation/modules.toml` names the modules and the
tests, and explains mutants that no test can find. First each file of tests runs on the code as it
is, for `--profile` seconds, which tells what lines each test reaches. A mutant is run by the tests
that reach what it changes: those first that killed most mutants of the module in the least time. It
is killed if a test fails, if the module cannot be imported, or if a test does not end. It survives
if all of them pass, and is undecided if `--limit` seconds of processor time end before. Tests that
start processes find nothing here, and those of the slow tier run with `--slow` alone, so the share
that survives is too high rather than too low. It is of those that are killed or survive.

`--sample 200` takes 200 mutants at random, of each module and kind of change in proportion. With
`--log` what the file has is not run again; `--minutes` ends the run in time. The interval is
Wilson's, of 95 %.
"""

import argparse
import collections
import hashlib
import json
import random
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from .command import Part
from .mutation.changes import NOT_EXCHANGED, Mutant, mutants
from .page import Table

ROOT = Path(__file__).parents[2]
MODULES = Path(__file__).with_name("mutation") / "modules.toml"
UNKNOWN_SECONDS = 5.0  # of a test that was not tried
KILLED, SURVIVED, UNDECIDED, EXPLAINED = "killed", "survived", "undecided", "explained"


class Suite(NamedTuple):
    """What `modules.toml` says.

    Attributes:
        modules: files of the package.
        tests: files of tests.
        explained: of a module, by a mutant's text: why no test can find it.
    """

    modules: list[str]
    tests: list[str]
    explained: dict[str, dict[str, str]]


class Profile(NamedTuple):
    """What one test did on the code as it is.

    Attributes:
        name: pytest's.
        seconds: of the processor.
        reached: lines of each file of the package; no line if they are unknown.
    """

    name: str
    seconds: float
    reached: dict[str, frozenset[int]]


def suite() -> Suite:
    known = tomllib.loads(MODULES.read_text("utf-8"))
    files = (
        f"eqx_dp/{room}/{name}.py" for room, names in known["modules"].items() for name in names
    )
    tests = (
        f"tests/{room}/test_{name}.py" for room, names in known["tests"].items() for name in names
    )
    return Suite([*files], [*tests], known.get("explained", {}))


class Runner:
    """A process that runs tests on mutants: `mutation/runner.py`. It starts when it is needed."""

    def __init__(self, *options: str):
        self._command = [sys.executable, "-m", "tests.benchmarks.mutation.runner", *options]
        self._process: subprocess.Popen[str] | None = None

    def run(self, tests: list[str], limit: float, mutant: tuple[str, Mutant] | None) -> Any:
        """The answer of `runner.py`; without a mutant the code is as it is."""
        pipe = subprocess.PIPE
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True
            )
        asked: dict[str, Any] = {"tests": tests, "limit": limit, "file": "", "place": None}
        if mutant is not None:
            file, changed = mutant
            asked |= {"file": file, "place": (changed.place, changed.turn)}
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait()


class Killers:
    """Tests in the order in which they are tried on the mutants of a module."""

    def __init__(self, tests: list[Profile]):
        self._tests = tests
        self._runs: collections.Counter[tuple[str, str]] = collections.Counter()
        self._kills: collections.Counter[tuple[str, str]] = collections.Counter()

    def count(self, file: str, runs: list[str], killer: str | None) -> None:
        self._runs.update((file, name) for name in runs)
        self._kills[file, killer or ""] += 1

    def of(self, file: str, mutant: Mutant) -> list[str]:
        """Tests that reach a mutant, the most kills a second first."""
        lines = range(mutant.line, mutant.last + 1)
        found = [
            test
            for test in self._tests
            if (reached := test.reached.get(file)) is not None
            and (mutant.is_at_import or not reached or not reached.isdisjoint(lines))
        ]
        return [test.name for test in sorted(found, key=lambda test: -self._rate(file, test))]

    def _rate(self, file: str, test: Profile) -> float:
        key = file, test.name
        share = (self._kills[key] + 1) / (self._runs[key] + 2)
        own, all_of_it = len(test.reached[file]), sum(map(len, test.reached.values()))
        alone = (own + 1) / (all_of_it + len(test.reached))
        path, module = Path(test.name.partition("::")[0]), Path(file)
        is_near = path.parts[1] == module.parts[1]  # of the same room
        is_its_own = path.stem == f"test_{module.stem}"
        return share * alone * 4 ** (is_near + is_its_own) / max(test.seconds, 0.1)


def profiled(runner: Runner, files: list[str], limit: float, log: Path | None) -> list[Profile]:
    """What each test reaches; files that are in the log, and have not changed, are not run.

    A test for which there was no time may reach any line of the modules that others of its file do.
    """
    path = log.with_suffix(".tests") if log else None
    lines = path.read_text().splitlines() if path and path.exists() else []
    digests = {file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest() for file in files}
    known: dict[str, Any] = {
        one["file"]: one["tests"]
        for one in map(json.loads, lines)
        if one["digest"] == digests.get(one["file"])
    }
    for file in files:
        if file in known:
            continue
        answer = runner.run([file], limit, None)
        red = [one["test"] for one in answer["tests"] if not one["is_green"]]
        if answer["status"] or red:
            sys.exit(f"without a change, {file} is not green: {red}\n{answer['output']}")
        run = {one["test"] for one in answer["tests"]}
        files_of_it = {name for one in answer["tests"] for name in one["reached"]}
        unknown = {"seconds": UNKNOWN_SECONDS, "reached": dict.fromkeys(files_of_it, ())}
        known[file] = [
            *answer["tests"],
            *({"test": x} | unknown for x in answer["collected"] if x not in run),
        ]
        print(f"{file}: {len(answer['tests'])} tests", flush=True)
        if path:
            with path.open("a") as written:
                written.write(
                    json.dumps({"file": file, "digest": digests[file], "tests": known[file]})
                )
                written.write("\n")
    profiles = [
        Profile(one["test"], one["seconds"], {x: frozenset(y) for x, y in one["reached"].items()})
        for file in files
        for one in known[file]
    ]
    return sharing(profiles)


def sharing(tests: list[Profile]) -> list[Profile]:
    """Each case of a test reaches what any of them does: JAX traces a program for the first alone.

    Where some lines are unknown, no line says that any may be reached.
    """
    reached: dict[str, dict[str, list[frozenset[int]]]] = {}
    for test in tests:
        of_function = reached.setdefault(test.name.partition("[")[0], {})
        for file, lines in test.reached.items():
            of_function.setdefault(file, []).append(lines)

    def joined(sets: list[frozenset[int]]) -> frozenset[int]:
        return frozenset[int]().union(*sets) if all(sets) else frozenset[int]()

    return [
        test._replace(
            reached={
                file: joined(sets) for file, sets in reached[test.name.partition("[")[0]].items()
            }
        )
        for test in tests
    ]


def sampled(
    made: dict[str, list[Mutant]], number: int | None, seed: int
) -> dict[str, list[Mutant]]:
    """A random part of each module's mutants, in proportion; each module has one at least.

    Of a module each kind of change has its proportion, too, up to one mutant.
    """
    total = sum(map(len, made.values()))
    chosen: dict[str, list[Mutant]] = {}
    for file, all_of_it in made.items():
        share = len(all_of_it) if number is None else max(1, round(number * len(all_of_it) / total))
        order, draw = [*all_of_it], random.Random(f"{seed} {file}")
        draw.shuffle(order)
        order.sort(key=lambda one: one.kind)
        start, distance = draw.random(), len(order) / share
        chosen[file] = [order[int((start + i) * distance)] for i in range(share)]
    return chosen


def tables(options: argparse.Namespace) -> Iterator[Table]:
    modules, tests, explained = suite()
    only, log = options.only or [""], options.log
    modules = [file for file in modules if any(part in file for part in only)]
    tests = [file for file in tests if any(part in file for part in options.tests or [""])]
    lines = log.read_text().splitlines() if log and log.exists() else []
    known = {(one["file"], one["text"], one["line"]): one for one in map(json.loads, lines)}
    tier = ["--slow"] if options.slow else []
    warm, cold = Runner("--warm", *tier), Runner(*tier)
    end = time.monotonic() + 60 * options.minutes
    number = options.sample or (2 if options.tiny else 20 if options.short else None)
    chosen = sampled(
        {file: mutants((ROOT / file).read_text("utf-8")) for file in modules}, number, options.seed
    )
    killers = Killers(profiled(warm, tests, options.profile, log))
    found: dict[str, list[str]] = {file: [] for file in modules}
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    queue = [(file, mutant) for file, some in chosen.items() for mutant in some]
    random.Random(options.seed).shuffle(queue)  # so that a run that ends early is a sample, too
    for file, mutant in queue:
        key = file, mutant.text, mutant.line
        if mutant.text in explained.get(file, {}):
            found[file].append(EXPLAINED)
            kinds[mutant.kind].append(EXPLAINED)
            continue
        if key not in known:
            if time.monotonic() > end:
                continue
            known[key] = {"file": file, "line": mutant.line, "text": mutant.text}
            known[key] |= judged(warm, cold, file, mutant, killers, options.limit)
            print(" ".join(map(str, known[key].values())), flush=True)
            if log:
                with log.open("a") as written:
                    written.write(json.dumps(known[key]) + "\n")
        found[file].append(known[key]["status"])
        kinds[mutant.kind].append(known[key]["status"])
    for runner in (warm, cold):
        runner.end()
    rows = [row(file, some) for file, some in found.items() if some]
    yield Table("Mutants", [*rows, row("all", [one for some in found.values() for one in some])])
    yield Table("By kind of change", [row(kind, some) for kind, some in sorted(kinds.items())])


def judged(
    warm: Runner, cold: Runner, file: str, mutant: Mutant, killers: Killers, limit: float
) -> dict[str, Any]:
    """Whether tests kill a mutant, which one did, and what it took."""
    tests, start = killers.of(file, mutant), time.monotonic()
    if not tests:
        return {"status": SURVIVED, "by": "no test reaches it", "seconds": 0}
    answer = {"status": NOT_EXCHANGED}
    if not mutant.is_at_import:
        answer = warm.run(tests, limit, (file, mutant))
    if answer["status"] == NOT_EXCHANGED:
        answer = cold.run(tests, limit, (file, mutant))
    red = [one["test"] for one in answer["tests"] if not one["is_green"]]
    killer = red[0] if red else "an error, or the limit of time" if answer["status"] else None
    killers.count(file, [one["test"] for one in answer["tests"]], killer)
    seconds = round(time.monotonic() - start, 1)
    by = killer or f"none of {len(answer['tests'])} tests, of {len(tests)} that reach it"
    green = SURVIVED if len(answer["tests"]) == len(tests) else UNDECIDED
    return {"status": KILLED if killer else green, "by": by, "seconds": seconds}


def row(name: str, found: list[str]) -> dict[str, str]:
    """Counts, and the share of mutants that survive, of those that are killed or survive."""
    counts = {status: found.count(status) for status in (KILLED, UNDECIDED, EXPLAINED, SURVIVED)}
    known = counts[KILLED] + counts[SURVIVED]
    share = "-"
    if known:
        interval = stats.binomtest(counts[SURVIVED], known).proportion_ci(method="wilson")
        low, high = 100 * interval.low, 100 * interval.high
        share = f"{100 * counts[SURVIVED] / known:.1f} % ({low:.1f}-{high:.1f})"
    shown = {status: str(count) for status, count in counts.items()}
    return {"module": name, "run": str(len(found))} | shown | {"survive": share}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", help="modules whose path holds one of these")
    parser.add_argument("--tests", nargs="*", help="files of tests whose path holds one of these")
    parser.add_argument("--sample", type=int, help="so many mutants, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--minutes", type=float, default=1e9, help="when to stop")
    parser.add_argument("--limit", type=float, default=60, help="seconds of tests for a mutant")
    parser.add_argument("--slow", action="store_true", help="with tests of the slow tier")
    parser.add_argument("--profile", type=float, default=60, help="seconds for a file of tests")
    parser.add_argument(
        "--log", type=Path, help="a file of JSON lines to append to, and go on from"
    )


PART = Part(__doc__, tables, add_options)
