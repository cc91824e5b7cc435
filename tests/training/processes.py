"""Starts the processes of `tests.training.fire`, and hears what they say."""

import multiprocessing
import socket

from tests.training import fire


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Process:
    """One process, of one host."""

    def __init__(self, context, place, host, scenario, *arguments):
        self._channel, other = context.Pipe(duplex=False)
        self.found, self.steps = None, 0
        given = (place, host, other, scenario, *arguments)
        self.process = context.Process(target=fire.start, args=given)
        self.process.start()
        other.close()

    def until_step(self, count):
        """Waits until this process has taken so many steps; whether it has."""
        while self.steps < count:
            assert self._channel.poll(200)
            try:
                message = self._channel.recv()
            except EOFError:
                return False
            if not isinstance(message, int):
                self.found = message
                return False
            self.steps += 1
        return True

    def result(self):
        """The exit status, when it has ended; `found` is what the scenario returned, or raised."""
        self.until_step(10**9)
        self.process.join(200)
        return self.process.exitcode


class Fleet:
    """A context that starts processes, which share compiled programs, and leaves none behind."""

    def __init__(self, cache):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.training.fire"])
        self._cache, self._started = cache, []

    def start(self, scenario, place, *arguments):
        return self.hosts(1, scenario, place, *arguments)[0]

    def hosts(self, number, scenario, place, *arguments, devices=1):
        """A process for each host, with so many devices each."""
        port = free_port() if number > 1 else 0
        hosts = [fire.Host(self._cache, number, i, port, devices) for i in range(number)]
        started = [Process(self._context, place, host, scenario, *arguments) for host in hosts]
        self._started += started
        return started

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for one in self._started:
            one.process.kill()
            one.process.join()
