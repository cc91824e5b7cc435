"""A GPT of 0.3, 1 or 27 billion parameters on many devices: does its private step fit, and how?

Nothing is allocated: model, optimizer state and batch are shapes. The step is traced and compiled
for virtual devices, and the compiler asked for its bytes. Beside it stands the sum of the parts
that `dp.plan_memory` names: parameters, gradients, optimizer, batch, what is held for examples,
noise. With `--paper` nothing is compiled, and the sum of parts is all there is.

Parameters and the state of Adam are spread over all devices, layers are stacked and rematerialised,
and the policy is `mixed_bfloat16`. A mesh `64x4` has 64 devices along `data`, which examples are
spread over, and 4 along `model`, over which the compiler divides each layer.

With `--on` the compiler of a GPU or a TPU makes the program. That needs the extra `compilers` and
no such hardware. Bytes are the compiler's; the seconds of a step are **modelled from the compiled
program, not measured** (`roofline.py`).

    python examples/plan_gpt.py                                    # 320M parameters on 8 devices
    python examples/plan_gpt.py --size 1B --mesh 64x4 --microbatch 1
    python examples/plan_gpt.py --size 27B --mesh 64 512 64x8 --memory 16 80 141 --paper
    python examples/plan_gpt.py --on tpu:v5e:4x4 --microbatch 1    # by the compiler of a TPU
    python examples/plan_gpt.py --on h100:8 --methods ghost        # or of H100s
    python examples/plan_gpt.py --layers 2 --width 64 --length 64 --vocabulary 128 --batch 24
"""

import argparse
import math
import resource
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from chips import chip_of, devices_of
from equinox import nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from roofline import costs_of

import eqx_dp as dp

CLIP_NORM = 1.0
METHODS = ("ghost", "book_keeping", "per_example")
GIB = 2**30


class Sizes(NamedTuple):
    """Of the model."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int


SIZES = {
    "300M": Sizes(24, 1024, 8, 1024, 8192),
    "1B": Sizes(18, 2048, 16, 1024, 32768),
    "27B": Sizes(78, 5120, 40, 1024, 262144),
}


class Mesh(NamedTuple):
    """How many devices there are along each axis."""

    data: int
    model: int = 1

    @property
    def size(self) -> int:
        return self.data * self.model

    def __str__(self) -> str:
        return "x".join(map(str, self)) if self.model > 1 else str(self.data)


class Block(eqx.Module):
    """Causal attention and a two-layer network, each behind a layer norm."""

    before: nn.LayerNorm
    query_key_value: nn.Linear
    out: nn.Linear
    after: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, sizes: Sizes, key: PRNGKeyArray):
        keys, width = jax.random.split(key, 4), sizes.width
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, key=keys[0])
        self.out = nn.Linear(width, width, key=keys[1])
        self.up = nn.Linear(width, 4 * width, key=keys[2])
        self.down = nn.Linear(4 * width, width, key=keys[3])
        self.heads = sizes.heads

    def __call__(self, hidden: Float[Array, "time width"]) -> Float[Array, "time width"]:
        hidden = hidden + jax.vmap(self.out)(self.attention(jax.vmap(self.before)(hidden)))
        mixed = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.after)(hidden)))
        return hidden + jax.vmap(self.down)(mixed)

    def attention(self, hidden: Float[Array, "time width"]) -> Float[Array, "time width"]:
        time, width = hidden.shape
        of_heads = jax.vmap(self.query_key_value)(hidden).reshape(time, self.heads, -1)
        query, key, value = jnp.split(of_heads, 3, axis=-1)
        scores = jnp.einsum("thd,shd->hts", query, key) / math.sqrt(width // self.heads)
        is_past = jnp.tril(jnp.ones((time, time), bool))
        weights = jax.nn.softmax(jnp.where(is_past, scores, -1e9))
        return jnp.einsum("hts,shd->thd", weights, value).reshape(time, width)


class GPT(eqx.Module):
    """Layers are stacked: a scan goes through them, and each is computed again on the way back."""

    embedding: nn.Embedding
    positions: Float[Array, "time width"]
    blocks: Block
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, sizes: Sizes, key: PRNGKeyArray):
        keys = jax.random.split(key, sizes.layers + 3)
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (sizes.length, sizes.width))
        self.blocks = eqx.filter_vmap(lambda key: Block(sizes, key))(keys[3:])
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, use_bias=False, key=keys[2])

    def __call__(self, tokens: Int[Array, " time"]) -> Float[Array, "time vocabulary"]:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def layer(hidden: Array, arrays: PyTree[Any]) -> tuple[Array, None]:
            return eqx.combine(arrays, static)(hidden), None

        hidden = jax.vmap(self.embedding)(tokens) + self.positions
        hidden, _ = jax.lax.scan(layer, hidden, arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(hidden))


# Matrices are spread over all devices. What is small stays whole.
PARAMS = (
    ("blocks.query_key_value.weight", P(None, "model", "data")),
    ("blocks.up.weight", P(None, "model", "data")),
    ("blocks.out.weight", P(None, "data", "model")),
    ("blocks.down.weight", P(None, "data", "model")),
    ("blocks.query_key_value.bias", P(None, "model")),
    ("blocks.up.bias", P(None, "model")),
    ("embedding.weight", P("data", "model")),
    ("head.weight", P("model", "data")),
)


def loss(model: GPT, tokens: Int[Array, " time"], targets: Int[Array, " time"]) -> Array:
    """Mean cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()


