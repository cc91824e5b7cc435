"""What it takes to read a batch of records from files that are not read whole.

    python -m tests.benchmarks.records --markdown tests/benchmarks/results/records.md

Files of tokens, written once; then batches at positions drawn at random, as Poisson sampling draws
them. Each row is a process of its own: the memory is its peak, beyond what it had when the source
was made. Files that were just written are in the system's cache, which is no process's memory: the
times are those of decoding, and not of a disk.
"""

import argparse
import functools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from rich.console import Console

import eqx_dp as dp

from . import report

LENGTH, FILES, BATCHES = 1024, 4, 10
WAYS = ("array record",)
_COLUMNS = ("files", "MiB in files", "records a batch", "ms a batch", "peak beyond, MiB")


def written(way: str, records: int, folder: Path) -> list[str]:
    """Files with records of `LENGTH` tokens of 32 bits each."""
    files: list[str] = []
    for number in range(FILES):
        tokens = np.random.default_rng(number).integers(
            0, 50_000, (records // FILES, LENGTH), np.int32
        )
        files.append(str(folder / f"{way.replace(' ', '_')}.{number}"))
        writer: Any = ArrayRecordWriter(files[-1], "group_size:1,uncompressed")
        for row in tokens:
            writer.write(row.tobytes())
        writer.close()
    return files


def measured(files: list[str], batch: int, readers: int) -> dict[str, float]:
    """Seconds a batch, and bytes beyond those that were there once the source was made."""
    decode = functools.partial(np.frombuffer, dtype=np.int32)
    source = dp.Records(ArrayRecordDataSource(files), decode)
    random = np.random.default_rng(0)
    positions = [np.sort(random.integers(0, len(source), batch)) for _ in range(BATCHES + 1)]
    source[positions[-1][:1]]
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    began = time.perf_counter()
    for some in positions[:-1]:
        assert source[some].shape == (batch, LENGTH)
    return {"seconds": (time.perf_counter() - began) / BATCHES, "peak": _memory("VmHWM") - before}


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(told: list[str] | None = None) -> None:
    """Measures, each row in a process, and writes a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--one", nargs="+", help="measure these files here; prints JSON")
    options = parser.parse_args(told)
    if options.one is not None:
        print(json.dumps(measured(options.one, options.batch, options.readers)))
        return
    rows: list[tuple[str, ...]] = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            files = written(way, options.records, Path(folder))
            size = sum(Path(file).stat().st_size for file in files)
            sizes = ["--batch", str(options.batch), "--readers", str(options.readers)]
            command = [sys.executable, "-m", __spec__.name, *sizes, "--one", *files]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        cells = (f"{size / 2**20:.0f}", str(options.batch), f"{found['seconds'] * 1000:.0f}")
        rows.append((way, *cells, f"{found['peak'] / 2**20:.0f}"))
    note = f"a batch itself is {options.batch * LENGTH * 4 / 2**20:.0f} MiB"
    table = report.Cells("Batches of records drawn at random", _COLUMNS, rows, note)
    Console(width=140).print(report.for_terminal(table))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.records", "--records", str(options.records)]
        report.write_markdown(
            options.markdown,
            shlex.join(command),
            [table],
            "Reading records from files",
            f"{FILES} files of records of {LENGTH} 32-bit tokens; {BATCHES} batches at random "
            f"positions, {options.readers} readers. The files are in the system's cache. The peak "
            "is of a batch, and what readers keep of freed buffers.",
        )


if __name__ == "__main__":
    main()
