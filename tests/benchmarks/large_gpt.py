"""What a device holds, computes and sends in a step of a large GPT, by mesh, against non-private.

    python -m tests.benchmarks.large_gpt --size 1B --mesh 8 4x2 64 16x4 256 64x4 --markdown table.md

Nothing is allocated or run: the step of `examples/plan_gpt.py` is compiled from shapes for virtual
devices, each in a process of its own whose memory is measured and limited.

The two that are not ours know no sharding rules: they run in a `shard_map` on a device's own
examples. The step without privacy gathers each layer where it is used and scatters its gradient
there, as the engine does. jax_privacy forms each example's gradient, so it gathers all parameters
once. Sums over devices and microbatches are float32.
"""

import argparse
import functools
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from rich.console import Console

import eqx_dp as dp
from eqx_dp.planning.memory import read_compiled
from eqx_dp.planning.step import on_mesh, planned_step
from tests.benchmarks.counted import Sent, counted
from tests.test_examples import load

from . import report

NON_PRIVATE, JAX_PRIVACY = "non-private", "jax_privacy"
METHODS = ("ghost", "book_keeping", "per_example")
CONTENDERS = (NON_PRIVATE, *METHODS, JAX_PRIVACY)
GIB, GB, HOST = 2**30, 10**9, 24 * 2**30
AXIS = "data"

# No program is run: nothing is gained by machine code that is fast. Memory is the same.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Row(NamedTuple):
    """One compiled step; figures are those of a device.

    Attributes:
        mesh: the devices.
        contender: whose step.
        microbatch: examples at once.
        parts: bytes, by the formula of `dp.plan_memory`; None for those who are not ours.
        compiled: bytes, by the compiler.
        flops: of the compiled program's contractions.
        ideal: of those of the step without privacy, divided by the number of devices.
        sent: by collective, how often and how many bytes.
        seconds: tracing and compiling.
        host: the most bytes that the process ever held.
        failed: why there is no program.
    """

    mesh: str
    contender: str
    microbatch: int
    parts: int | None = None
    compiled: int = 0
    flops: float = 0
    ideal: float = 0
    sent: dict[str, Sent] = {}  # noqa: RUF012
    seconds: float = 0
    host: int = 0
    failed: str = ""


@functools.cache
def example() -> Any:
    return load("plan_gpt")


# The steps.


def ours(task: Any, method: Any, microbatch: int) -> tuple[Any, Any, int]:
    """Traced and lowered, and the sum of parts."""
    plan_gpt = example()
    grad_fn = plan_gpt.clipped_grad(task)._variant(method=method, microbatch_size=microbatch)
    optimizer = plan_gpt.optimizer_of(task)
    parts = dp.plan_memory(grad_fn, task.model, *task.batch, optimizer=optimizer, compiled=False)
    step = planned_step(grad_fn, task.model, task.batch, optimizer, None)
    with on_mesh(task.rules):
        traced = jax.jit(step.run, donate_argnums=(0, 1)).trace(*step.arguments)
    return traced, task.rules, parts.parts.total


class Gathered(eqx.Module):
    """A part of the model that gathers its own arrays whenever it is called."""

    module: Any
    specs: Any = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        specs = jax.tree.unflatten(jax.tree.structure(self.module), self.specs)
        return jax.tree.map(_gathered, self.module, specs)(x)


def _with_gathers(model: Any, specs: Any) -> Any:
    def of(name: str) -> Gathered:
        part, its = getattr(model, name), getattr(specs, name)
        return Gathered(part, tuple(jax.tree.leaves(its, is_leaf=lambda x: isinstance(x, P))))

    names = ("embedding", "blocks", "head")
    return eqx.tree_at(lambda m: [getattr(m, n) for n in names], model, [of(n) for n in names])


def _gathered(x: Array, spec: P) -> Array:
    """All of an array, or of a slice of a stacked one, from a device's part."""
    spec = spec[len(spec) - x.ndim :] if len(spec) > x.ndim else spec
    for dim, entry in enumerate(spec):
        if entry == AXIS:
            x = _by_part(functools.partial(_along, dim=dim), x, spec)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _along(x: Array, dim: int) -> Array:
    return jax.lax.all_gather(x, AXIS, axis=dim, tiled=True)


def _along_back(dim: int, _: None, x: Array) -> tuple[Array]:
    """Summed in float32, as clipped gradients are. (XLA's CPU compiler fails on bfloat16.)"""
    wide = x.astype(jnp.float32)
    part = jax.lax.psum_scatter(wide, AXIS, scatter_dimension=dim, tiled=True)
    return (part.astype(x.dtype),)


_along.defvjp(lambda x, dim: (_along(x, dim), None), _along_back)


