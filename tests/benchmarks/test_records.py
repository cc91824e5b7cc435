"""The command that measures how records are read from files."""

import pytest

pytest.importorskip("array_record.python.array_record_module")


@pytest.mark.slow
def test_command(tmp_path):
    from tests.benchmarks import records

    path = tmp_path / "table.md"
    records.main(["--records", "4000", "--batch", "16", "--markdown", str(path)])
    written = path.read_text()
    for way in records.WAYS:
        assert f"| {way} |" in written
