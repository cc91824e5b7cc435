"""What a device holds in a step of a large GPT, by mesh, beside a step without privacy.

Nothing is allocated or run. The step of `examples/plan_gpt.py` (scan, remat, `mixed_bfloat16`,
Adam, all matrices spread over all devices) is compiled from shapes for virtual devices, each in a
process of its own, without optimizations that cost time and change no memory. A device along `data`
has eight examples. `compiled`: arguments, results that share no memory with them, temporaries. `by
formula`: the parts of `dp.plan_memory`.

The two that are not ours know no sharding rules: they run in a `shard_map` on a device's own
examples. The step without privacy gathers each layer where it is used and scatters its gradient
there, as the engine does. jax_privacy forms each example's gradient, so it gathers all parameters
once.
"""

import argparse
import functools
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import eqx_dp as dp

from .command import Part
from .page import Table

NON_PRIVATE, JAX_PRIVACY = "non-private", "jax_privacy"
CONTENDERS = (NON_PRIVATE, "ghost", "book_keeping", JAX_PRIVACY)
# Meshes and steps of each size; with --short the first mesh alone.
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "300M": (("8",), CONTENDERS),
    "1B": (("8", "64", "256", "16x4", "64x4"), CONTENDERS),
}
TINY = {"layers": 3, "width": 64, "heads": 4, "length": 64, "vocabulary": 128}
GIB, HOST = 2**30, 24 * 2**30
AXIS = "data"
ROOT = Path(__file__).parents[2]

# No program is run: nothing is gained by machine code that is fast. Memory is the same.
_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class Held(NamedTuple):
    """Bytes of a device.

    Attributes:
        compiled: by the compiler.
        parts: by the formula of `dp.plan_memory`; None for a step that is not ours.
        seconds: tracing and compiling.
    """

    compiled: int
    parts: int | None
    seconds: float


@functools.cache
def example() -> Any:
    """The module `examples/plan_gpt.py`."""
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("plan_gpt")


def measured(size: dict[str, int], batch: int, mesh: str, contender: str, microbatch: int) -> Held:
    """Compiles one step, in this process."""
    plan_gpt, start = example(), time.perf_counter()
    task = plan_gpt.make_task(plan_gpt.Sizes(**size), batch, plan_gpt.mesh_of(mesh))
    if contender in (NON_PRIVATE, JAX_PRIVACY):
        memory = peer(task, contender, microbatch).memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        compiled = held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
        return Held(compiled, None, time.perf_counter() - start)
    found = dp.plan_memory(
        plan_gpt.clipped_grad(task),
        task.model,
        *task.batch,
        optimizer=plan_gpt.optimizer_of(task),
        method=contender,
        microbatch_size=microbatch,
    )
    return Held(found.compiled.total, found.parts.total, time.perf_counter() - start)


# The steps of others. They know no sharding rules: they run in a `shard_map` on a device's own
# examples.


class Specs(NamedTuple):
    """Where parameters and sums of their gradients live."""

    params: Any
    sums: Any


def peer(task: Any, name: str, microbatch: int) -> Any:
    """The compiled step of another, for the same devices."""
    gradient, params, batch = peer_gradient(task, name, microbatch)
    rules, specs = task.rules, task.rules.accumulator_specs(params)
    optimizer = example().optimizer_of(task) if name == JAX_PRIVACY else optax.adam(1e-3)

    def step(params: Any, state: Any, batch: tuple[Array, Array]) -> Any:
        updates, state = optimizer.update(gradient(params, *batch), state, params)
        return rules.shard(optax.apply_updates(params, updates)), state

    state = optax.tree.map_params(
        optimizer,
        functools.partial(_at, rules),
        jax.eval_shape(optimizer.init, params),
        specs,
        transform_non_params=lambda x: _at(rules, x, P()),
    )
    with jax.set_mesh(rules.mesh):
        return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()


