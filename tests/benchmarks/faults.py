"""Plants faults, one at a time, and sees that a test finds each.

    python -m tests.faults            # all rooms
    python -m tests.faults privacy    # the rows of privacy.toml
    python -m tests.faults --log FILE # goes on: rows that are red in FILE are not replayed again

A file `ROOM.toml` of `tests/faults` lists faults. Each gives the text that is replaced, which is
in the file exactly once, and one test:

    [[fault]]
    what = "padding is multiplied by zero"
    file = "eqx_dp/gradients/clip.py"
    was = "jnp.where(is_padding, 0, gradient)"
    becomes = "gradient * (1 - is_padding)"
    test = "tests/gradients/test_edge_cases.py::test_padding_adds_nothing[nan]"

The package and its tests are copied, and all tests of the rows must pass there, each as if it were
alone: what JAX compiled for another is cleared. Then, for each row, the fault is planted in a
further copy, and the row's test must fail in that. The exit status is 1 otherwise.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "tests" / "faults"
TIMEOUT = 600  # seconds for one test

# What a planted text raises that is no working code: such a failure says nothing about the test.
BROKEN_CODE = r"^E +(ImportError|ModuleNotFoundError|NameError|SyntaxError|UnboundLocalError)\b"


class FaultError(Exception):
    """A row that cannot be planted."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row of a table."""

    what: str
    file: str
    was: str
    becomes: str
    test: str

    @property
    def title(self) -> str:
        """How a row begins in what is printed and logged."""
        return f"{self.what:60} {self.test:90}"

    def planted(self) -> str:
        """The text of the file with the fault."""
        if not self.file.startswith("eqx_dp/") or not (ROOT / self.file).is_file():
            raise FaultError(f"there is no file {self.file!r} in eqx_dp/")
        source = (ROOT / self.file).read_text()
        if (count := source.count(self.was)) != 1:
            raise FaultError(f"`was` stands in {self.file} {count} times, not once:\n{self.was}")
        planted = source.replace(self.was, self.becomes)
        try:
            changes = ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))
        except SyntaxError as error:
            raise FaultError(f"with `becomes`, {self.file} is no Python: {error}") from None
        if not changes:
            raise FaultError(f"`becomes` means the same as `was` in {self.file}")
        return planted


def read_faults(room: str) -> list[Fault]:
    """The rows of one room; an error names the row that is wrong."""
    file = FOLDER / f"{room}.toml"
    if not file.exists():
        rooms = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))
        raise FaultError(f"there is no {file.name} in {FOLDER}; the rooms are: {rooms or 'none'}")
    faults: list[Fault] = []
    for i, row in enumerate(tomllib.loads(file.read_text())["fault"]):
        try:
            faults.append(Fault(**row))
            faults[-1].planted()
        except (TypeError, FaultError) as error:
            name = f"{file.name}, row {i + 1} ({row.get('what', 'without `what`')})"
            raise FaultError(f"{name}: {error}") from None
    return faults


def run_tests(folder: pathlib.Path, tests: list[str]) -> tuple[int, str]:
    """Runs tests in a folder: pytest's exit status and what it wrote."""
    options = ["-n", "0", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "", "--alone"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    # A copy is compiled once: the copies of that copy have what Python and pytest compiled.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    run = subprocess.run(
        ["timeout", str(TIMEOUT * len(tests)), *command],  # ends what the tests start, too
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return run.returncode, run.stdout


def copy_repository(folder: pathlib.Path) -> None:
    """Copies the package and the tests; everything else is a link."""
    for entry in ROOT.iterdir():
        if entry.name in ("eqx_dp", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(entry, folder / entry.name, ignore=ignored)
        elif entry.name != ".git":
            (folder / entry.name).symlink_to(entry)


def replay(fault: Fault, unplanted: pathlib.Path) -> tuple[str, float, str]:
    """Whether a test finds a fault: "red", "GREEN" or "BROKEN"; the seconds; what pytest wrote."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = pathlib.Path(name, "repository")
        shutil.copytree(unplanted, folder, symlinks=True)
        (folder / fault.file).write_text(fault.planted())
        status, output = run_tests(folder, [fault.test])
    is_error = re.search(r"^ERROR ", output, re.MULTILINE)  # in a fixture
    is_broken = status not in (0, 1) or is_error or re.search(BROKEN_CODE, output, re.MULTILINE)
    verdict = "BROKEN" if is_broken else "red" if status else "GREEN"
    return verdict, time.monotonic() - start, output


def main() -> int:
    """Replays the faults of some rooms or of all; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help="all rooms, unless named")
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at once; 2 by default")
    parser.add_argument("--log", type=pathlib.Path, help="a file to append to, and go on from")
    arguments = parser.parse_args()
    log: pathlib.Path = arguments.log or pathlib.Path(os.devnull)
    seen = log.read_text() if log.exists() else ""
    rooms = arguments.rooms or sorted(file.stem for file in FOLDER.glob("*.toml"))
    try:
        rows = [fault for room in rooms for fault in read_faults(room)]
    except FaultError as error:
        parser.error(str(error))

    problems: list[str] = []
    left = [fault for fault in rows if f"{fault.title} red" not in seen]
    with tempfile.TemporaryDirectory(prefix="fault-") as name, log.open("a") as written:
        folder = pathlib.Path(name)
        copy_repository(folder)
        tests = list(dict.fromkeys(fault.test for fault in left))
        status, output = run_tests(folder, tests) if tests else (0, "")
        if status:
            problems.append(f"Without a fault, a test is not green: exit status {status}\n{output}")
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            results = pool.map(lambda fault: replay(fault, folder), left)
            for fault, (verdict, seconds, output) in zip(left, results, strict=True):
                for file in (sys.stdout, written):
                    print(f"{fault.title} {verdict:6} {seconds:4.0f} s", file=file, flush=True)
                if verdict != "red":
                    problems.append(f"{verdict}: {fault.what}\n{fault.test}\n\n{output}")
    for problem in problems:
        print(f"\n{problem}")
    print(f"\n{len(left)} of {len(rows)} faults replayed, {len(problems)} problems")
    return 1 if problems else 0
