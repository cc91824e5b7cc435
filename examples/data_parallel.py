"""Data parallelism from the ground up, for readers who know `jax.pmap`.

A linear layer on one point, on 16 points, on 16 points over eight devices; then linear regression
whose update averages gradients over the devices, first plain, then private with three lines
changed. Everything is done twice: by `jit` on arrays that are spread over devices, where the
compiler finds out what has to cross them, and by `shard_map`, where the program says it.

What became of pmap's idioms:

| with pmap | today |
|---|---|
| `pmap(f)` | `jit(f)` on spread arrays, or `jit(shard_map(f, ...))` |
| `devices=` | `jax.make_mesh((8,), ("data",), devices=...)` |
| `axis_name="data"` | the name of a mesh axis |
| `in_axes=(None, 0)` | `in_specs=(P(), P("data"))`; with jit, where arguments live |
| `out_axes=0` | `out_specs=P("data")`, or `jit`'s `out_shardings` |
| leading axis of devices (8, 2, ...) | none: (16, ...), spread by `device_put(x, P("data"))` |
| `common_utils.shard(batch)` | `device_put(batch, on_data)`, or `rules.shard_batch(batch)` |
| `replicate(model)` | `device_put(model, on_all)`, or `rules.shard(model)` |
| `unreplicate(model)` | nothing: there is one model, and it has no axis of devices |
| `lax.pmean(grads, "data")` | in shard_map the same; with jit the mean over the batch |
| `lax.psum(x, "data")` | in shard_map the same; with jit the sum over the batch |
| `lax.axis_index("data")` | in shard_map the same; with jit not needed |
| `donate_argnums=0` | `jit(..., donate_argnums=0)`, `eqx.filter_jit(donate=...)` |
| `static_broadcasted_argnums=0` | `jit(..., static_argnums=0)` |
| several hosts | the same programs: a mesh spans all hosts' devices |

(`on_data` is `NamedSharding(mesh, P("data"))`, `on_all` is `NamedSharding(mesh, P())`.)

    python examples/data_parallel.py
"""

import difflib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

import eqx_dp as dp

DEVICES = 8
POINTS, FEATURES = 16, 3
EXAMPLES, RATE = 1024, 0.5
TRUE_WEIGHT, TRUE_BIAS = np.array([1.0, -2.0, 0.5], np.float32), np.float32(0.25)

PLAN = dp.PrivacyPlan(sampling_prob=0.25, steps=40, noise_multiplier=2.0, delta=1e-5)
SECRET = 2**40  # so that all ways to train have one noise; without it every run has its own
EXPECTED = PLAN.sampling_prob * EXAMPLES  # examples in a batch

GradFn = Callable[..., PyTree[Array]]


def make_model(key: PRNGKeyArray) -> eqx.nn.Linear:
    return eqx.nn.Linear(FEATURES, "scalar", key=key)


def make_points(number: int) -> tuple[Float[np.ndarray, "n features"], Float[np.ndarray, " n"]]:
    random = np.random.default_rng(0)
    xs = random.normal(size=(number, FEATURES)).astype(np.float32)
    noise = 0.1 * random.normal(size=number).astype(np.float32)
    return xs, xs @ TRUE_WEIGHT + TRUE_BIAS + noise


def make_mesh(devices: int) -> Mesh:
    """Devices in a row, along an Auto axis: what the program leaves open, the compiler decides."""
    chosen = eight_devices()[:devices]
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=chosen)


def rules_on(devices: int) -> dp.ShardingRules:
    """Examples are spread over the devices, and parameters are on each of them."""
    return dp.ShardingRules(make_mesh(devices), examples=("data",))


def eight_devices() -> list[Any]:  # jaxlib ships no type for a device
    """Accelerators, if there are eight; else the virtual CPU devices."""
    devices = jax.devices()
    return (devices if len(devices) >= DEVICES else jax.devices("cpu"))[:DEVICES]


# 1. A linear layer: one point, 16 points, eight devices with two points each.


def on_one_point(model: eqx.nn.Linear, x: Float[Array, " features"]) -> Float[Array, ""]:
    return model(x)


def on_many_points(model: eqx.nn.Linear, xs: Float[Array, "n features"]) -> Float[Array, " n"]:
    return jax.vmap(on_one_point, in_axes=(None, 0))(model, xs)


def by_sharded_jit(
    mesh: Mesh, model: eqx.nn.Linear, xs: Float[np.ndarray, "16 features"]
) -> Float[Array, "8 2"]:
    """Nothing speaks of devices but where the arguments live."""
    model = jax.device_put(model, NamedSharding(mesh, P()))
    xs = jax.device_put(xs.reshape(DEVICES, -1, FEATURES), NamedSharding(mesh, P("data")))
    return jax.jit(jax.vmap(on_many_points, in_axes=(None, 0)))(model, xs)


