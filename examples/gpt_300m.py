"""A GPT of 320M parameters on eight devices: does its private step fit, and by which method?

Nothing is allocated: model, optimizer state and batch are shapes, the step is traced and compiled
for eight devices, and the compiler asked for its bytes. Beside it stands the sum of the parts that
`dp.plan_memory` names: parameters, gradients, optimizer, batch, what is held for examples, noise.
Parameters and the state of Adam are spread over the devices, layers are stacked and rematerialised,
and the policy is `mixed_bfloat16`.

Compared are the ordinary step without privacy; the engine's three methods; and jax_privacy's
clipped gradient, if it is installed. The two that are not ours know no sharding rules: they run on
every device's own examples in a `shard_map`, from parameters gathered in bfloat16, and sum over
devices as the engine does. Sums over microbatches are float32.

    python examples/gpt_300m.py
    python examples/gpt_300m.py --layers 2 --width 64 --length 64 --vocabulary 128 --batch 4
"""

import argparse
import importlib.util
import math
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

import eqx_dp as dp
from eqx_dp.planning import TransformerShape, plan_memory

DEVICES, AXIS, CLIP_NORM = 8, "data", 1.0
NON_PRIVATE, JAX_PRIVACY = "non-private", "jax_privacy"
METHODS = ("ghost", "book_keeping", "per_example")
GIB = 2**30


class Sizes(NamedTuple):
    """Of the model."""

    layers: int = 24
    width: int = 1024
    heads: int = 8
    length: int = 1024
    vocabulary: int = 8192


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
        parts = jnp.split(jax.vmap(self.query_key_value)(hidden), 3, axis=-1)
        query, key, value = (part.reshape(time, self.heads, -1) for part in parts)
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


PARAMS = (
    ("blocks.*.weight", P(None, AXIS)),
    ("embedding.weight", P(AXIS)),
    ("head.weight", P(AXIS)),
)


def loss(model: GPT, tokens: Int[Array, " time"], targets: Int[Array, " time"]) -> Array:
    """Mean cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()


class Task(NamedTuple):
    """What every row of the table has in common; all of it shapes."""

    sizes: Sizes
    model: Any
    batch: tuple[Any, Any]
    rules: dp.ShardingRules
    policy: dp.Policy
    device_memory: int

    @property
    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.model) if is_shape(x))


class Row(NamedTuple):
    """One line of the table; bytes are those of a device.

    Attributes:
        contender: who.
        microbatch: examples at once on a device.
        parts: the sum of the parts of `dp.plan_memory`; None for those who are not ours.
        compiled: as the compiler says.
        seconds: tracing and compiling.
    """

    contender: str
    microbatch: int
    parts: int | None
    compiled: int
    seconds: float


def is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def make_task(sizes: Sizes, batch: int, device_memory: int) -> Task:
    """Shapes alone: `eqx.filter_eval_shape` makes a model without an array."""
    rules = dp.ShardingRules(
        jax.make_mesh((DEVICES,), (AXIS,)),
        examples=(AXIS,),
        params=PARAMS,
        accumulators="examples",
    )
    tokens = jax.ShapeDtypeStruct((DEVICES * batch, sizes.length), jnp.int32)
    model = eqx.filter_eval_shape(GPT, sizes, jax.eval_shape(lambda: jax.random.key(0)))
    policy = dp.load_policy("mixed_bfloat16")
    return Task(sizes, model, (tokens, tokens), rules, policy, device_memory)


def ours(task: Task, method: Any, microbatch: int) -> Row:
    """A private step by one of the engine's methods."""
    start = time.perf_counter()
    grad_fn = dp.filter_clipped_grad(
        loss, l2_clip_norm=CLIP_NORM, policy=task.policy, sharding=task.rules
    )
    plan = plan_memory(
        grad_fn,
        task.model,
        *task.batch,
        optimizer=optimizer_of(task),
        method=method,
        microbatch_size=microbatch,
        transformer=TransformerShape(task.sizes.heads, task.sizes.width, task.sizes.length),
    )
    assert plan.compiled is not None
    taken = time.perf_counter() - start
    return Row(method, microbatch, plan.parts.total, plan.compiled.total, taken)


def optimizer_of(task: Task, is_private: bool = True) -> optax.GradientTransformation:
    """Adam, behind the noise. A fixed key: nothing is drawn here."""
    noise = dp.gaussian_privatizer(
        stddev=CLIP_NORM, key=jax.random.key(0), policy=task.policy, sharding=task.rules
    )
    return optax.chain(noise, optax.adam(1e-3)) if is_private else optax.adam(1e-3)


# Those who are not ours: a gradient of a device's own examples, and a step around it.


def non_private(static: Any, microbatch: int) -> Callable[..., PyTree[Array]]:
    """The gradient of the summed loss, a microbatch at a time."""

    def summed(params: PyTree[Array], tokens: Array, targets: Array) -> Array:
        return jnp.sum(
            jax.vmap(lambda x, y: loss(eqx.combine(params, static), x, y))(tokens, targets)
        )

    def gradient(params: PyTree[Array], *batch: Array) -> PyTree[Array]:
        parts = [x.reshape(-1, microbatch, *x.shape[1:]) for x in batch]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

        def add(total: PyTree[Array], part: list[Array]) -> tuple[PyTree[Array], None]:
            grads = jax.grad(summed)(params, *part)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), None

        return jax.lax.scan(add, zeros, parts)[0]

    return gradient


