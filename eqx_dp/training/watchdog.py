"""A small process beside each host of a run, which says what to do when a host is lost.

JAX's heartbeat finds a host that is lost, and ends the others, which may hang in a collective: they
cannot speak for themselves. This process outlives its host. It runs this file alone, with the
standard library alone:

    python watchdog.py FOLDER HOST HOSTS

and hears from its host by lines on standard input: `step N`, `done`, `peer?` (a collective failed,
which is likely a peer's fault), `failed`. Who ends without `done` is lost, and the first that does
is to blame: JAX ends the hosts that it leaves behind. Watchdogs of different hosts meet in a folder
of the run's directory:

    0  1  2 ...   written anew all the time while a host's machine is well: its last step
    lost          which host was lost first, and how
    ended         host 0, which writes checkpoints, writes no more
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

_PERIOD = 0.5
# A machine whose watchdog has written nothing for so long is lost. (JAX takes longer to say so.)
_SILENCE = 5.0
# What other watchdogs get to say what they know.
_GRACE = 10.0


class Watchdog:
    """Watches over one host. Watchdogs meet in a folder; its grandparent is the run's directory."""

    def __init__(self, folder: Path, host: int, hosts: int):
        self._folder, self._directory = folder, folder.parent.parent
        self._host, self._hosts = host, hosts
        self._step, self._state, self._unread = 0, "runs", b""

    def watch(self) -> None:
        """Returns when its host is done, or has ended and what there is to say is said."""
        while self._state == "runs":
            self._write_step()
            self._listen()
        if self._state == "done":
            (self._folder / str(self._host)).unlink()
            return
        if self._host == 0:
            (self._folder / "ended").touch()
        if self._state == "peer?" and not self._silent():
            self._wait_for("lost")
        self._blame()
        self._wait_for("ended")  # so that the checkpoint that is named is the one that is used
        self._tell()

    def _listen(self) -> None:
        ready, _, _ = select.select([0], [], [], _PERIOD)
        if not ready:
            return
        found = os.read(0, 65536)
        if not found:
            self._state = "ended"
        *lines, self._unread = (self._unread + found).split(b"\n")
        for line in lines:
            word, _, number = line.decode().partition(" ")
            if word == "step":
                self._step = int(number)
            else:
                self._state = word

    def _write_step(self) -> None:
        beside = self._folder / f"{self._host}.partial"
        beside.write_text(str(self._step))
        beside.replace(self._folder / str(self._host))

    def _wait_for(self, name: str) -> None:
        end = time.monotonic() + _GRACE
        while not (self._folder / name).exists() and time.monotonic() < end:
            self._write_step()
            time.sleep(_PERIOD / 5)

    def _blame(self) -> None:
        """Says which host was lost, if nobody has: a machine that is silent, or this host."""
        self._write_step()
        host, step = self._silent() or (self._host, self._step)
        how = "ended without a word" if self._state == "ended" else "failed"
        if host != self._host:
            how = "was not heard of any more"
        try:
            with (self._folder / "lost").open("x") as stream:
                stream.write(f"Host {host} of {self._hosts} {how} after step {step}.")
        except FileExistsError:
            pass

    def _silent(self) -> tuple[int, int] | None:
        """A host whose machine is silent, and its last step; by the clock of the file system."""
        files = [self._folder / str(host) for host in range(self._hosts)]
        times = {host: file.stat().st_mtime for host, file in enumerate(files) if file.exists()}
        for host, written in times.items():
            if times[self._host] - written > _SILENCE:
                return host, int(files[host].read_text())
        return None

    def _tell(self) -> None:
        number = self._latest()
        latest = (
            "There is no checkpoint yet"
            if number is None
            else f"The last checkpoint is that of step {number}"
        )
        sys.stderr.write(
            f"eqx_dp: {(self._folder / 'lost').read_text()} Host {self._host} has taken "
            f"{self._step} steps and stops, as hosts can only go on together. {latest} in "
            f"{self._directory}. Start the program again on all hosts: it goes on from there, and "
            "ends with the same parameters.\n"
        )
        sys.stderr.flush()

    def _latest(self) -> int | None:
        """The newest checkpoint that counts and has all its files; digests would take too long."""
        try:
            counts = int(json.loads((self._directory / "privacy.json").read_bytes())["steps_done"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        numbers = [int(x.name) for x in self._directory.iterdir() if x.name.isdecimal()]
        whole = (n for n in numbers if n <= counts and _has_its_files(self._directory / f"{n:08d}"))
        return max(whole, default=None)


def _has_its_files(checkpoint: Path) -> bool:
    try:
        listed = json.loads((checkpoint / "files.json").read_bytes())
        listed = listed.get("files", listed)
        return bool(listed) and all((checkpoint / name).is_file() for name in listed)
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def main() -> None:
    """Runs a watchdog; what asks its host to stop does not ask it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder, host, hosts = sys.argv[1:]
    try:
        Watchdog(Path(folder), int(host), int(hosts)).watch()
    except FileNotFoundError:  # the folder is gone: another run has taken the directory over
        sys.exit(1)


if __name__ == "__main__":
    main()
