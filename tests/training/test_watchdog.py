"""What is said at the loss of a host is what a resume will find."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eqx_dp.training import files

WATCHDOG = Path(files.__file__).with_name("watchdog.py")


def checkpoint(directory, number):
    folder = directory / f"{number:08d}"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    listed = {"step": number, "files": {"run.json": [2, ""]}}
    (folder / "files.json").write_text(json.dumps(listed))
    return folder


def turn_latest(directory, number):
    (directory / "privacy.json").write_text(json.dumps({"steps_done": number}))


class Host:
    """One of two, whose watchdog is told what it does; the other has taken 12 steps."""

    def __init__(self, directory, number):
        self.folder = directory / "hosts" / "0"
        self.folder.mkdir(parents=True)
        self.other = self.folder / str(1 - number)
        self.other.write_text("12")
        words = [sys.executable, "-I", WATCHDOG, self.folder, str(number), "2"]
        self.watchdog = subprocess.Popen(
            words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def says(self, *lines):
        self.watchdog.stdin.write("".join(f"{line}\n" for line in lines))
        self.watchdog.stdin.flush()

    def ends(self):
        """What the watchdog says then."""
        _, said = self.watchdog.communicate(timeout=300)
        assert self.watchdog.returncode == 0
        return said


def test_the_checkpoint_that_is_named_is_the_last(tmp_path):
    """Also the one that host 0 is still writing when host 1 is lost."""
    for number in (5, 10):
        checkpoint(tmp_path, number)
    turn_latest(tmp_path, 5)
    host = Host(tmp_path, 1)
    host.says("step 13", "peer?")
    time.sleep(0.5)
    (host.folder / "lost").write_text("Host 0 of 2 ended without a word after step 12.")
    time.sleep(1)
    turn_latest(tmp_path, 10)
    (host.folder / "ended").touch()
    said = host.ends()
    assert "Host 0 of 2 ended without a word after step 12. Host 1 has taken 13 steps" in said
    assert f"The last checkpoint is that of step 10 in {tmp_path}." in said


def test_a_checkpoint_that_lacks_a_file_is_not_named(tmp_path):
    checkpoint(tmp_path, 5)
    (checkpoint(tmp_path, 10) / "run.json").unlink()
    turn_latest(tmp_path, 5)
    said = Host(tmp_path, 0).ends()
    assert "Host 0 of 2 ended without a word after step 0." in said
    assert "The last checkpoint is that of step 5 in" in said


@pytest.mark.parametrize("last_words", ["peer?", ""])
def test_a_machine_that_is_silent_is_to_blame(last_words, tmp_path):
    """And not the host that JAX ends for it."""
    host = Host(tmp_path, 0)
    long_ago = time.time() - 60
    os.utime(host.other, (long_ago, long_ago))
    host.says(*filter(None, ("step 12", last_words)))
    said = host.ends()
    assert "Host 1 of 2 was not heard of any more after step 12. Host 0 has taken 12 steps" in said
    assert "There is no checkpoint yet in" in said


def test_a_host_that_is_done_says_nothing(tmp_path):
    host = Host(tmp_path, 0)
    host.says("step 12", "done")
    assert host.ends() == ""
    assert not (host.folder / "0").exists()  # and is not missed
    assert not (host.folder / "lost").exists()
