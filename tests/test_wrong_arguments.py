"""What a user sees first who gives an argument of a wrong type."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_first_error_is_ours_and_names_the_argument():
    # In a process of its own: this one has the import hook, whose errors come first.
    command = [sys.executable, "-m", "tests.wrong_arguments"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *complaints, summary = done.stdout.splitlines()
    assert not complaints, "\n".join(complaints)
    assert int(summary.split()[0]) > 250
