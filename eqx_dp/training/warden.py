"""A small process beside each host of a run, which tells when a host is lost, and ends its own.

It is another process since a host that loses a peer cannot speak for itself: it hangs in a
collective, or JAX aborts it. It runs this file alone, with the standard library alone:

    python warden.py FOLDER HOST HOSTS SILENCE

and hears from its host by lines on standard input: `step N`, `done`, `peer?` (a collective failed,
which is likely a peer's fault), `failed`. Who ends without `done` is lost, and the first that does
is to blame: JAX aborts the hosts that it leaves behind. Wardens of different hosts meet in a folder
of the run's directory:

    0  1  2 ...   a host's beat: a counter, its last step, and whether it is done
    lost          which host was lost first, and how
    ended         host 0, which writes checkpoints, writes no more

Each writes its own beat, reads that of the next host alone, and reads `lost`: the work of a host
does not grow with their number. Time is measured by a warden's own clock: a host is lost whose beat
has not changed for SILENCE seconds.
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

_PERIOD = 0.5
# What a host that has been told gets to end by itself, before it is killed.
_GRACE = 5.0


class Warden:
    """Watches over one host, and over the next.

    Args:
        folder: where wardens meet; its grandparent is the run's directory.
        host: whose warden this is.
        hosts: how many there are.
        silence: seconds after which a host that is not heard of is lost.
    """

    def __init__(self, folder: Path, host: int, hosts: int, silence: float):
        self._folder, self._directory = folder, folder.parent.parent
        self._host, self._hosts, self._next = host, hosts, (host + 1) % hosts
        self._silence = silence
        self._parent = os.getppid()
        self._step, self._state, self._counter = 0, "runs", 0
        self._unread = b""
        self._heard: tuple[float, str] = (time.monotonic(), "")

    def watch(self) -> None:
        """Returns when its host is done, or has ended."""
        while self._state == "runs" and not self._lost():
            self._listen()
            self._beat()
        if self._state == "done":
            return
        if self._state == "peer?":
            self._wait_for_blame()
        if self._state != "runs":
            self._blame(self._host, "ended without a word" if self._state == "ended" else "failed")
        self._stop_host()
        self._wait_for_the_last_checkpoint()
        self._tell()
        self._end_host()

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

    def _beat(self) -> None:
        self._counter += 1
        beside = self._folder / f"{self._host}.partial"
        beside.write_text(f"{self._counter} {self._step} {self._state}")
        beside.replace(self._folder / str(self._host))

    def _lost(self) -> bool:
        """Whether some host is; the one that finds out tells the others by the file `lost`."""
        if (self._folder / "lost").exists():
            return True
        try:
            beat = (self._folder / str(self._next)).read_text()
        except OSError:
            beat = ""
        since, before = self._heard
        if beat != before:
            self._heard = time.monotonic(), beat
        elif not beat.endswith("done") and time.monotonic() - since > self._silence:
            self._blame(self._next, f"was not heard of for {self._silence:g} s")
            return True
        return False

    def _wait_for_blame(self) -> None:
        """Gives a peer that was lost the time to be missed."""
        end = time.monotonic() + self._silence + _GRACE
        while not self._lost() and time.monotonic() < end:
            self._beat()
            time.sleep(_PERIOD)

    def _blame(self, host: int, how: str) -> None:
        step = self._step
        if host != self._host:
            words = self._heard[1].split()
            step = int(words[1]) if len(words) == 3 else 0
        try:
            with (self._folder / "lost").open("x") as stream:
                stream.write(f"Host {host} of {self._hosts} {how} after step {step}.")
        except OSError:  # another was first
            pass

    def _tell(self) -> None:
        try:
            lost = (self._folder / "lost").read_text()
        except OSError:
            lost = "A host was lost."
        number = self._latest()
        latest = (
            "There is no checkpoint yet"
            if number is None
            else f"The last checkpoint is that of step {number}"
        )
        sys.stderr.write(
            f"eqx_dp: {lost} Host {self._host} has taken {self._step} steps and stops, as hosts "
            f"can only go on together. {latest} in {self._directory}. Start the program again on "
            "all hosts: it goes on from there, and ends with the same parameters.\n"
        )
        sys.stderr.flush()

    def _latest(self) -> int | None:
        """The checkpoint that a resume will use: the newest that counts and has all its files.

        (A resume compares digests as well, for which there is no time here.)
        """
        try:
            counts = int(os.readlink(self._directory / "latest"))
        except (OSError, ValueError):
            return None
        numbers = [int(x.name) for x in self._directory.iterdir() if x.name.isdecimal()]
        whole = (n for n in numbers if n <= counts and _has_its_files(self._directory / f"{n:08d}"))
        return max(whole, default=None)

    def _stop_host(self) -> None:
        """Stops a host that hangs; one that is well enough to end says so, and ends by itself."""
        end = time.monotonic() + _GRACE
        while self._state == "runs" and time.monotonic() < end:
            self._listen()
            self._beat()
        if self._hangs():
            os.kill(self._parent, signal.SIGSTOP)

    def _wait_for_the_last_checkpoint(self) -> None:
        """Until host 0 can write none, so that the one that is named is the one that is used."""
        if self._host == 0:
            (self._folder / "ended").touch()
        end = time.monotonic() + _GRACE + 4 * _PERIOD
        while not (self._folder / "ended").exists() and time.monotonic() < end:
            time.sleep(_PERIOD / 5)

    def _end_host(self) -> None:
        if self._hangs():
            os.kill(self._parent, signal.SIGKILL)

    def _hangs(self) -> bool:
        return self._state == "runs" and os.getppid() == self._parent


def _has_its_files(checkpoint: Path) -> bool:
    try:
        listed = json.loads((checkpoint / "files.json").read_bytes())
        return bool(listed) and all((checkpoint / name).is_file() for name in listed)
    except (OSError, ValueError, TypeError):
        return False


def main() -> None:
    """Runs a warden; what asks its host to stop does not ask it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder, host, hosts, silence = sys.argv[1:]
    try:
        Warden(Path(folder), int(host), int(hosts), float(silence)).watch()
    except FileNotFoundError:  # the folder is gone: another run has taken the directory over
        sys.exit(1)


if __name__ == "__main__":
    main()