def peer_gradient(task: Any, name: str, microbatch: int) -> tuple[Callable[..., Any], Any, Any]:
    """The gradient of another, and the shapes, placed, of parameters and batch."""
    plan_gpt, rules = example(), task.rules
    shapes, static = eqx.partition(task.model, plan_gpt.is_shape)
    specs = Specs(rules.specs(shapes), rules.accumulator_specs(shapes))
    make = non_private if name == NON_PRIVATE else of_jax_privacy
    of_device = make(plan_gpt.loss, static, specs, microbatch)

    def over_data(spec: P) -> P:
        return P(*(entry if AXIS in jax.tree.leaves((entry,)) else None for entry in spec))

    on_data = jax.tree.map(over_data, specs)

    def gradient(params: Any, *batch: Array) -> Any:
        over_devices = jax.shard_map(
            of_device,
            mesh=rules.mesh,
            in_specs=(on_data.params, P(AXIS), P(AXIS)),
            out_specs=on_data.sums,
            axis_names={AXIS},
            check_vma=False,
        )
        return rules.shard_accumulators(over_devices(task.policy.cast_to_compute(params), *batch))

    at = functools.partial(_at, rules)
    return (
        gradient,
        jax.tree.map(at, shapes, specs.params),
        tuple(at(x, P(AXIS)) for x in task.batch),
    )


def _at(rules: dp.ShardingRules, x: Any, spec: P) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(rules.mesh, spec))


def non_private(loss: Callable[..., Array], static: Any, specs: Specs, microbatch: int) -> Any:
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


def of_jax_privacy(loss: Callable[..., Array], static: Any, specs: Specs, microbatch: int) -> Any:
    """It forms each example's gradient, so it gathers all parameters once."""
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


# One process a line.


def of_process(*what: Any) -> Held | str:
    """`measured` in a process of its own, or what its failure said."""
    command = [sys.executable, "-m", "tests.benchmarks.large_gpt", json.dumps(what)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_FAST}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]
    return Held(*json.loads(done.stdout.splitlines()[-1]))


def cells(mesh: str, contender: str, microbatch: int, held: Held | str) -> dict[str, str]:
    failed = isinstance(held, str)
    parts = None if failed else held.parts
    return {
        "mesh (data x model)": mesh,
        "step": contender,
        "examples at once": str(microbatch),
        "compiled, GiB of a device": held if failed else f"{held.compiled / GIB:.3f}",
        "by formula": "-" if parts is None else f"{parts / GIB:.3f}",
        "compile, s": "-" if failed else f"{held.seconds:.0f}",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which sizes, meshes and steps."""
    parser.add_argument("--sizes", nargs="+", choices=RUNS, help="of the model")
    parser.add_argument("--mesh", nargs="+", help="data axis, or data x model: 64 or 64x4")
    parser.add_argument("--contenders", nargs="+", choices=(*CONTENDERS, "per_example"))
    parser.add_argument("--batch", type=int, default=8, help="examples on a device along data")
    parser.add_argument("--microbatch", type=int, nargs="+", default=[1], help="examples at once")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """A table a size."""
    chosen = options.sizes or (("300M", "1B") if options.short else RUNS)
    for name in ["tiny"] if options.tiny else chosen:
        size = TINY if options.tiny else example().SIZES[name]._asdict()
        meshes, steps = RUNS.get(name, RUNS["300M"])
        lines: list[dict[str, str]] = []
        for mesh in options.mesh or meshes[: 1 if options.short else None]:
            for contender in options.contenders or steps:
                for microbatch in options.microbatch:
                    held = of_process(size, options.batch, mesh, contender, microbatch)
                    lines.append(cells(mesh, contender, microbatch, held))
                    print("  ".join(lines[-1].values()), flush=True)
        shape = ", ".join(f"{count} {what}" for what, count in size.items())
        yield Table(f"{name}: {shape}", lines)


PART = Part(__doc__, tables, add_options)

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (HOST, HOST))
    arguments = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", example().mesh_of(arguments[2]).size)
    print(json.dumps(measured(*arguments)))
