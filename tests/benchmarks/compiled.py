"""The programs that GPUs and TPUs get, from their own compilers; nothing runs.

**Modelled from the compiled program, not measured.** Clipped gradients under `mixed_bfloat16`, one
device or a mesh with examples spread over it, compiled by XLA for an H100 (without autotuning,
which needs one) or a TPU. Read from the optimized program: temporary memory of a device, the share
of FLOPs of contractions and convolutions whose operands have 16 or 8 bits, conditionals and loops
of unknown length (the host of a GPU waits at each), callbacks, and the seconds that the data sheet
allows (`examples/roofline.py`): products overlap memory, starts of kernels and waits come on top,
without CUDA graphs. `compile` is this machine's time of all cores. Noise is compiled by itself:
temporary memory for an entry of one leaf. A peer's microbatch of 1 example gives only one device of
a mesh an example: on 8 devices compare the row of 8.

`--large 300M 1B` compiles the GPT of `examples/plan_gpt.py`: layers stacked, under scan and remat,
all matrices spread over all devices, eight examples a device at once. Who knows no sharding rules
runs in a `shard_map`, as in the part `large_gpt`. Steps are those of ghost with Adam, on one
example a device, with noise and without.

`--matrix 0 288` compiles small models under every preset but float64, by three methods, fully
sharded on Auto or Explicit axes, and reads what must be 0: callbacks, conditionals and loops of
unknown length, arrays of float64. The first 48 of the 288 programs have every preset with every
model on both devices, every method with every preset, model and device, and both kinds of axes with
each of these and every method.

With `--log FOLDER` programs are kept in a folder, and what it has is not compiled again. Needs the
extra `compilers`, and `JAX_PLATFORMS=cpu`.
"""

import argparse
import functools
import gzip
import importlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.planning.step import planned_step

from . import large_gpt
from .command import Part
from .contenders import CLIP_NORM, JAX_PRIVACY, NON_PRIVATE, non_private, of_jax_privacy
from .page import MIB, Table
from .rows import ROWS, Row, cnn, gpt, gpt_stacked, mlp, tiny

ON = ("h100:1", "h100:8", "tpu:v5e:4x4")
OURS = ("ghost", "book_keeping", "per_example")
CONTENDERS = (NON_PRIVATE, *OURS, f"{JAX_PRIVACY} 1", f"{JAX_PRIVACY} 8")
STEPS = ("step without noise", "step")
LEAVES = ((1_000_000,), (10_000, 10_000), (65_536, 20_000), (70_000, 70_000))
MATRIX_ON = ("h100:2", "tpu:v5e:2x2")
POLICIES = tuple(name for name in dp.available_policies() if name != "float64")
SMALL = {
    "MLP": functools.partial(mlp, batch=16, inputs=64, width=64, depth=1),
    "CNN": functools.partial(cnn, batch=16, side=8, channels=8, width=32),
    "GPT": functools.partial(gpt, batch=8, length=32, width=64, depth=1, vocabulary=128),
    "GPT stacked, tied": functools.partial(
        gpt_stacked, batch=8, length=32, width=64, depth=2, vocabulary=128
    ),
}
_POLICY = "mixed_bfloat16"


