"""What a run holds at its start: memory of a first state, of a run that begins or resumes.

    python -m tests.benchmarks.starting --markdown tests/benchmarks/results/starting.md

Eight virtual CPU devices in one process, over which all parameters, gradients and optimizer state
are spread. What all of them hold is the memory of the process, so that its peak, beyond what it had
before, is compared with the size of one state. Each row is a process of its own, which has done the
same for a small model before: compilers and threads are there.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import eqx_dp as dp

from . import report

GOAL = 1.1
DEVICES, EXAMPLES = 8, 64


class Layer(eqx.Module):
    """A residual layer, of a transformer's four matrices."""

    into: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        sizes = ((width, width), (width, width), (width, 4 * width), (4 * width, width))
        self.into, self.out, self.up, self.down = (
            eqx.nn.Linear(*size, key=key)
            for size, key in zip(sizes, jax.random.split(key, 4), strict=True)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(jnp.tanh(self.into(x)))
        return x + self.down(jnp.tanh(self.up(x)))


class Stacked(eqx.Module):
    """Layers with their parameters stacked."""

    layers: Layer

    def __init__(self, depth: int, width: int, key: jax.Array):
        keys = jax.random.split(key, depth)
        self.layers = eqx.filter_vmap(lambda key: Layer(width, key))(keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, a: (eqx.combine(a, static)(x), None), x, arrays)[0]


def loss(model: Any, x: jax.Array) -> jax.Array:
    """The loss of one example."""
    return jnp.mean(model(x) ** 2)


class Run:
    """A run of a size, and what it may do.

    Args:
        depth: layers of the model.
        width: of each.
        folder: where the run is kept.
    """

    def __init__(self, depth: int, width: int, folder: Path):
        mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec(None, None, "data")
        rules = dp.ShardingRules(mesh, params=(("layers.*.weight", spec),), accumulators="examples")
        self.make: Callable[[], Stacked] = lambda: Stacked(depth, width, jax.random.key(0))
        self._folder = folder / f"{depth}x{width}"
        self._data = np.zeros((EXAMPLES, width), np.float32)
        plan = dp.PrivacyPlan(sampling_prob=0.25, steps=4, noise_multiplier=20.0, delta=1e-5)
        self.step = dp.make_step(
            *(loss, optax.adam(1e-3), plan),
            num_examples=EXAMPLES,
            seed=1,
            l2_clip_norm=1.0,
            sharding=rules,
        )

    def start(self, what: str, given: list[Any]) -> Any:
        """A first state, or a run that is begun, or resumed, and ends before its first step.

        Args:
            what: "init", "begin", "save" (which takes a step, and saves it) or "resume".
            given: a model, which is taken out; or nothing: a function is given in its place.
        """
        if what == "init":
            if given:
                return self.step.init(given.pop())
            return self.step.init(init_model=self.make)
        trainer = dp.Trainer(self.step, self._data, directory=self._folder, progress=False)
        steps = 0 if what == "begin" else 1
        if given:
            return trainer.run(given.pop(), steps)
        return trainer.run(steps=steps, init_model=self.make)


WAYS = tuple(
    f"{what}, of a {source}"
    for what in ("init", "begin", "resume")
    for source in ("model", "function")
)


_SAVE = "save, of a model"


def measured(way: str, depth: int, width: int, folder: Path) -> dict[str, int]:
    """Bytes of a state, of all arrays that live at the end, and of the peak on the way there."""
    found: dict[str, int] = {}
    for sizes in ((2, 64), (depth, width)):
        run = Run(*sizes, folder)
        before = _memory("VmRSS")
        given = [jax.block_until_ready(run.make())] if way.endswith("model") else []
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        state = run.start(way.partition(",")[0], given)
        found["peak"] = _memory("VmHWM", after=state) - before
        found["state"] = _bytes(jax.tree.leaves(eqx.filter(state, eqx.is_array)))
        found["live"] = _bytes(jax.live_arrays())
        del state
    return found


def _bytes(arrays: Any) -> int:
    buffers: dict[tuple[int, int], int] = {}
    for x in [x for x in arrays if not _is_key(x)]:
        for shard in x.addressable_shards:  # two arrays may have one buffer
            pointer = shard.data.unsafe_buffer_pointer()
            buffers[shard.device.id, pointer] = shard.data.nbytes
    return sum(buffers.values())


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _memory(name: str, after: Any = None) -> int:
    jax.block_until_ready(after)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(told: list[str] | None = None) -> None:
    """Measures, each row in a process, and writes a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=(*WAYS, _SAVE))
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--one", type=Path, help="measure here, in this folder, and print JSON")
    options = parser.parse_args(told)
    if options.one is not None:
        jax.config.update("jax_num_cpu_devices", DEVICES)
        (way,) = options.ways
        print(json.dumps(measured(way, options.depth, options.width, options.one)))
        return
    note = f"goal: a peak of at most {GOAL} x the state, of a function"
    tables = [report.Cells("What a start holds", _COLUMNS, _rows(options, {}), note)]
    name, value = next(iter(_LETS_GO.items()))
    tables.append(
        report.Cells(
            f"The same with {name}={value}",
            _COLUMNS,
            _rows(options, _LETS_GO),
            "the C library's own default keeps buffers of a few MiB that a thread has freed",
        )
    )
    for cells in tables:
        Console(width=140).print(report.for_terminal(cells))
    if options.markdown is not None:
        sizes = ["--depth", str(options.depth), "--width", str(options.width)]
        command = ["python", "-m", "tests.benchmarks.starting", *sizes]
        report.write_markdown(
            options.markdown,
            shlex.join(command),
            tables,
            "What a run holds at its start",
            "Eight virtual devices in one process. All parameters are spread over them, and so are "
            "Adam's moments: the state is three times the model. The peak is that of the process's "
            "memory, beyond what it had before, a model that is given included. `init` is "
            "`step.init`; `begin` and `resume` are `Trainer.run`, up to its first step, with the "
            "checkpoint that is read. Nobody but the call holds the model. On a CPU the "
            "host's memory is the devices' as well: buffers of what is read or written count here.",
        )


_COLUMNS = ("way", "state, MiB", "arrays at the end / state", "peak / state")


# By this the C library of Linux gives large buffers back at once when they are freed.
_LETS_GO = {"MALLOC_MMAP_THRESHOLD_": "1048576"}


def _rows(options: argparse.Namespace, environment: dict[str, str]) -> list[tuple[str, ...]]:
    """A row each way, of processes with some variables in their environment."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, way in enumerate(options.ways):
            at = Path(folder) / ("begun" if way.startswith("resume") else str(number))
            if way.startswith("resume") and not at.exists():
                _of_process(_SAVE, options, at, environment)
            found = _of_process(way, options, at, environment)
            state, live, peak = (found[name] for name in ("state", "live", "peak"))
            rows.append((way, f"{state / 2**20:.0f}", f"{live / state:.2f}", f"{peak / state:.2f}"))
    return rows


def _of_process(
    way: str, options: argparse.Namespace, folder: Path, environment: dict[str, str]
) -> dict[str, int]:
    sizes = ["--depth", str(options.depth), "--width", str(options.width)]
    command = [sys.executable, "-m", __spec__.name, "--ways", way, *sizes, "--one", str(folder)]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | environment
    ).stdout
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    main()