class Task(NamedTuple):
    """What is planned; all of it shapes.

    Attributes:
        sizes: of the model.
        model: the model.
        batch: of all devices.
        rules: for the mesh.
        policy: the dtypes.
    """

    sizes: Sizes
    model: Any
    batch: tuple[Any, Any]
    rules: dp.ShardingRules
    policy: dp.Policy

    @property
    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.model) if is_shape(x))


class Row(NamedTuple):
    """One line of the table; bytes are those of a device.

    Attributes:
        mesh: the devices.
        method: of the engine.
        microbatch: examples at once on a device.
        parts: those of `dp.plan_memory`.
        compiled: as the compiler says; None on paper.
        seconds: tracing and compiling.
        program: the compiled step; None on paper.
    """

    mesh: Mesh
    method: str
    microbatch: int
    parts: Any
    compiled: int | None
    seconds: float
    program: Any = None

    @property
    def held(self) -> int:
        return self.parts.total if self.compiled is None else self.compiled


def is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def make_task(sizes: Sizes, batch: int, on: Mesh, devices: list[Any] | None = None) -> Task:
    """Shapes alone: `eqx.filter_eval_shape` makes a model without an array."""
    auto, devices = (AxisType.Auto,) * len(on), devices or jax.devices()
    of_mesh = np.array(devices[: on.size]).reshape(tuple(on))
    mesh = jax.sharding.Mesh(of_mesh, on._fields, axis_types=auto)
    rules = dp.ShardingRules(mesh, examples="data", params=PARAMS, accumulators="examples")
    tokens = jax.ShapeDtypeStruct((on.data * batch, sizes.length), jnp.int32)
    model = eqx.filter_eval_shape(GPT, sizes, jax.eval_shape(lambda: jax.random.key(0)))
    return Task(sizes, model, (tokens, tokens), rules, dp.load_policy("mixed_bfloat16"))


def clipped_grad(task: Task) -> Any:
    """The engine's clipped gradient."""
    return dp.filter_clipped_grad(
        loss, l2_clip_norm=CLIP_NORM, policy=task.policy, sharding=task.rules
    )


def optimizer_of(task: Task) -> optax.GradientTransformation:
    """Adam, behind the noise."""
    noise = dp.gaussian_privatizer(stddev=CLIP_NORM, policy=task.policy, sharding=task.rules)
    return optax.chain(noise, optax.adam(1e-3))


def plan(task: Task, on: Mesh, method: Any, microbatch: int, compiled: bool) -> Row:
    """A line of the table."""
    start = time.perf_counter()
    found = dp.plan_memory(
        clipped_grad(task),
        task.model,
        *task.batch,
        optimizer=optimizer_of(task),
        method=method,
        microbatch_size=microbatch,
        compiled=compiled,
    )
    total = None if found.compiled is None else found.compiled.total
    taken = time.perf_counter() - start
    return Row(on, method, microbatch, found.parts, total, taken, found.program)


def textbook_bytes(sizes: Sizes, model_bytes: int) -> float:
    """Activations of one example, M_model T^2 / (4 N D^2) with N heads of D entries.

    From an introduction to data parallelism in JAX. It follows if a layer holds three tables of
    T x T numbers for each head, 3 N T^2, and has 12 (ND)^2 parameters, and nothing is computed
    again on the way back.
    """
    of_head = sizes.width // sizes.heads
    return model_bytes * sizes.length**2 / (4 * sizes.heads * of_head**2)