@functools.cache
def example(name: str) -> Any:
    """A module of `examples/`: `roofline`, or `chips`."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module(name)


class Compiled(NamedTuple):
    """A program, the bytes that it needs beside its arguments, and how long its compiler took.

    `turns` are those of each loop whose length follows from the data; seconds are of the CPU.
    """

    text: str
    temporary: int
    seconds: float
    turns: int = 1

    @property
    def costs(self) -> Any:
        return example("roofline").costs_of(self.text, self.turns)


def recorded(log: Path | None, key: str, make: Callable[[], Compiled]) -> Compiled | str:
    """A program, or what its failure said: from the folder if that has it."""
    path = log and log / f"{key.replace(' ', '_')}.json.gz"
    if path and path.exists():
        found = json.loads(gzip.decompress(path.read_bytes()))
        return found if isinstance(found, str) else Compiled(*found)
    try:
        found = make()
    except Exception as error:  # is in the table
        found = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(found).encode()))
    return found


def mesh_of(name: str, axis_type: AxisType = AxisType.Auto) -> Mesh:
    """All devices along `data`."""
    return Mesh(np.array(example("chips").devices_of(name)), ("data",), axis_types=(axis_type,))


def on_mesh(mesh: Mesh, tree: Any, spec: P | None = None) -> Any:
    """Shapes of arrays, placed on a mesh."""
    where = NamedSharding(mesh, spec or P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def spread_over(mesh: Mesh, params: Any) -> list[tuple[str, P]]:
    """Each array along its last dimension that the devices divide."""
    found: list[tuple[str, P]] = []
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        divided = [i for i, length in enumerate(x.shape) if length % mesh.size == 0]
        if divided:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            found.append((name, P(*[None] * divided[-1], "data")))
    return found


def compiled(function: Callable[..., Any], *args: Any) -> Compiled:
    jax.clear_caches()
    return of_lowered(jax.jit(function).trace(*args).lower())


def of_lowered(lowered: Any) -> Compiled:
    start = time.process_time()
    program = lowered.compile()
    taken = time.process_time() - start
    return Compiled(program.as_text(), program.memory_analysis().temp_size_in_bytes, taken)


def gradient(
    name: str,
    row: Row,
    mesh: Mesh,
    policy: str = _POLICY,
    microbatch_size: int | None = None,
    is_spread: bool = False,
) -> Compiled:
    """The clipped gradient of one contender, for a mesh, which parameters may be spread over."""
    params, frozen, static = row.split()
    spread = spread_over(mesh, params) if is_spread else ()
    rules = dp.ShardingRules(mesh, examples=("data",), params=spread)
    batch = on_mesh(mesh, row.batch, rules.example_spec)
    placed = jax.tree.map(functools.partial(on_mesh, mesh), params, rules.specs(params))
    arguments = (placed, on_mesh(mesh, frozen), *batch)
    if name in OURS:
        clipped = dp.filter_clipped_grad(
            row.loss,
            l2_clip_norm=CLIP_NORM,
            policy=dp.load_policy(policy),
            method=name,
            sharding=rules,
            filter_spec=row.filter_spec,
            microbatch_size=microbatch_size,
        )
        with jax.set_mesh(mesh):
            return compiled(lambda p, f, *its: clipped(eqx.combine(p, f, static), *its), *arguments)
    narrow = row._replace(loss=lambda *its: row.loss(*map(_narrow, its)).astype(jnp.float32))
    if name == NON_PRIVATE:
        return compiled(non_private(narrow, None), *arguments)
    size = int(name.removeprefix(JAX_PRIVACY))
    found = compiled(of_jax_privacy(narrow, size), *arguments)
    return found._replace(turns=row.batch_size // size)


def _narrow(tree: Any) -> Any:
    def cast(x: Any) -> Any:
        return x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x

    return jax.tree.map(cast, tree)


def large(size: str, on: str, name: str) -> Compiled:
    """The gradient of a large GPT by one contender, fully sharded, or the step around it."""
    jax.clear_caches()
    plan_gpt, devices = example("plan_gpt"), example("chips").devices_of(on)
    sizes = large_gpt.TINY if size == "tiny" else plan_gpt.SIZES[size]._asdict()
    sizes, batch = plan_gpt.Sizes(**sizes), 1 if name in STEPS else 8
    task = plan_gpt.make_task(sizes, batch, plan_gpt.Mesh(len(devices)), devices)
    if name in STEPS:
        optimizer = plan_gpt.optimizer_of(task) if name == "step" else optax.adam(1e-3)
        clipped = plan_gpt.clipped_grad(task)._variant(method="ghost", microbatch_size=1)
        step = planned_step(clipped, task.model, task.batch, optimizer, None)
        with jax.set_mesh(task.rules.mesh):
            return of_lowered(jax.jit(step.run, donate_argnums=(0, 1)).lower(*step.arguments))
    peer = NON_PRIVATE if name in OURS else name.partition(" ")[0]
    microbatch = 1 if name.endswith("1") else 8
    gradient, params, batch = large_gpt.peer_gradient(task, peer, microbatch)
    if name in OURS:
        static = eqx.partition(task.model, plan_gpt.is_shape)[1]
        clipped = plan_gpt.clipped_grad(task)._variant(method=name, microbatch_size=8)

        def gradient(params: Any, *batch: Any) -> Any:
            return clipped(eqx.combine(params, static), *batch)

    with jax.set_mesh(task.rules.mesh):
        lowered = jax.jit(gradient).lower(params, *batch)
    return of_lowered(lowered)._replace(turns=8 // microbatch)


def noise(shape: tuple[int, ...], mesh: Mesh) -> Compiled:
    """Noise on one leaf that every device holds."""
    stream = dp.noise_stream(2**127)
    sums = jax.ShapeDtypeStruct(shape, jnp.float32)
    both = on_mesh(mesh, (sums, stream))
    return compiled(lambda x, stream: dp.add_noise(x, stream, 1.0), *both)


def matrix(first: int, end: int, log: Path | None) -> Iterator[dict[str, str]]:
    """Programs of the matrix, by their numbers."""
    columns = ("waits", "float64", "in 16 or 8 bits", "compile, s")
    cells = itertools.product(range(6), enumerate(POLICIES), enumerate(SMALL), enumerate(MATRIX_ON))
    for turn, (p, policy), (m, model), (d, on) in itertools.islice(cells, first, end):
        method = OURS[(p + m + d + turn) % 3]
        axes = (AxisType.Auto, AxisType.Explicit)[(p + m + turn) % 2]
        its = {"model": model, "policy": policy, "on": on, "method": method, "axes": axes.name}

        def make(on=on, axes=axes, model=model, method=method, policy=policy) -> Compiled:
            return gradient(method, SMALL[model](), mesh_of(on, axes), policy, is_spread=True)

        found = recorded(log, " ".join(("matrix", *its.values())), make)
        if isinstance(found, str):
            yield its | {"callbacks": found} | dict.fromkeys(columns, "-")
            continue
        costs = found.costs
        cells_of_row = (
            f"{costs.waits:.0f}",
            str(found.text.count(" f64[")),
            f"{100 * costs.narrow_share:.1f} %",
            f"{found.seconds:.0f}",
        )
        yield (
            its
            | {"callbacks": f"{costs.callbacks:.0f}"}
            | dict(zip(columns, cells_of_row, strict=True))
        )


def line(name: str, found: Compiled, ordinary: Compiled, on: str) -> dict[str, str]:
    chip, costs = example("chips").chip_of(example("chips").devices_of(on)[0]), found.costs
    seconds = [sum(its.seconds(chip).values()) for its in (costs, ordinary.costs)]
    return {
        "on": on,
        "gradient": name,
        "temporary, MiB": f"{found.temporary / MIB:.1f}",
        "/ non-private": _ratio(found.temporary, ordinary.temporary),
        "GFLOP of products": f"{costs.flops.total() / 1e9:.2f}",
        "in 16 or 8 bits": f"{100 * costs.narrow_share:.1f} %",
        "kernels": f"{costs.kernels:.0f}",
        "waits": f"{costs.waits:.0f}",
        "callbacks": f"{costs.callbacks:.0f}",
        "modelled, us": f"{1e6 * seconds[0]:.0f}",
        "x non-private": f"{seconds[0] / seconds[1]:.2f}",
        "compile, s": f"{found.seconds:.0f}",
    }


def _ratio(size: int, other: int) -> str:
    return f"{size / other:.2f}" if other > MIB else "-"


def large_lines(size: str, on: str, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Gradients and steps of a large GPT, by who is asked for."""
    contenders = options.contenders or (*CONTENDERS, *STEPS)
    ordinary = None
    for name in contenders:
        found = recorded(
            options.log, f"{size} {on} {name}", functools.partial(large, size, on, name)
        )
        if isinstance(found, str):
            print(size, on, name, found, flush=True)
            continue
        ordinary = found if name in (NON_PRIVATE, STEPS[0]) or ordinary is None else ordinary
        yield line(name, found, ordinary, on)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows, and for which devices."""
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=["mlp", "gpt"], help="models")
    parser.add_argument("--on", nargs="+", default=ON, help="h100:8, tpu:v5e:4x4 and the like")
    parser.add_argument("--log", type=Path, help="a folder to keep programs in")
    parser.add_argument("--large", nargs="+", help="large GPTs alone: 300M, 1B")
    parser.add_argument(
        "--contenders", nargs="+", choices=(*CONTENDERS, *STEPS), help="some of them"
    )
    parser.add_argument(
        "--matrix", type=int, nargs=2, help="of the matrix alone: the first program, and the end"
    )


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """The matrix; or large GPTs; or a table a model, then noise."""
    if options.matrix:
        yield Table("The matrix", list(_printed(matrix(*options.matrix, options.log))))
        return
    if options.large:
        for size in options.large:
            lines = (large_lines(size, on, options) for on in options.on)
            rows = list(_printed(itertools.chain.from_iterable(lines)))
            if rows:
                yield Table(f"GPT of {size} parameters, fully sharded", rows)
        return
    for row in options.rows:
        made = ROWS[row](**(tiny(ROWS[row]) | {"batch": 16} if options.tiny else {}))
        yield Table(made.title, list(_printed(lines_of(made, row, options))))
    lines = []
    for on in [on for on in options.on if on.startswith("h100") or not options.short][:1]:
        for shape in LEAVES:
            found, entries = noise(shape, mesh_of(on)), math.prod(shape)
            lines.append(
                {
                    "on": on,
                    "leaf": " x ".join(map(str, shape)),
                    "temporary, bytes an entry": f"{found.temporary / entries:.3f}",
                    "compile, s": f"{found.seconds:.0f}",
                }
            )
    yield Table("Noise on one leaf", lines)


def lines_of(made: Row, row: str, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Gradients of one model."""
    for on in options.on:
        mesh, ordinary = mesh_of(on), None
        for name in options.contenders or CONTENDERS[: 3 if options.short else None]:
            if name.endswith("8") and made.batch_size % 8:
                continue
            make = functools.partial(gradient, name, made, mesh)
            found = recorded(options.log, f"{row} {on} {name} {made.batch_size}", make)
            if isinstance(found, str):
                print(row, on, name, found, flush=True)
                continue
            ordinary = ordinary or found
            yield line(name, found, ordinary, on)


def _printed(rows: Iterator[dict[str, str]]) -> Iterator[dict[str, str]]:
    for row in rows:
        print("  ".join(row.values()), flush=True)
        yield row


PART = Part(__doc__, tables, add_options, rounds=(1, 1))