def _scattered(x: Array, spec: P) -> Array:
    """A device's part of the sum over devices; all of it where it is not spread."""
    for dim, entry in enumerate(spec):
        if AXIS in jax.tree.leaves((entry,)):
            scatter = functools.partial(
                jax.lax.psum_scatter, axis_name=AXIS, scatter_dimension=dim, tiled=True
            )
            return _by_part(scatter, x, spec)
    return jax.lax.psum(x, AXIS)


def _by_part(collective: Callable[[Array], Array], x: Array, spec: Sequence[Any]) -> Array:
    """On each device's part over `model`: the compiler would gather that first."""
    if "model" not in spec:
        return collective(x)
    over = P(*(entry if entry == "model" else None for entry in spec))
    return jax.shard_map(
        collective, in_specs=over, out_specs=over, axis_names={"model"}, check_vma=False
    )(x)


def non_private(loss: Callable[..., Array], static: Any, specs: Any, microbatch: int) -> Any:
    """The gradient of the summed loss, a microbatch at a time, from a device's parts."""

    def summed(params: Any, tokens: Array, targets: Array) -> Array:
        model = _with_gathers(eqx.combine(params, static), specs.params)
        return jnp.sum(jax.vmap(lambda x, y: loss(model, x, y))(tokens, targets))

    def gradient(params: Any, *batch: Array) -> Any:
        parts = [x.reshape(-1, microbatch, *x.shape[1:]) for x in batch]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

        def add(total: Any, part: list[Array]) -> tuple[Any, None]:
            grads = jax.grad(summed)(params, *part)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), None

        def rest(x: Array, spec: P, sum_spec: P) -> Array:
            return x if AXIS in spec else _scattered(x, sum_spec)

        return jax.tree.map(rest, jax.lax.scan(add, zeros, parts)[0], specs.params, specs.sums)

    return gradient


def of_jax_privacy(loss: Callable[..., Array], static: Any, specs: Any, microbatch: int) -> Any:
    import jax_privacy

    gradient = jax_privacy.clipped_grad(
        lambda params, *example: loss(eqx.combine(params, static), *example),
        l2_clip_norm=1.0,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=microbatch,
        dtype=jnp.float32,
    )

    def of_device(params: Any, *batch: Array) -> Any:
        whole = jax.tree.map(_gathered, params, specs.params)
        return jax.tree.map(_scattered, gradient(whole, *batch), specs.sums)

    return of_device


class Specs(NamedTuple):
    """Where parameters and sums of their gradients live."""

    params: Any
    sums: Any


def peer(task: Any, name: str, microbatch: int) -> tuple[Any, Any, None]:
    """The step of another, traced for the same devices."""
    plan_gpt, rules = example(), task.rules
    shapes, static = eqx.partition(task.model, plan_gpt.is_shape)
    specs = Specs(rules.specs(shapes), rules.accumulator_specs(shapes))
    optimizer = plan_gpt.optimizer_of(task) if name == JAX_PRIVACY else optax.adam(1e-3)
    make = non_private if name == NON_PRIVATE else of_jax_privacy
    gradient = make(plan_gpt.loss, static, specs, microbatch)

    def over_data(spec: P) -> P:
        return P(*(entry if AXIS in jax.tree.leaves((entry,)) else None for entry in spec))

    on_data = jax.tree.map(over_data, specs)

    def step(params: Any, state: Any, batch: tuple[Array, Array]) -> Any:
        over_devices = jax.shard_map(
            gradient,
            mesh=rules.mesh,
            in_specs=(on_data.params, P(AXIS), P(AXIS)),
            out_specs=on_data.sums,
            axis_names={AXIS},
            check_vma=False,
        )
        grads = rules.shard_accumulators(over_devices(task.policy.cast_to_compute(params), *batch))
        updates, state = optimizer.update(grads, state, params)
        return rules.shard(optax.apply_updates(params, updates)), state

    def at(x: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(rules.mesh, spec))

    state = optax.tree.map_params(
        optimizer,
        at,
        jax.eval_shape(optimizer.init, shapes),
        specs.sums,
        transform_non_params=lambda x: at(x, P()),
    )
    batch = tuple(at(x, P(AXIS)) for x in task.batch)
    arguments = jax.tree.map(at, shapes, specs.params), state, batch
    with on_mesh(rules):
        return jax.jit(step, donate_argnums=(0, 1)).trace(*arguments), rules, None


