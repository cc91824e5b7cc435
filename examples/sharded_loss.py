"""Losses that say where their values live, with the gradient of every example clipped.

A loss for a batch on a mesh of devices often says how its values are spread: by
`jax.lax.with_sharding_constraint` where the mesh's axes are Auto, by `jax.sharding.reshard` and
`out_sharding` where they are Explicit. Those lines speak of a batch. Clipping looks at one
example at a time, in which the dimension that they speak of has length one; taken at their word,
they put all the work on one device, or are an error. Sharding rules move them out of the way, and
the loss stays as it is:

    rules = dp.ShardingRules(mesh, examples=("data",), params=(...))
    grad_fn = dp.filter_clipped_grad(loss, ..., keep_batch_dim=True, sharding=rules)

Four cases, each compiled for eight devices with its constraints and without, and for one device:

1. the mean of 1,024 scalars is estimated, and the data are constrained;
2. the same, with the constraint on an intermediate value;
3. both with Explicit axes;
4. a GPT on 4 x 2 devices, attention and MLP weights spread over `model`, activations constrained
   inside the blocks; Auto and Explicit.

    python examples/sharded_loss.py
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

import eqx_dp as dp

DEVICES = 8
VOCABULARY, TIME, WIDTH, HEADS, BLOCKS = 64, 16, 64, 4, 1


class Sharding(NamedTuple):
    """The three places where a loss here says how a value is spread.

    A model of your own calls JAX's functions where they are needed. Here they are in a table, so
    that one loss can be compiled with them, without them, and for both types of axes.
    """

    constrain: Callable[[Array, P], Array]
    einsum: Callable[[str, Array, Array, P], Array]
    lookup: Callable[[Array, Array, P], Array]


SILENT = Sharding(
    constrain=lambda x, spec: x,
    einsum=lambda equation, x, y, spec: jnp.einsum(equation, x, y),
    lookup=lambda table, indices, spec: table[indices],
)

# Auto axes: the compiler spreads values as it likes, and a constraint overrules it.
AUTO = Sharding(
    constrain=jax.lax.with_sharding_constraint,
    einsum=lambda equation, x, y, spec: jax.lax.with_sharding_constraint(
        jnp.einsum(equation, x, y), spec
    ),
    lookup=lambda table, indices, spec: jax.lax.with_sharding_constraint(table[indices], spec),
)

# Explicit axes: how a value is spread is part of its type. Where that does not follow from the
# operands' types (a sum over a spread dimension, a lookup), the operation has to say it.
EXPLICIT = Sharding(
    constrain=jax.sharding.reshard,
    einsum=lambda equation, x, y, spec: jnp.einsum(equation, x, y, out_sharding=spec),
    lookup=lambda table, indices, spec: table.at[indices].get(out_sharding=spec),
)


def mean_of_constrained_data(
    sharding: Sharding, param: Float[Array, ""], data: Float[Array, " batch"]
) -> Float[Array, ""]:
    """Its gradient is the parameter minus the mean of the data."""
    return 0.5 * jnp.mean((sharding.constrain(data, P("data")) - param) ** 2)


def mean_with_constrained_residual(
    sharding: Sharding, param: Float[Array, ""], data: Float[Array, " batch"]
) -> Float[Array, ""]:
    return 0.5 * jnp.mean(sharding.constrain(data - param, P("data")) ** 2)


class Block(eqx.Module):
    """Causal attention and an MLP, for a batch; heads and hidden units are spread over 'model'."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    query_key_value: Float[Array, "3 width heads size"]
    output: Float[Array, "heads size width"]
    up: Float[Array, "width hidden"]
    down: Float[Array, "hidden width"]

    def __init__(self, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        size, hidden = WIDTH // HEADS, 4 * WIDTH
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.query_key_value = _normal(keys[0], (3, WIDTH, HEADS, size), WIDTH)
        self.output = _normal(keys[1], (HEADS, size, WIDTH), WIDTH)
        self.up = _normal(keys[2], (WIDTH, hidden), WIDTH)
        self.down = _normal(keys[3], (hidden, WIDTH), hidden)

    def __call__(
        self, x: Float[Array, "batch time width"], sharding: Sharding
    ) -> Float[Array, "batch time width"]:
        x = x + self.attention(_each(self.norm1)(x), sharding)
        # All tokens of all examples in one dimension: it holds examples, too, and says so.
        tokens = _each(self.norm2)(x).reshape(-1, WIDTH)
        hidden = sharding.einsum("nd,df->nf", tokens, self.up, P("data", "model"))
        change = sharding.einsum("nf,fd->nd", jax.nn.relu(hidden), self.down, P("data"))
        return sharding.constrain(x + change.reshape(x.shape), P("data"))

    def attention(
        self, x: Float[Array, "batch time width"], sharding: Sharding
    ) -> Float[Array, "batch time width"]:
        spec = P(None, "data", None, "model")
        query, key, value = sharding.einsum("btd,cdhs->cbths", x, self.query_key_value, spec)
        scores = sharding.einsum("bqhs,bkhs->bhqk", query, key, P("data", "model"))
        is_past = jnp.tril(jnp.ones((TIME, TIME), bool))
        scores = jnp.where(is_past, scores / math.sqrt(WIDTH // HEADS), -jnp.inf)
        weights = sharding.constrain(jax.nn.softmax(scores), P("data", "model"))
        mixed = sharding.einsum("bhqk,bkhs->bqhs", weights, value, P("data", None, "model"))
        return sharding.einsum("bqhs,hsd->bqd", mixed, self.output, P("data"))


class GPT(eqx.Module):
    """A small GPT, for a batch: it says nothing about single examples."""

    embedding: Float[Array, "vocabulary width"]
    position: Float[Array, "time width"]
    blocks: list[Block]
    head: Float[Array, "width vocabulary"]

    def __init__(self, key: PRNGKeyArray):
        keys = jax.random.split(key, BLOCKS + 3)
        self.embedding = _normal(keys[0], (VOCABULARY, WIDTH), 1)
        self.position = _normal(keys[1], (TIME, WIDTH), 1)
        self.head = _normal(keys[2], (WIDTH, VOCABULARY), WIDTH)
        self.blocks = [Block(key) for key in keys[3:]]

    def __call__(
        self, tokens: Int[Array, "batch time"], sharding: Sharding
    ) -> Float[Array, "batch time vocabulary"]:
        x = sharding.lookup(self.embedding, tokens, P("data")) + self.position
        x = sharding.constrain(x, P("data"))
        for block in self.blocks:
            x = block(x, sharding)
        return sharding.einsum("btd,dv->btv", x, self.head, P("data"))


GPT_PARAMS = (
    ("blocks.*.query_key_value", P(None, None, "model")),
    ("blocks.*.output", P("model")),
    ("blocks.*.up", P(None, "model")),
    ("blocks.*.down", P("model")),
)


def next_token_loss(
    sharding: Sharding,
    model: GPT,
    tokens: Int[Array, "batch time"],
    targets: Int[Array, "batch time"],
) -> Float[Array, ""]:
    """Mean cross-entropy of a batch."""
    log_probabilities = jax.nn.log_softmax(model(tokens, sharding))
    chosen = jax.nn.one_hot(targets, VOCABULARY) * log_probabilities
    return -jnp.mean(jnp.sum(chosen, axis=-1))


def _normal(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Array:
    return jax.random.normal(key, shape) / math.sqrt(fan_in)


def _each(norm: eqx.nn.LayerNorm) -> Callable[[Array], Array]:
    """For every token of every example."""
    return jax.vmap(jax.vmap(norm))


class Case(NamedTuple):
    """A loss, what it is called with, and where that lives."""

    name: str
    loss: Callable[..., Float[Array, ""]]
    model: PyTree[Array]
    batch: tuple[Array | np.ndarray, ...]
    axes: dict[str, int]
    params: tuple[tuple[str, P], ...] = ()
    l2_clip_norm: float = math.inf

    def rules(self, axis_type: AxisType) -> dp.ShardingRules:
        devices = np.reshape(eight_devices(), tuple(self.axes.values()))
        mesh = Mesh(devices, tuple(self.axes), axis_types=(axis_type,) * devices.ndim)
        return dp.ShardingRules(mesh, examples=("data",), params=self.params)

    def grad_fn(self, sharding: Sharding, rules: dp.ShardingRules | None) -> Any:
        return dp.filter_clipped_grad(
            partial(self.loss, sharding),
            l2_clip_norm=self.l2_clip_norm,
            normalize_by=len(self.batch[0]),  # the loss is a mean
            keep_batch_dim=True,
            method="per_example",  # of each program, so that costs can be compared
            microbatch_size=2**20,  # no loop, whose body would count once
            sharding=rules,
        )


class Run(NamedTuple):
    """A compiled gradient: its value, and what it costs a device."""

    grads: PyTree[Array]
    flops: float
    temporary_bytes: int


class Figures(NamedTuple):
    """A case on one type of axes, held against the same loss without constraints.

    Attributes:
        case: its name.
        axis_type: Auto or Explicit.
        error: the largest difference from one device's gradient, relative to its largest entry.
        flops: a device, with the constraints.
        silent_flops: a device, without them.
        flops_share: what one device needs for the whole batch, divided by the number of devices.
        temporary_bytes: a device, with the constraints.
        silent_temporary_bytes: a device, without them.
    """

    case: str
    axis_type: str
    error: float
    flops: float
    silent_flops: float
    flops_share: float
    temporary_bytes: int
    silent_temporary_bytes: int


def eight_devices() -> list[Any]:  # jaxlib ships no type for a device
    """Accelerators, if there are eight; else the virtual CPU devices."""
    devices = jax.devices()
    return (devices if len(devices) >= DEVICES else jax.devices("cpu"))[:DEVICES]


def make_cases() -> list[Case]:
    # By numpy, so that nothing lives on a device before the rules place it.
    random = np.random.default_rng(0)
    data = random.normal(size=1024).astype(np.float32)
    tokens = random.integers(0, VOCABULARY, (16, TIME + 1))
    param, model = jnp.asarray(0.3), GPT(jax.random.key(0))
    scalars = (param, (data,), {"data": 8})
    gpt = (model, (tokens[:, :-1], tokens[:, 1:]), {"data": 4, "model": 2}, GPT_PARAMS, 1.0)
    return [
        Case("mean, data", mean_of_constrained_data, *scalars),
        Case("mean, residual", mean_with_constrained_residual, *scalars),
        Case("GPT", next_token_loss, *gpt),
    ]


def run(grad_fn: Any, model: PyTree[Array], batch: tuple[Array | np.ndarray, ...]) -> Run:
    """Compiles a gradient once, reads off what it costs, and calls it."""
    jitted = cast(Any, eqx.filter_jit(grad_fn))  # its type knows nothing of lower
    compiled = jitted.lower(model, *batch).compile()
    program = compiled.compiled
    return Run(
        compiled(model, *batch),
        program.cost_analysis()["flops"],
        program.memory_analysis().temp_size_in_bytes,
    )


def run_on_mesh(case: Case, sharding: Sharding, axis_type: AxisType) -> Run:
    rules = case.rules(axis_type)
    # The mesh in context is what a bare PartitionSpec in the loss refers to.
    with jax.set_mesh(rules.mesh):
        model, batch = rules.shard(case.model), rules.shard_batch(case.batch)
        return run(case.grad_fn(sharding, rules), model, batch)


def measure(case: Case) -> list[Figures]:
    """The figures of a case, on Auto and on Explicit axes."""
    alone = run(case.grad_fn(SILENT, None), case.model, case.batch)
    # On Explicit axes a loss cannot say nothing, so both are held against silence on Auto axes.
    silent = run_on_mesh(case, SILENT, AxisType.Auto)
    found: list[Figures] = []
    for axis_type, sharding in ((AxisType.Auto, AUTO), (AxisType.Explicit, EXPLICIT)):
        ours = run_on_mesh(case, sharding, axis_type)
        figures = Figures(
            case.name,
            axis_type.name,
            relative_error(ours.grads, alone.grads),
            ours.flops,
            silent.flops,
            alone.flops / DEVICES,
            ours.temporary_bytes,
            silent.temporary_bytes,
        )
        found.append(figures)
    return found


def relative_error(found: PyTree[Array], expected: PyTree[Array]) -> float:
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    difference = max(np.max(np.abs(np.asarray(a) - np.asarray(b))) for a, b in pairs)
    return float(difference / max(np.max(np.abs(np.asarray(b))) for _, b in pairs))


ROW = "{:<15} {:<8} {:>8} {:>10} {:>10} {:>12} {:>11} {:>11}"


def main() -> list[Figures]:
    print(ROW.format("", "", "", "FLOPs", "a device", "one device's", "temporary", "bytes"))
    print(ROW.format("case", "axes", "error", "with", "without", "/ 8", "with", "without"))
    found: list[Figures] = []
    for case in make_cases():
        for figures in measure(case):
            print(ROW.format(*figures[:2], f"{figures.error:.0e}", *map(round, figures[3:])))
            found.append(figures)
    return found


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)  # before JAX starts its devices
    with jax.default_device(eight_devices()[0]):
        main()
