"""Each planted fault turns its test red: the table of faults beside this file, room by room."""

import subprocess
import sys

import pytest

from tests.faults.__main__ import FOLDER, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("room", sorted(file.stem for file in FOLDER.glob("*.toml")))
def test_each_fault_turns_its_test_red(room):
    command = [sys.executable, "-m", "tests.faults", room, "--jobs", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
