"""The table of faults can be replayed: each text is there once, and each test exists."""

import pathlib

import pytest

from tests.benchmarks.faults import FOLDER, ROOT, read_faults


@pytest.mark.parametrize("room", sorted(file.stem for file in FOLDER.glob("*.toml")))
def test_each_fault_can_be_planted(room):
    for fault in read_faults(room):
        file, _, test = fault.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in pathlib.Path(ROOT, file).read_text(), fault.what