def by_shard_map(
    mesh: Mesh, model: eqx.nn.Linear, xs: Float[np.ndarray, "16 features"]
) -> Float[Array, "8 2"]:
    """The function is what one device does: it sees two points."""

    def on_a_device(model: eqx.nn.Linear, xs: Float[Array, "2 features"]) -> Float[Array, "1 2"]:
        return on_many_points(model, xs)[None]

    mapped = jax.shard_map(on_a_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    return jax.jit(mapped)(model, xs)


# 2. Linear regression. Gradients of devices are averaged, so all make the same update.


def loss(
    model: eqx.nn.Linear, x: Float[Array, " features"], y: Float[Array, ""]
) -> Float[Array, ""]:
    """Half the squared error of one example."""
    return 0.5 * (model(x) - y) ** 2


def mean_loss(
    model: eqx.nn.Linear, xs: Float[Array, "n features"], ys: Float[Array, " n"]
) -> Float[Array, ""]:
    return jnp.mean(jax.vmap(loss, in_axes=(None, 0, 0))(model, xs, ys))


class Run(NamedTuple):
    """A trained model, and the program of its step as it was compiled."""

    model: eqx.nn.Linear
    program: str


# Every step is told which of its examples are padding; without privacy there is none to tell of.
Batch = tuple[tuple[Float[np.ndarray, "n features"], Float[np.ndarray, " n"]], dict[str, Any]]


def train_plainly(rules: dp.ShardingRules) -> Run:
    key = jax.random.key(0)
    xs, ys = make_points(EXAMPLES)
    grad_fn = eqx.filter_grad(mean_loss)
    optimizer = optax.sgd(RATE)
    batches = whole_batches(xs, ys)
    return train(rules, make_model(key), grad_fn, optimizer, batches)


def train_privately(rules: dp.ShardingRules) -> Run:
    key = jax.random.key(0)
    xs, ys = make_points(EXAMPLES)
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, normalize_by=EXPECTED, sharding=rules)
    optimizer = optax.chain(PLAN.privatizer(grad_fn, SECRET, sharding=rules), optax.sgd(RATE))
    batches = sampled_batches(xs, ys)
    return train(rules, make_model(key), grad_fn, optimizer, batches)


def train_plainly_by_shard_map(rules: dp.ShardingRules) -> Run:
    """As by `pmap`: a device has its examples, and the average over devices is written out."""
    key = jax.random.key(0)

    def on_a_device(
        model: eqx.nn.Linear, xs: Float[Array, "part features"], ys: Float[Array, " part"]
    ) -> PyTree[Array]:
        # A model that is the same on all devices has one gradient, and JAX would sum it over them
        # unasked. Marked as each device's own, it has one gradient a device, as under pmap.
        model = jax.lax.pcast(model, "data", to="varying")
        return jax.lax.pmean(eqx.filter_grad(mean_loss)(model, xs, ys), "data")

    specs = (P(), P("data"), P("data"))
    grad_fn = jax.shard_map(on_a_device, mesh=rules.mesh, in_specs=specs, out_specs=P())
    batches = whole_batches(*make_points(EXAMPLES))
    return train(rules, make_model(key), grad_fn, optax.sgd(RATE), batches)


def train_privately_by_shard_map(rules: dp.ShardingRules) -> Run:
    """What the rules do: every device clips and sums its own, then one psum, then noise, once.

    `check_privacy` certifies the step with rules, and calls this one undecided.
    """
    key = jax.random.key(0)
    clipped = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, normalize_by=EXPECTED)

    def on_a_device(
        model: eqx.nn.Linear,
        xs: Float[Array, "part features"],
        ys: Float[Array, " part"],
        is_padding_example: Bool[Array, " part"],
    ) -> PyTree[Array]:
        grads = clipped(model, xs, ys, is_padding_example=is_padding_example)
        return jax.lax.psum(grads, "data")  # no mean: normalize_by has divided already

    specs = (P(), P("data"), P("data"), P("data"))
    # Unchecked, a gradient stays on its device, as under pmap. With the check JAX would sum it over
    # devices unasked, before it is clipped, which the library refuses.
    mapped = jax.shard_map(
        on_a_device, mesh=rules.mesh, in_specs=specs, out_specs=P(), check_vma=False
    )

    def grad_fn(
        model: eqx.nn.Linear, xs: Array, ys: Array, *, is_padding_example: Array
    ) -> PyTree[Array]:
        return mapped(model, xs, ys, is_padding_example)

    optimizer = optax.chain(PLAN.privatizer(clipped, SECRET), optax.sgd(RATE))
    batches = sampled_batches(*make_points(EXAMPLES))
    return train(rules, make_model(key), grad_fn, optimizer, batches)


def whole_batches(
    xs: Float[np.ndarray, "n features"], ys: Float[np.ndarray, " n"]
) -> Iterator[Batch]:
    """All examples, in every step."""
    for _ in range(PLAN.steps):
        yield (xs, ys), {}


