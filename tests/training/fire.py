"""Runs that are disturbed, each in a process forked from one that has imported all it needs.

No backend may be made here before the fork, and no array: importing and accounting is all.
"""

import contextlib
import ctypes
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
import warnings

import jax
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401

import eqx_dp as dp
from tests.training import runs

STEPS = 20
PLAN = runs.plan_of(STEPS)
LONG = runs.plan_of(10_000)
# Worked out once for all processes; it takes a tenth of a second for each number of steps.
EPSILONS = [PLAN.epsilon(t) for t in range(STEPS + 1)]


def start(scenario, directory, cache, channel, *arguments):
    """What a process does: a scenario, with compiled programs shared between the processes."""
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", dp.CheckpointWarning)
        try:
            channel.send((scenario(pathlib.Path(directory), channel, *arguments), told(caught)))
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            channel.close()
    sys.exit(0)


def told(caught):
    return [str(w.message) for w in caught if issubclass(w.category, dp.CheckpointWarning)]


def train(directory, channel, save_every=1, callback=lambda event: None, data=None, **options):
    """Says which steps have been taken, and at the end what came of it."""

    def says(event):
        channel.send(event.step)
        callback(event)

    step = runs.make(PLAN)
    data = (runs.XS, runs.YS) if data is None else data
    options = {"save_every": save_every, "callbacks": [says]} | options
    state = runs.trainer(directory, step, data, **options).run(runs.small_model())
    return runs.leaves(state)


FILES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.scandir")


def killed_at_a_file(directory, channel, save_every, count):
    """Killed, after its first step, at the count-th thing that it does with a file."""
    state = {"left": -1}

    def count_down(event, arguments):
        if event in FILES and state["left"] > 0:
            state["left"] -= 1
            if state["left"] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_down)

    def begin(event):
        if state["left"] < 0:
            state["left"] = count

    return train(directory, channel, save_every, begin)


@contextlib.contextmanager
def full_disk():
    """No file can grow beyond a few bytes: what a program sees of a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def with_a_full_disk(directory, channel, first, last):
    """The disk is full from the save after step `first` up to that after step `last`."""
    stack, seen = contextlib.ExitStack(), []

    def turn(event):
        if event.step == first:
            while runs.assert_agrees(directory, PLAN) < first - 1:
                time.sleep(0.01)
            stack.enter_context(full_disk())
        if event.step == last + 1:
            seen.append(runs.assert_agrees(directory, PLAN))
            stack.close()

    try:
        found = train(directory, channel, callback=turn)
    finally:
        stack.close()
    return found, seen


class Failing:
    """A source that raises when it is asked for a batch of a certain number."""

    def __init__(self, at):
        self.left = at

    def __len__(self):
        return runs.NUM_EXAMPLES

    def __getitem__(self, indices):
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk has gone")
        return runs.XS[indices], runs.YS[indices]


def with_a_failing_source(directory, channel, at):
    try:
        train(directory, channel, save_every=2, data=Failing(at))
    except dp.DataError as error:
        return str(error)


def _hear_interrupts():
    """As in a terminal: what a shell starts in the background ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(directory, channel):
    """Ended by Ctrl-C; returns what the error says."""
    _hear_interrupts()
    try:
        train(directory, channel, save_every=1000, callback=lambda event: time.sleep(0.05))
    except KeyboardInterrupt as error:
        return str(error)


def interrupted_twice(directory, channel):
    """The second Ctrl-C comes while the step that the first one waits for is not over."""
    _hear_interrupts()
    train(directory, channel, save_every=2, callback=lambda event: time.sleep(event.step // 5 * 60))


def for_ten_thousand_steps(directory, channel):
    """Resident memory, in MiB, as it goes: with checkpoints, metrics and evaluation."""
    seen, libc = {}, ctypes.CDLL(None)
    # scipy keeps the plans of its last 16 Fourier transforms, which accounting makes large; what
    # the run will ask for is worked out before, so that those of its figures are not counted.
    for done in range(500, LONG.steps + 1, 500):
        LONG.epsilon(done)

    def note(event):
        if event.step % 1000 == 0:
            libc.malloc_trim(0)  # what is free does not count
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            seen[event.step] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def evaluate(model):
        return {"norm": float(np.linalg.norm(model.weight))}

    step = runs.make(LONG, optax.adam(1e-3), disclose=("num_examples",))
    options = {"save_every": 500, "evaluate": evaluate, "evaluate_every": 500}
    runs.trainer(directory, step, callbacks=[note], **options).run(runs.small_model())
    return seen
