"""`examples/audit.py`: runs with too little noise are found, and honest ones are not accused."""

import re
import sys

import pytest

from tests.test_examples import Flat, run
from tests.test_training_examples import load

HONEST = ["epsilon 1", "epsilon 3", "epsilon 10"]
FAULTY = ["says 1, noise / 4", "says 3, noise / 4", "says 1, no noise", "says 3, no noise"]


def rows(output: str) -> dict[str, list[str]]:
    """The cells of the table's rows, by the name of the run."""
    lines = [line.split("│")[1:-1] for line in output.splitlines() if "│" in line]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def check(output: str, picture, runs: list[str]):
    found = rows(output)
    assert [name for name in found if name in runs] == runs
    for name in runs:
        upper, _, lower, by, _ = found[name]
        claim = int(re.search(r"\d+", name)[0])
        assert claim - 0.01 < float(upper) <= claim
        assert (float(lower) > claim) == (name in FAULTY)
        assert ("gradient" in by) == (name in FAULTY)
        assert by == "-" or name in FAULTY
    *_, where, last = output.splitlines()
    assert where == f"picture: {picture}"
    faulty = [name for name in runs if name in FAULTY]
    assert last == f"give away more than they say: {'; '.join(faulty)}"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_runs_with_too_little_noise_are_found(tmp_path, monkeypatch, capsys):
    audit = load("audit")
    monkeypatch.setattr(audit.digits, "Digits", Flat)
    runs = ["epsilon 3", "says 3, noise / 4", "says 3, no noise"]
    monkeypatch.setattr(audit, "CASES", [case for case in audit.CASES if case.name in runs])
    picture = tmp_path / "new folder" / "audit.png"
    few = ("--steps", 40, "--images", 50, "--seed", 1, "--out", picture)
    monkeypatch.setattr(sys, "argv", ["audit.py", *map(str, few)])
    audit.main()
    check(capsys.readouterr().out, picture, runs)


@pytest.mark.exhaustive
def test_the_digits_are_audited(tmp_path):
    picture = tmp_path / "audit.png"
    check(run("audit.py", "--out", picture), picture, HONEST + FAULTY)


def test_random_images_are_like_digits_in_shape_alone():
    audit = load("audit")
    images, labels = audit.random_images(2_000, seed=0)
    private, private_labels, *_ = audit.digits.load_images()
    assert (images.shape[1:], images.dtype) == (private.shape[1:], private.dtype)
    assert labels.dtype == private_labels.dtype
    assert set(images.ravel()) == {0.0, 1.0}
    assert set(labels) == set(range(10))
