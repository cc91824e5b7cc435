"""Runs tests on changed modules, each in a fork of this process: `python -m ...mutation.runner`.

It reads requests as JSON lines, `{"file": ..., "tests": [...], "place": [place, turn]}`, and says
`true` if all tests pass. It imports what takes long once, but nothing of the package,
and JAX starts no threads before the fork.
"""

import ast
import importlib.machinery
import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import dp_accounting.pld.privacy_loss_distribution
import equinox
import hypothesis
import jax
import optax
import pytest
import scipy.stats

from .changes import Mutant

ROOT = Path(__file__).parents[3]
TIMEOUT = 600
_IMPORTED = (dp_accounting, equinox, hypothesis, jax, optax, scipy)


class _Planted(importlib.machinery.SourceFileLoader):
    """Loads a module from a changed program."""

    def __init__(self, name: str, path: str, code: ast.Module):
        super().__init__(name, path)
        self._changed = code

    def get_code(self, fullname: str) -> Any:
        return compile(self._changed, self.path, "exec")


class _Finder:
    """Finds one module of the package changed, all others as they are."""

    def __init__(self, file: str, code: ast.Module):
        self._name = file.removesuffix(".py").replace("/", ".")
        self._path, self._code = str(ROOT / file), code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        loader = _Planted(name, self._path, self._code)
        spec = importlib.machinery.ModuleSpec(name, loader, origin=self._path)
        spec.has_location = True
        return spec


def is_green(file: str, tests: list[str], place: tuple[int, int] | None) -> bool:
    """Whether all tests pass in a fork of this process."""
    folder = tempfile.mkdtemp(prefix="mutant-")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads
        child = os.fork()
    if child == 0:
        _run(file, tests, place, folder)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(TIMEOUT)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    shutil.rmtree(folder, ignore_errors=True)
    return status == 0


def _run(file: str, tests: list[str], place: tuple[int, int] | None, folder: str) -> None:
    status: Any = 1
    try:  # the child ends here, whatever happens
        stderr = os.dup(2)
        written = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        if place is not None:
            code = Mutant(0, "", *place).planted((ROOT / file).read_text("utf-8"))
            sys.meta_path.insert(0, _Finder(file, code))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-n", "0"]
        status = pytest.main([*options, *tests])
    finally:
        sys.stdout.flush()
        if int(status) and place is None:
            os.write(stderr, Path(folder, "output").read_bytes())
        os._exit(0 if int(status) == 0 else 1)


if __name__ == "__main__":
    os.chdir(ROOT)
    for line in sys.stdin:
        print(json.dumps(is_green(**json.loads(line))), flush=True)