def sampled_batches(
    xs: Float[np.ndarray, "n features"], ys: Float[np.ndarray, " n"]
) -> Iterator[Batch]:
    """A Poisson sample a step, filled up with padding to a length that the devices divide."""
    sampler = PLAN.sampler(len(xs), seed=0, pad_to=DEVICES)
    for step in range(PLAN.steps):
        examples, is_padding_example = sampler.take(step, xs, ys)
        yield examples, {"is_padding_example": is_padding_example}


def train(
    rules: dp.ShardingRules,
    model: eqx.nn.Linear,
    grad_fn: GradFn,
    optimizer: optax.GradientTransformation,
    batches: Iterator[Batch],
) -> Run:
    """The same for all: it does not know whether there is privacy, or how many devices."""

    @eqx.filter_jit
    def step(
        model: eqx.nn.Linear, opt_state: optax.OptState, batch: PyTree[Array]
    ) -> tuple[eqx.nn.Linear, optax.OptState]:
        examples, padding = batch
        grads = grad_fn(model, *examples, **padding)
        updates, opt_state = optimizer.update(grads, opt_state)
        return rules.shard(eqx.apply_updates(model, updates)), opt_state

    model = rules.shard(model)
    # The optimizer's state goes to all devices now: else the second step would be compiled anew.
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    opt_state = jax.device_put(opt_state, NamedSharding(rules.mesh, P()))
    batch: PyTree[Array] = None
    for host_batch in batches:
        batch = rules.shard_batch(host_batch)
        model, opt_state = step(model, opt_state, batch)
    return Run(model, program_of(step, model, opt_state, batch))


# 3. What can be seen of it.


def program_of(step: Any, *arguments: Any) -> str:
    """The program that `eqx.filter_jit` compiles; its type knows nothing of `lower`."""
    return step.lower(*arguments).compile().compiled.as_text()


def all_reduces(program: str) -> list[str]:
    """Where a compiled program sums over devices: what, in which computation, and its origin."""
    found: list[str] = []
    computation = ""
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = " ".join(line.split(" (")[0].split())
        match = re.search(r" = (.+?) all-reduce(?:-start)?\(", line)
        if match:
            origin = re.search(r'op_name="([^"]*)"', line)
            found.append(f"{match[1]} in {computation}, from {origin[1] if origin else 'unknown'}")
    return found


def changed_lines(before: Callable[..., Any], after: Callable[..., Any]) -> list[str]:
    """The lines in which the body of a function differs from that of another."""
    old, new = (inspect.getsource(function).splitlines()[1:] for function in (before, after))
    return [line for line in difflib.ndiff(old, new) if line[0] in "+-"]


def parameters(model: eqx.nn.Linear) -> Float[np.ndarray, " parameters"]:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)])


def parameters_by_device(model: eqx.nn.Linear) -> list[Float[np.ndarray, " parameters"]]:
    """The copy that each device holds."""
    leaves = jax.tree.leaves(model)
    return [
        np.concatenate([np.ravel(leaf.addressable_shards[i].data) for leaf in leaves])
        for i in range(len(leaves[0].addressable_shards))
    ]


def show_layer(mesh: Mesh) -> None:
    model, (xs, _) = make_model(jax.random.key(0)), make_points(POINTS)
    flat = on_many_points(model, jnp.asarray(xs))
    print("A linear layer")
    print(f"  on one point: shape {on_one_point(model, xs[0]).shape}")
    print(f"  on 16 points, by vmap: {flat.shape}")
    for name, way in (("sharded jit", by_sharded_jit), ("shard_map", by_shard_map)):
        parts = way(mesh, model, xs)
        same = np.allclose(np.ravel(parts), flat, rtol=1e-6)
        on = len(parts.sharding.device_set)
        print(f"  on {on} devices, by {name}: {parts.shape}, equal to the flat vector: {same}")


def show_training(title: str, train_on: dict[str, Callable[[dp.ShardingRules], Run]]) -> None:
    print(f"\nLinear regression, {title}")
    for name, way in train_on.items():
        alone, together = way(rules_on(1)), way(rules_on(DEVICES))
        found, copies = parameters(together.model), parameters_by_device(together.model)
        same = all(np.array_equal(copy, found) for copy in copies)
        apart = np.max(np.abs(found - parameters(alone.model)))
        print(f"  by {name}: {np.round(found, 2)}")
        print(f"    the same on all {len(copies)} devices: {same}; one device's: {apart:.0e} away")
        for place in all_reduces(together.program):
            print(f"    all-reduce: {place}")


def main() -> None:
    show_layer(make_mesh(DEVICES))
    truth = np.append(TRUE_WEIGHT, TRUE_BIAS)
    print(f"\nTo be found: {truth}")
    show_training("plain", {"jit": train_plainly, "shard_map": train_plainly_by_shard_map})
    print("\nThe lines that change")
    print("\n".join(changed_lines(train_plainly, train_privately)))
    show_training(
        f"private: epsilon {PLAN.epsilon():.2f}, delta {PLAN.delta:g}",
        {"jit": train_privately, "shard_map": train_privately_by_shard_map},
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)  # before JAX starts its devices
    with jax.default_device(eight_devices()[0]):
        main()
