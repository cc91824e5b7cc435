"""Each planted fault can be planted: its text is there once, and so is the function of its test."""

import pytest

from tests.benchmarks.faults import FOLDER, ROOT, read_faults


@pytest.mark.parametrize("room", sorted(file.stem for file in FOLDER.glob("*.toml")))
def test_each_fault_can_be_planted(room):
    for fault in read_faults(room):
        file, _, test = fault.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), fault.what