def measured(size: Any, batch: int, mesh: str, contender: str, microbatch: int) -> Row:
    """Compiles one step, in this process."""
    plan_gpt, start = example(), time.perf_counter()
    on = plan_gpt.mesh_of(mesh)
    task = plan_gpt.make_task(size, batch, on)
    make = ours if contender in METHODS else peer
    traced, rules, parts = make(task, contender, microbatch)
    with on_mesh(rules):
        program = traced.lower().compile(compiler_options=FAST)
    held = read_compiled(program)
    assert held is not None
    taken = 0.5 if contender == "ghost" else 1
    found = counted(program.as_text(), batch // microbatch, taken, ("all-gather",))
    return Row(
        mesh,
        contender,
        microbatch,
        parts,
        held.total,
        found.flops,
        ideal_flops(task) / on.size,
        found.sent,
        time.perf_counter() - start,
        plan_gpt.peak_host_bytes(),
    )


def ideal_flops(task: Any) -> float:
    """Of the step without privacy, on all devices, with what is rematerialised; by formula."""
    found = dp.explain(example().clipped_grad(task), task.model, *task.batch)
    return found.flops.gradient


# One process a row, and the table.


def of_process(options: argparse.Namespace, mesh: str, contender: str, microbatch: int) -> Row:
    """The same in a process of its own, which may hold 24 GiB."""
    row = json.dumps([mesh, contender, microbatch])
    sizes = [f"--{name}={value}" for name, value in options.sizes.items()]
    command = [sys.executable, "-m", __spec__.name, "--size", options.size, *sizes]
    command += ["--batch", str(options.batch), "--row", row]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        return Row(mesh, contender, microbatch, failed=last[:200])
    return decoded(done.stdout.splitlines()[-1])


def decoded(line: str) -> Row:
    row = Row(**json.loads(line))
    return row._replace(sent={name: Sent(*its) for name, its in row.sent.items()})


_COLUMNS = (
    "mesh",
    "contender",
    "microbatch",
    "compiled, GiB",
    "by formula",
    "TFLOP",
    "/ ideal",
    "gathers",
    "GB",
    "scatters",
    "GB",
    "all-reduces",
    "GB",
    "compile, s",
    "host, GiB",
)


def cells(row: Row) -> tuple[str, ...]:
    if row.failed:
        rest = [""] * (len(_COLUMNS) - 4)
        return (row.mesh, row.contender, str(row.microbatch), f"none: {row.failed}", *rest)
    parts = "" if row.parts is None else f"{row.parts / GIB:.3f}"
    sent: list[str] = []
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        times, size = row.sent.get(kind, Sent(0, 0))
        sent += [f"{times:,.0f}", f"{size / GB:,.1f}"]
    return (
        row.mesh,
        row.contender,
        str(row.microbatch),
        f"{row.compiled / GIB:.3f}",
        parts,
        f"{row.flops / 1e12:,.1f}",
        f"{row.flops / row.ideal:.2f}",
        *sent,
        f"{row.seconds:.0f}",
        f"{row.host / GIB:.2f}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    plan_gpt = example()
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.large_gpt", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--size", choices=plan_gpt.SIZES, default="1B")
    for name in plan_gpt.Sizes._fields:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--mesh", nargs="+", default=["8", "4x2", "64", "16x4", "256", "64x4"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--batch", type=int, default=8, help="examples on a device")
    parser.add_argument("--microbatch", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=Path, help="keep rows in this file, and go on from it")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    given = {name: getattr(options, name) for name in plan_gpt.Sizes._fields}
    options.sizes = {name: value for name, value in given.items() if value is not None}
    size = plan_gpt.SIZES[options.size]._replace(**options.sizes)
    if options.row is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (HOST, HOST))
        jax.config.update("jax_num_cpu_devices", plan_gpt.mesh_of(options.row[0]).size)
        print(json.dumps(measured(size, options.batch, *options.row)._asdict()))
        return

    kept = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else []
    rows = {(row.mesh, row.contender, row.microbatch): row for row in map(decoded, kept)}
    console, lines = Console(width=200), list[tuple[str, ...]]()
    for mesh in options.mesh:
        for contender in options.contenders:
            for microbatch in options.microbatch:
                which = mesh, contender, microbatch
                if which not in rows:
                    rows[which] = of_process(options, *which)
                    if options.rows:
                        with options.rows.open("a") as file:
                            file.write(json.dumps(rows[which]._asdict()) + "\n")
                lines.append(cells(rows[which]))
                console.print("  ".join(lines[-1]))
    params = plan_gpt.make_task(size, 1, plan_gpt.Mesh(1)).num_params
    layout = f"{size.layers} layers, width {size.width}, T = {size.length}, V = {size.vocabulary}"
    table = report.Cells(f"{params / 1e6:,.1f}M parameters: {layout}", _COLUMNS, lines)
    console.print(report.for_terminal(table))
    if options.markdown is not None:
        arguments = [x for x in (argv or sys.argv[1:]) if "rows" not in str(x)]
        command = ["python", "-m", "tests.benchmarks.large_gpt", *arguments]
        explanation = " ".join((__doc__ or "").split("\n\n", 2)[2].split())
        title = f"What a device needs for a step of a GPT of {options.size} parameters"
        report.write_markdown(options.markdown, shlex.join(command), [table], title, explanation)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
