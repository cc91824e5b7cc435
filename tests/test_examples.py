"""The examples, run as a reader would run them."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_line(output: str) -> tuple[float, float, float]:
    line = output.splitlines()[-1]
    match = re.fullmatch(r"accuracy=(\d\.\d\d) epsilon=(\d+\.\d\d) delta=(\S+)", line)
    assert match, line
    accuracy, epsilon, delta = map(float, match.groups())
    return accuracy, epsilon, delta


def test_digits_reach_their_accuracy(tmp_path):
    picture = tmp_path / "new folder" / "digits.png"
    accuracy, epsilon, delta = last_line(run("digits.py", "--out", picture))
    assert accuracy >= 0.90
    assert (epsilon, delta) == (3.0, 1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_digits_take_their_options(tmp_path):
    output = run(
        *("digits.py", "--policy", "mixed_float16", "--epsilon", 8, "--steps", 6, "--seed", 1),
        *("--out", tmp_path / "digits.png"),
    )
    _, epsilon, _ = last_line(output)
    assert epsilon == 8.0
    assert "6/6" in output
