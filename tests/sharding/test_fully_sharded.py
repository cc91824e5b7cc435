"""Parameters spread over the example axes: gradients are one device's, and no device holds a whole.

The oracle is the clipped gradient without a mesh, which knows nothing of shards.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.gradients import factored
from tests import models
from tests.sharding import fully_sharded_net
from tests.sharding.fully_sharded_net import SPECS, WIDTH, batch_of, loss, net, rules_of
from tests.sharding.losses import assert_like_one_device
from tests.tiers import METHODS, by_method, curated

SOME = np.arange(16) % 5 == 0


# Parameters that a shard's own way does not fit: right all the same.


def tied(model, tokens, targets):
    x = jnp.tanh(model.embedding[tokens] @ model.head)
    return jnp.sum((model.embedding @ model.head @ x.T) ** 2) + jnp.sum(targets**2)


def derived(model, tokens, targets):
    """Normed and masked weights, a penalty, a parameter that is the loss itself."""
    x = model.embedding[tokens]
    head = model.head / jnp.linalg.norm(model.head, axis=0)
    up = jnp.where(jnp.arange(2 * WIDTH) % 3 > 0, model.up[0], 0)
    x = jnp.tanh(x @ up) @ model.down[1].reshape(WIDTH, -1).T @ head
    return jnp.sum((x - targets) ** 2) + jnp.sum(model.bias**2) + model.scale[0, 0]


def recurrent(model, tokens, targets):
    """The same weights at every step of a scan, which stands in another scan."""

    def over_time(h, x):
        return jnp.tanh(h @ model.up[0, :, :WIDTH] + x), None

    def over_layers(x, its):
        weight, bias = its
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ weight + x), None), x[0], x)
        return jnp.tanh(x @ weight + bias[:WIDTH]) + h, None

    x = model.embedding[tokens]
    h, _ = jax.lax.scan(over_time, x[0], x)
    x, _ = jax.lax.scan(over_layers, x, (model.down[:, :, 0], model.bias))
    return jnp.sum((x @ model.head + h @ model.head - targets) ** 2)


def branching(model, tokens, targets):
    """A branch and a loop whose length each example has of its own."""
    x = model.embedding[tokens]
    x = jax.lax.cond(tokens[0] % 2 == 0, lambda x: x @ model.up[0], lambda x: x @ model.up[1], x)
    x = jax.lax.while_loop(lambda x: jnp.sum(x**2) > 3, lambda x: x / 2, jax.lax.stop_gradient(x))
    return jnp.sum((x @ model.down[0].reshape(WIDTH, -1).T @ model.head - targets) ** 2)


def wrapped(model, tokens, targets):
    """A policy of its own for what is saved, jit, a scan backwards and unrolled, its slices."""

    def body(x, its):
        up, bias = its
        return jnp.tanh(jax.jit(jnp.matmul)(x, up) + bias)[:, :WIDTH], up[0, 0]

    body = jax.checkpoint(body, policy=jax.checkpoint_policies.everything_saveable)
    x = model.embedding[tokens]
    x, seen = jax.lax.scan(body, x, (model.up, model.bias), reverse=True, unroll=2)
    return jnp.sum((x @ model.head - targets) ** 2) + jnp.sum(seen)


REPLICAS = {"axes": {"replica": 2, "data": 4}, "examples": ("replica", "data")}
AHEAD = (("up", P(None, "data", "model")), ("down", P(None, ("data", "model"))), *SPECS)
ON_BOTH = (("up", P(None, "data", "fsdp")), ("head", P(("fsdp", "data"))), *SPECS)
MESHES = {
    "explicit": lambda: rules_of("explicit"),
    "hybrid": lambda: rules_of(**REPLICAS),
    "hybrid explicit": lambda: rules_of("explicit", **REPLICAS),
    "two axes": lambda: rules_of(
        axes={"fsdp": 2, "data": 4}, examples=("fsdp", "data"), params=ON_BOTH
    ),
    "with a model axis": lambda: rules_of(axes={"data": 4, "model": 2}, params=AHEAD),
    "of one device": lambda: rules_of(axes={"data": 1, "model": 2}, params=AHEAD),
    "once a step": lambda: rules_of(accumulators="params_once"),
    "sums of the rest as well": lambda: rules_of(accumulators="examples"),
}


@pytest.mark.parametrize(("name", "method"), by_method(MESHES, book_keeping=(), every=5))
def test_on_any_mesh(name, method):
    """Some devices have padding alone, and wait for nobody."""
    options = {"padding": np.arange(16) >= 11, "method": method, "microbatch_size": 1}
    assert_like_one_device(loss, net(), batch_of(16), MESHES[name](), **options)


NOTHING = jax.tree.map(lambda _: False, net())
FROZEN = eqx.tree_at(lambda model: (model.bias, model.head), NOTHING, (True, True))
OPTIONS = {
    "plain": {"padding": SOME},
    "microbatches": {"padding": SOME, "microbatch_size": 1},
    "without remat": {"model": net(remat=False)},
    "frozen": {"filter_spec": FROZEN, "microbatch_size": 1},
    # Were each device to go by its own number of microbatches, those that gather would wait.
    "most devices have padding alone": {"padding": np.arange(16) > 3, "microbatch_size": 1},
    "one example": {"padding": np.arange(16) != 7, "microbatch_size": 1},
    "padding alone": {"padding": np.ones(16, bool), "microbatch_size": 1},
    "bfloat16": {"policy": dp.load_policy("bfloat16"), "rtol": 3e-2},
    "mixed_float16": {"policy": dp.load_policy("mixed_float16"), "rtol": 3e-2},
    **{use.__name__: {"fun": use} for use in (tied, derived, recurrent, branching, wrapped)},
}


@pytest.mark.parametrize(
    ("name", "method"), by_method(OPTIONS, book_keeping=(), ghost=("plain",), every=4)
)
def test_gradients_are_those_of_one_device(name, method):
    options = {"fun": loss, "model": net(), "batch": batch_of(16), "rules": rules_of()}
    assert_like_one_device(**options | {"method": method} | OPTIONS[name])


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("method", "params"),
    curated([("book_keeping", ()), ("ghost", SPECS), ("per_example", SPECS)], []),
)
def test_an_example_that_is_not_finite_changes_no_others(method, params):
    rules, (tokens, targets) = rules_of(params=params), batch_of(16)
    poisoned = targets.copy()
    poisoned[5, 3] = np.nan
    options = {"l2_clip_norm": 0.7, "sharding": rules, "method": method, "microbatch_size": 1}
    grad_fn = eqx.filter_jit(dp.filter_clipped_grad(loss, **options))
    with jax.set_mesh(rules.mesh):
        model = rules.shard(net())
        found = grad_fn(model, tokens, poisoned, is_padding_example=np.zeros(16, bool))
        expected = grad_fn(model, tokens, targets, is_padding_example=np.arange(16) == 5)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", ["_formed", "measured", "likely_norm"])  # measured: of lookups
def test_what_is_computed_again_of_a_slice_is_measured_again(name, monkeypatch):
    """The second time it may be rounded otherwise: here it is at least half as long again."""
    seen, is_likely = [], name == "likely_norm"
    name, steps = ("_formed", 2) if is_likely else (name, 40)
    original = getattr(factored, name)

    def other(first, second):
        seen.append(first)
        factor = 1.5 if is_likely or len(seen) > 1 else 1
        grown = lambda x: x * factor if eqx.is_inexact_array(x) else x  # noqa: E731
        return original(first, jax.tree.map(grown, second))

    def fun(model, x, g):
        used = lambda w: x @ w if name == "_formed" else w[x[:, 0].astype(int)]  # noqa: E731
        return jnp.sum(jax.lax.map(lambda w: jnp.sum(used(w) * g), model["w"]))

    monkeypatch.setattr(factored, "is_cpu", lambda: not is_likely)  # it is for accelerators
    monkeypatch.setattr(factored, name, other)
    rules, rng = rules_of(params=(("w", P(None, None, "data")),)), np.random.default_rng(0)
    x, g = np.float32(rng.integers(0, 3, (8, steps, 3))), np.float32(rng.normal(size=(8, steps, 8)))
    grad_fn = dp.filter_clipped_grad(fun, l2_clip_norm=0.7, sharding=rules, method="book_keeping")
    with jax.set_mesh(rules.mesh):
        model = rules.shard({"w": jnp.zeros((2, 3, 8))})
        found = eqx.filter_jit(grad_fn)(model, x, g, is_padding_example=np.arange(8) != 0)
    assert len(seen) == (1 if is_likely else 2)
    assert 0.69 < np.linalg.norm(found["w"]) <= 0.7


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_adapters_aux_and_random_keys(method):
    """LoRA on frozen layers, a parameter among the results, noise of each example's own."""

    def fun(model, tokens, targets, key):
        frozen, low, high = model
        x = frozen.embedding[tokens] + jax.random.normal(key, (fully_sharded_net.TIME, WIDTH))

        @jax.checkpoint
        def body(x, its):
            up, low, high = its
            return jnp.tanh((x @ up + x @ low @ high)[:, :WIDTH]), None

        x, _ = jax.lax.scan(body, x, (frozen.up, low, high))
        return jnp.sum((x @ frozen.head - targets) ** 2), frozen.up[0]

    keys = jax.random.split(jax.random.key(1))
    low = models.normal(keys[0], (fully_sharded_net.LAYERS, WIDTH, 2))
    model = net(), low, models.normal(keys[1], (fully_sharded_net.LAYERS, 2, 2 * WIDTH))
    specs = tuple((f"0.{pattern}", spec) for pattern, spec in SPECS)
    rules = rules_of(params=(("1", P(None, "data")), ("2", P(None, None, "data")), *specs))
    options = {"method": method, "microbatch_size": 1, "filter_spec": (NOTHING, True, True)}
    given = {"key": jax.random.key(5), "has_aux": True, **options}
    assert_like_one_device(fun, model, batch_of(8), rules, **given)