def of_jax_privacy(static: Any, microbatch: int) -> Callable[..., PyTree[Array]]:
    import jax_privacy

    return jax_privacy.clipped_grad(
        lambda params, *example: loss(eqx.combine(params, static), *example),
        l2_clip_norm=CLIP_NORM,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=microbatch,
        dtype=jnp.float32,
    )


PEERS = {NON_PRIVATE: non_private, JAX_PRIVACY: of_jax_privacy}


def peer(task: Task, name: str, microbatch: int) -> Row:
    """The step of another, compiled for the same devices."""
    start = time.perf_counter()
    rules, mesh = task.rules, task.rules.mesh
    shapes, static = eqx.partition(task.model, is_shape)
    optimizer = optimizer_of(task, is_private=name != NON_PRIVATE)
    gradient = PEERS[name](static, microbatch)
    sum_specs = rules.accumulator_specs(shapes)

    def on_device(params: PyTree[Array], *batch: Array) -> PyTree[Array]:
        return jax.tree.map(_summed_over_devices, gradient(params, *batch), sum_specs)

    def step(params: PyTree[Array], state: Any, batch: tuple[Array, Array]) -> Any:
        over_devices = jax.shard_map(
            on_device, in_specs=(P(), P(AXIS), P(AXIS)), out_specs=sum_specs, check_vma=False
        )
        gathered = jax.sharding.reshard(task.policy.cast_to_compute(params), P())
        grads = over_devices(gathered, *batch)
        updates, state = optimizer.update(grads, state, params)
        return rules.shard(optax.apply_updates(params, updates)), state

    def at(x: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = optax.tree.map_params(
        optimizer,
        lambda x, spec: at(x, spec),
        jax.eval_shape(optimizer.init, shapes),
        sum_specs,
        transform_non_params=lambda x: at(x, P()),
    )
    arguments = (
        jax.tree.map(at, shapes, rules.specs(shapes)),
        state,
        tuple(at(x, P(AXIS)) for x in task.batch),
    )
    with jax.set_mesh(mesh):
        program = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory: Any = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    held += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Row(name, microbatch, None, held, time.perf_counter() - start)


def _summed_over_devices(x: Array, spec: P) -> Array:
    """Each device gets its part of the sum, where the sum is spread."""
    if AXIS not in jax.tree.leaves(tuple(spec)):
        return jax.lax.psum(x, AXIS)
    dimension = next(i for i, entry in enumerate(spec) if AXIS in jax.tree.leaves((entry,)))
    return jax.lax.psum_scatter(x, AXIS, scatter_dimension=dimension, tiled=True)


# The table.

LINE = "{:<14} {:>10} {:>12} {:>12} {:>9} {:>9}"


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parse(arguments)
    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    task = make_task(sizes, options.batch, int(options.memory * 10**9))
    textbook = TransformerShape(sizes.heads, sizes.width, sizes.length)
    in_float32 = textbook.activation_bytes(4 * task.num_params, 1)
    print(
        f"{task.num_params / 1e6:.1f}M parameters, T = {sizes.length}, {DEVICES} devices, "
        f"{options.batch} examples on each, {task.policy.name}\n"
        f"textbook, float32, for one example's activations: {told(in_float32)} "
        "(M_model B T^2 / 4 N D^2, no layer rematerialised)\n"
    )
    print(
        LINE.format(
            "a device",
            "microbatch",
            "parts",
            "compiled",
            f"{options.memory:g} GB",
            "seconds",
        )
    )
    rows: list[Row] = []
    for name in options.contenders:
        if name == JAX_PRIVACY and importlib.util.find_spec(JAX_PRIVACY) is None:
            print(f"{JAX_PRIVACY}: not installed (python -m pip install 'eqx-dp[test]')")
            continue
        for microbatch in options.microbatch:
            make = peer if name in PEERS else ours
            rows.append(make(task, name, microbatch))
            print(LINE.format(*cells(rows[-1], task)), flush=True)
            jax.clear_caches()
    print(f"\npeak host memory: {peak_host_bytes() / GIB:.2f} GiB")
    return rows


def cells(row: Row, task: Task) -> tuple[str, ...]:
    parts = "" if row.parts is None else told(row.parts)
    fits = "fits" if row.compiled <= task.device_memory else "too large"
    numbers = (parts, told(row.compiled), fits, f"{row.seconds:.0f}")
    return (row.contender, str(row.microbatch), *numbers)


def told(size: float) -> str:
    return f"{size / GIB:.3f} GiB" if size >= GIB else f"{size / 2**20:.3f} MiB"


def peak_host_bytes() -> int:
    """The most that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    parser.add_argument("--batch", type=int, default=24, help="examples on a device (default: 24)")
    parser.add_argument("--microbatch", type=int, nargs="+", default=[1, 3, 24])
    parser.add_argument("--memory", type=float, default=32, help="of a device, GB (default: 32)")
    names = (NON_PRIVATE, *METHODS, JAX_PRIVACY)
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    options = parser.parse_args(arguments)
    if min(options.microbatch) < 1 or any(options.batch % size for size in options.microbatch):
        parser.error(
            f"--microbatch must divide --batch {options.batch}, found {options.microbatch}"
        )
    if options.width % options.heads or options.width % DEVICES or options.vocabulary % DEVICES:
        parser.error(f"--heads must divide --width, and {DEVICES} --width and --vocabulary")
    return options


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)  # before JAX starts its devices
    main()