LINE = "{:<6} {:<12} {:>10}" + " {:>12}" * 7 + " {:>8}   {}"
PARTS = ("parameters", "gradients", "optimizer", "per_example", "noise")


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parse(arguments)
    sizes, rows = options.sizes, list[Row]()
    params = make_task(sizes, 1, Mesh(1)).num_params
    print(
        f"{params / 1e6:,.1f}M parameters, T = {sizes.length}, {options.batch} examples on each "
        f"device along data, mixed_bfloat16\ntextbook, float32, for one example's activations: "
        f"{told(textbook_bytes(sizes, 4 * params))} (M_model B T^2 / 4 N D^2, no layer "
        "rematerialised)\n"
    )
    fits = f"fits, of {', '.join(f'{size:g}' for size in options.memory)} GB"
    sums = ("parts", "compiled", "seconds", fits)
    print(LINE.format("mesh", "a device", "microbatch", *PARTS, *sums))
    for on in options.mesh:
        task = make_task(sizes, options.batch, on, options.devices)
        for method in options.methods:
            for microbatch in options.microbatch:
                rows.append(plan(task, on, method, microbatch, not options.paper))
                print(LINE.format(*cells(rows[-1], options.memory)), flush=True)
                if options.devices and rows[-1].program is not None:
                    print(modelled(rows[-1], options.devices[0], options.batch), flush=True)
                jax.clear_caches()
    print(f"\npeak host memory: {peak_host_bytes() / GIB:.2f} GiB")
    return rows


def cells(row: Row, memory: list[float]) -> tuple[str, ...]:
    sizes = [*(getattr(row.parts, part) for part in PARTS), row.parts.total]
    compiled = "-" if row.compiled is None else told(row.compiled)
    fits = ", ".join(f"{size:g}" for size in memory if row.held <= size * 10**9) or "none"
    which = (str(row.mesh), row.method, str(row.microbatch))
    return (*which, *map(told, sizes), compiled, f"{row.seconds:.0f}", fits)


def modelled(row: Row, device: Any, batch: int) -> str:
    """Seconds of a step, by a data sheet; loops of unknown length go over the whole batch."""
    costs, chip = costs_of(row.program.as_text(), batch // row.microbatch), chip_of(device)
    if chip is None:
        return f"  no data sheet of {device.device_kind} here"
    parts = costs.seconds(chip)
    told = ", ".join(f"{name} {seconds:.4f}" for name, seconds in parts.items())
    return (
        f"  modelled from the compiled program, not measured: {sum(parts.values()):.4f} s a step "
        f"({told}); {100 * costs.narrow_share:.1f} % of FLOPs of products in 16 or 8 bits; "
        f"{costs.waits:.0f} waits of the host"
    )


def told(size: float) -> str:
    return f"{size / GIB:.3f} GiB" if size >= GIB else f"{size / 2**20:.3f} MiB"


def peak_host_bytes() -> int:
    """The most that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mesh_of(text: str) -> Mesh:
    """From `64` or `64x4`."""
    try:
        mesh = Mesh(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"wanted 64, or 64x4; found {text!r}") from None
    if min(mesh) < 1:
        raise argparse.ArgumentTypeError(f"lengths must be positive; found {text!r}")
    return mesh


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="300M", help="of the model")
    for name in Sizes._fields:
        parser.add_argument(f"--{name}", type=int, help=f"instead of the size's {name}")
    parser.add_argument(
        "--mesh", type=mesh_of, nargs="+", help="64 or 64x4 (default: 8, or --on's)"
    )
    parser.add_argument("--on", help="compile for h100:8, tpu:v5e:4x4 and the like (needs no such)")
    parser.add_argument("--batch", type=int, default=24, help="examples on a device (default: 24)")
    parser.add_argument("--microbatch", type=int, nargs="+", default=[1, 3, 24])
    parser.add_argument(
        "--memory", type=float, nargs="+", help="of a device, GB (default: 32, or --on's)"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--paper", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)
    options.devices = devices_of(options.on) if options.on else []
    chip = chip_of(options.devices[0]) if options.on else None
    options.memory = options.memory or [32 if chip is None else chip.memory / 1e9]
    options.mesh = options.mesh or [Mesh(len(options.devices) or 8)]
    given = {name: getattr(options, name) for name in Sizes._fields}
    own = {name: value for name, value in given.items() if value is not None}
    options.sizes = sizes = SIZES[options.size]._replace(**own)
    if min(options.microbatch) < 1 or any(options.batch % size for size in options.microbatch):
        parser.error(
            f"--microbatch must divide --batch {options.batch}, found {options.microbatch}"
        )
    for on in options.mesh:
        if options.devices and on.size > len(options.devices):
            parser.error(f"--mesh {on} has more devices than --on {options.on}")
        if sizes.width % sizes.heads or sizes.heads % on.model:
            parser.error(f"--heads must divide --width, and the model axis of {on} --heads")
        if sizes.width % on.size or sizes.vocabulary % on.size:
            parser.error(f"the devices of --mesh {on} must divide --width and --vocabulary")
    return options


if __name__ == "__main__":
    # Before JAX starts its devices.
    jax.config.update("jax_num_cpu_devices", max(on.size for on in parse(None).mesh))
    main()
