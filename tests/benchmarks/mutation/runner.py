"""Runs tests on changed modules, each in a fork of this process: `python -m ...mutation.runner`.

A request is a line of JSON, `{"file": ..., "place": [place, turn], "tests": [...], "limit": ...}`:
tests run in this order until one fails, or until they took `limit` seconds of processor time. The
answer is a line of JSON, too. A request without a place runs the tests on the module as it is, and
says of each how long it took, and which lines of the package it reached.

What takes long is imported once: libraries, pytest and, with `--warm`, the package. In a fork of a
warm process the functions of the changed module take their new code where they are. Nothing here
starts a backend of JAX: its threads do not survive a fork. All forks share compiled programs.
"""

import argparse
import collections
import contextlib
import gc
import importlib.machinery
import json
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dp_accounting.pld.privacy_loss_distribution
import equinox
import hypothesis
import jax
import mpmath
import optax
import pytest
import scipy.stats

from .changes import NOT_EXCHANGED, planted

ROOT = Path(__file__).parents[3]
PACKAGE = f"{ROOT}/eqx_dp/"
HANGING = 10  # times the limit, in seconds of the clock
_IMPORTED = (dp_accounting, equinox, hypothesis, jax, mpmath, optax, scipy)


class Server:
    """A plugin of pytest: its loop reads requests, and forks for each."""

    def __init__(self, answers: int, programs: str, is_warm: bool):
        self._answers, self._programs, self._is_warm = answers, programs, is_warm

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        return True  # forks collect what they run

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self._is_warm:
            package = importlib.import_module("eqx_dp")
            for module in pkgutil.walk_packages(package.__path__, "eqx_dp."):
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
        self._show_fixtures(session)
        gc.freeze()
        for line in sys.stdin:
            answer = self._answer(session, **json.loads(line))
            os.write(self._answers, (json.dumps(answer) + "\n").encode())
        return True

    @staticmethod
    def _show_fixtures(session: pytest.Session) -> None:
        """Fixtures of `conftest.py` are there for every collection, and not for the first alone.

        Since pytest 9.2 they belong to the nodes of folders that the first one made; tests that ask
        for them would be red in any other, whatever the mutant. Before that there is nothing to do.
        """
        for name, plugin in session.config.pluginmanager.list_name_plugin():
            if name.endswith("conftest.py"):
                with contextlib.suppress(TypeError):
                    fixtures: Any = session._fixturemanager  # pyright: ignore[reportPrivateUsage]
                    fixtures.parsefactories(holder=plugin, node=session)

    def _answer(self, session: pytest.Session, limit: float, **asked: Any) -> dict[str, Any]:
        folder = tempfile.mkdtemp(prefix="mutant-")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads
            child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                self._run(session, Path(folder), limit, **asked)
            os._exit(1)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.alarm(int(HANGING * (limit + 5)))
        _, status = os.waitpid(child, 0)
        signal.alarm(0)
        result = Path(folder, "result")
        lines = result.read_text().splitlines() if result.exists() else []
        output = Path(folder, "output").read_text(errors="replace")[-2_000:] if status else ""
        shutil.rmtree(folder, ignore_errors=True)
        collected, *found = map(json.loads, lines or ["[]"])
        status = os.waitstatus_to_exitcode(status)
        return {"status": status, "collected": collected, "tests": found, "output": output}

    def _run(
        self,
        session: pytest.Session,
        folder: Path,
        limit: float,
        file: str,
        place: tuple[int, int] | None,
        tests: list[str],
    ) -> None:
        written = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(written, 1)
        os.dup2(written, 2)
        seconds = int(2 * limit) + 30  # a loop that does not end
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # no smaller examples
        hypothesis.settings.register_profile("mutants", derandomize=True, phases=phases)
        hypothesis.settings.load_profile("mutants")
        jax.config.update("jax_compilation_cache_dir", self._programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.01)
        if place is not None:
            source = (ROOT / file).read_text("utf-8")
            code = compile(planted(source, *place), str(ROOT / file), "exec")
            if self._is_warm:
                try:
                    exchange(code)
                except ValueError:
                    os._exit(NOT_EXCHANGED)
            else:
                sys.meta_path.insert(0, _Finder(file, code))
        is_first = True
        start = time.process_time()
        with (folder / "result").open("w") as result:
            for some in _growing(tests):
                items = _ordered(session.perform_collect(some), some)
                if is_first:
                    print(json.dumps([item.nodeid for item in items]), file=result, flush=True)
                is_first = False
                for item, following in zip(items, [*items[1:], None], strict=True):
                    found = _result(session, item, following, is_traced=place is None)
                    print(json.dumps(found), file=result, flush=True)
                    is_red = place is not None and not found["is_green"]
                    if is_red or time.process_time() - start > limit:
                        os._exit(0)
        os._exit(0)


