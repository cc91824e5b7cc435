"""Runs that are disturbed, each in a process forked from one that has imported all it needs.

No backend may be made here before the fork, and no array: importing and accounting is all.
"""

import os
import pathlib
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import orbax.checkpoint  # noqa: F401
import pytest

import eqx_dp as dp
from eqx_dp.training import CheckpointWarning
from tests.sharding.losses import mesh_of
from tests.training import runs, store

STEPS = 20
PLAN = runs.plan_of(STEPS)
FILES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir")


class Place(NamedTuple):
    """A folder with a run's directory and the recording of what it did.

    Attributes:
        root: the folder.
        is_store: whether the directory is in an object store, whose files are in the folder.
    """

    root: pathlib.Path
    is_store: bool = False

    @property
    def directory(self):
        return "gs://bucket/run" if self.is_store else str(self.root / "run")

    @property
    def files(self):
        """Where the files of the directory lie."""
        return self.root / ("store/gs:/bucket/run" if self.is_store else "run")

    @property
    def recording(self):
        return runs.Recording(self.root / "recording")

    def open(self):
        if self.is_store:
            store.opened(store.Bucket(self.root / "store"), pytest.MonkeyPatch())


class Host(NamedTuple):
    """What a process is: one of `number` hosts, `index`, each with so many devices."""

    cache: pathlib.Path
    number: int
    index: int
    port: int
    devices: int

    def open(self):
        names = {
            "jax_num_cpu_devices": self.devices,
            "jax_disable_most_optimizations": True,  # compiled fast, as programs of tests are
            "jax_compilation_cache_dir": str(self.cache),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": 0,
        }
        for name, value in names.items():
            jax.config.update(name, value)
        if self.number > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            where = f"127.0.0.1:{self.port}"
            options = {"heartbeat_timeout_seconds": 10}
            jax.distributed.initialize(where, self.number, self.index, **options)


def start(place, host, channel, scenario, *arguments):
    """What a process does: a scenario, with compiled programs shared between the processes."""
    host.open()
    place.open()
    place.root.mkdir(exist_ok=True)
    with (place.root / "stderr.txt").open("a") as stream:
        os.dup2(stream.fileno(), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        try:
            found = scenario(place, channel, *arguments)
        except BaseException as error:
            if not isinstance(error, (SystemExit, dp.CheckpointError)):
                traceback.print_exc()
            channel.send(error if isinstance(error, dp.CheckpointError) else repr(error))
            raise
        else:
            channel.send((found, [str(w.message) for w in caught]))
            if host.number > 1:
                jax.distributed.shutdown()  # which waits for the other hosts
        finally:
            channel.close()
    sys.exit(0)


def train(place, channel, save_every=1, callback=lambda event: None, **options):
    """Says after each step how many are released; records noise and samples."""
    recording = place.recording

    def says(event):
        recording.note(event)
        channel.send(event.step)
        callback(event)

    sharding = None
    if jax.process_count() > 1:
        sharding = dp.ShardingRules(mesh_of("auto", data=jax.device_count()))
    step = recording.step(PLAN, sharding=sharding)
    options = {"save_every": save_every, "callbacks": [says], "keep": 2} | options
    state = runs.trainer(place.directory, step, recording, **options).run(runs.small_model())
    return int(state.step)


def killed_at_a_file(place, channel, save_every, count):
    """Killed at the count-th thing that it does with a file of the run's directory."""
    left = [count]

    def count_down(event, arguments):
        if event in FILES and str(arguments[0]).startswith(str(place.files)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_down)
    return train(place, channel, save_every)


def slowly(place, channel, save_every=1000):
    """Steps of a while, to be told to stop; a background process may ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return train(place, channel, save_every, lambda event: time.sleep(0.05))


def interrupted_twice(place, channel):
    """The second Ctrl-C comes while the step that the first one waits for is not over."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return train(place, channel, 2, lambda event: time.sleep(event.step // 5 * 60))


def with_saves_swept_away(place, channel):
    """A second start removes each folder that is being written, before the next is made in it."""

    def sweep(event, arguments):
        path = pathlib.Path(str(arguments[0])) if event == "os.mkdir" else place.root
        if path.parent.name.endswith("tmp"):
            shutil.rmtree(path.parent, ignore_errors=True)

    sys.addaudithook(sweep)
    return train(place, channel)


def with_a_full_disk(place, channel, size):
    """From the fifth step on a file has room for so many bytes."""
    wide = eqx.nn.Linear(4, 4096, key=jax.random.key(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event):
        channel.send(event.step)
        if event.step == 5:
            while 4 not in runs.saved(place.files):
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    trainer = runs.trainer(place.directory, runs.make(PLAN), callbacks=[fill], save_every=2)
    try:
        return int(trainer.run(wide).step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
