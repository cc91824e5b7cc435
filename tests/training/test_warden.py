"""What is said at the loss of a host is what a resume will find."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from eqx_dp.training import files

WARDEN = Path(files.__file__).with_name("warden.py")

# Host 0 of 2, whose peer is lost while it still writes its checkpoint of step 10.
HOST = textwrap.dedent("""
    import os, pathlib, subprocess, sys, time
    warden, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    folder = directory / "hosts" / "0"
    folder.mkdir(parents=True)
    (folder / "1").write_text("1 12 runs")
    words = [sys.executable, "-I", warden, str(folder), "0", "2", "20"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE)
    (folder / "lost").write_text("Host 1 of 2 ended without a word after step 12.")
    time.sleep(1)
    (directory / "latest.partial").symlink_to("00000010")
    (directory / "latest.partial").replace(directory / "latest")
    time.sleep(60)
""")


def checkpoint(directory, number):
    folder = directory / f"{number:08d}"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    (folder / "files.json").write_text(json.dumps({"run.json": ""}))
    return folder


def said_by_a_warden(directory):
    words = [sys.executable, "-I", "-c", HOST, str(WARDEN), str(directory)]
    found = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert found.returncode != 0
    return found.stderr


def test_the_checkpoint_that_is_named_is_the_last(tmp_path):
    """Also the one that is still being written when the loss is noticed."""
    for number in (5, 10):
        checkpoint(tmp_path, number)
    (tmp_path / "latest").symlink_to("00000005")
    said = said_by_a_warden(tmp_path)
    assert "Host 1 of 2 ended without a word after step 12." in said
    assert f"The last checkpoint is that of step 10 in {tmp_path}." in said


def test_a_checkpoint_that_lacks_a_file_is_not_named(tmp_path):
    checkpoint(tmp_path, 5)
    (checkpoint(tmp_path, 10) / "run.json").unlink()
    (tmp_path / "latest").symlink_to("00000005")
    assert "The last checkpoint is that of step 5 in" in said_by_a_warden(tmp_path)