def _growing(tests: list[str]) -> Iterator[list[str]]:
    """Parts of a list: most mutants are found by its first tests; only their files are imported."""
    size = 3
    while tests:
        yield tests[:size]
        tests, size = tests[size:], 4 * size


def _ordered(items: Sequence[pytest.Item], asked: list[str]) -> list[pytest.Item]:
    """Items as they were asked for; of a file, each function's first case before any second."""
    seen: collections.Counter[str] = collections.Counter()
    turns: dict[pytest.Item, int] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        seen[function] += 1
        turns[item] = seen[function]
    place = {name: number for number, name in enumerate(asked)}
    return sorted(items, key=lambda item: (place.get(item.nodeid, 0), turns[item]))


def _result(
    session: pytest.Session, item: pytest.Item, following: pytest.Item | None, is_traced: bool
) -> dict[str, Any]:
    """Runs a test: whether it passes, seconds, and the lines that it reached."""
    reached: dict[str, set[int]] = {}
    before, failed = time.process_time(), session.testsfailed
    with reaching(reached) if is_traced else contextlib.nullcontext():
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return {
        "test": item.nodeid,
        "seconds": round(time.process_time() - before, 2),
        "is_green": session.testsfailed == failed,
        "reached": {name: sorted(lines) for name, lines in reached.items()},
    }


def exchange(code: types.CodeType) -> None:
    """Functions of a module that is imported get the code that a changed module gives them.

    Raises:
        ValueError: a function holds on to fewer variables than before: it must be made anew.
    """
    new = {(one.co_qualname, one.co_firstlineno): one for one in _codes(code)}
    gc.unfreeze()
    for found in gc.get_objects():
        if isinstance(found, types.FunctionType):
            old = found.__code__
            if old.co_filename == code.co_filename:
                found.__code__ = new.get((old.co_qualname, old.co_firstlineno), old)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


@contextlib.contextmanager
def reaching(found: dict[str, set[int]]) -> Iterator[None]:
    """Collects the lines of the package that run."""

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return None
        lines = found.setdefault(name.removeprefix(f"{ROOT}/"), set())

        def line(frame: types.FrameType, event: str, _: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    before = sys.gettrace()
    sys.settrace(trace)
    yield
    sys.settrace(before)


class _Planted(importlib.machinery.SourceFileLoader):
    """Loads a module from a changed program."""

    def __init__(self, name: str, path: str, code: types.CodeType):
        super().__init__(name, path)
        self._changed = code

    def get_code(self, fullname: str) -> Any:
        return self._changed


class _Finder:
    """Finds one module of the package changed, all others as they are."""

    def __init__(self, file: str, code: types.CodeType):
        self._name = file.removesuffix(".py").replace("/", ".")
        self._path, self._code = str(ROOT / file), code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        loader = _Planted(name, self._path, self._code)
        spec = importlib.machinery.ModuleSpec(name, loader, origin=self._path)
        spec.has_location = True
        return spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", action="store_true", help="import the package before the forks")
    parser.add_argument("--slow", action="store_true", help="tests of the slow tier, too")
    options = parser.parse_args()
    os.chdir(ROOT)
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    arguments = ["-n", "0", "-s", "-p", "no:cacheprovider", "tests"]
    arguments += ["-m", ""] if options.slow else []
    with tempfile.TemporaryDirectory(prefix="programs-") as programs:
        pytest.main(arguments, plugins=[Server(answers, programs, options.warm)])


if __name__ == "__main__":
    main()
