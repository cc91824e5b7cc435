"""Sharding rules: what they refuse, what they say of a tree, and where they put it.

Where an array ought to live is what JAX says of its spec, device by device.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.paths import dotted

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MIXED = (EXPLICIT, AUTO)
KINDS = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "explicit_auto": MIXED}

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def mesh_of(kind=(AUTO, AUTO), names=("data", "model"), shape=(4, 2)):
    return jax.make_mesh(shape, names, axis_types=tuple(kind))


MESH = mesh_of()


def raw(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_lives(x, mesh, spec, value):
    """Every device holds its part, bit for bit; where nothing lives does not matter."""
    assert (x.dtype, x.shape) == (value.dtype, value.shape)
    if x.size == 0:
        return
    places = NamedSharding(mesh, spec).devices_indices_map(value.shape)
    assert {shard.device for shard in x.addressable_shards} == set(mesh.devices.flat)
    for shard in x.addressable_shards:
        found, expected = raw(shard.data), raw(value)[places[shard.device]]
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()


def by_path(tree):
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# A value


def rules_of(*params, mesh=MESH, **options):
    return dp.ShardingRules(mesh, params=params, **options)


PAIRS = "pairs of a path pattern.*PartitionSpec; found"
REFUSED = {
    "an axis that the mesh lacks": ({"examples": ("data", "batch")}, "'batch'.* lacks.*'data'"),
    "no example axes": ({"examples": ()}, r"examples names no axis.*examples=\('data',\)"),
    "Manual axes": ({"mesh": mesh_of((AUTO, AxisType.Manual))}, "Manual.* Auto or Explicit"),
    "examples on two types": (
        {"mesh": mesh_of(MIXED), "examples": ("model", "data")},
        "examples .* one dimension over .*'model', 'data', .* one type",
    ),
    "a dimension on two types": (
        {"mesh": mesh_of(MIXED), "params": (("a", P(None, ("data", "model"))),)},
        "'a': P.* one dimension over .*'data', 'model', .* one type",
    ),
    "accumulators": ({"accumulators": "zero"}, "one of 'params', 'examples', 'params_once'"),
    "a pair without its tuple": ({"params": ("a", P())}, f"{PAIRS} 'a'.* comma"),
    "a lacking axis": (
        {"params": (("a", P()), ("b", P(None, ("model", "tensor"))))},
        "'b': P.*'tensor'.* lacks.* 'data', 'model'",
    ),
    "a spec with an axis twice": ({"params": (("a", P("model", "model")),)}, "'a'.* twice"),
    "an open dimension": ({"params": (("a", P(P.UNCONSTRAINED)),)}, "'a'.*each dimension"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_is_refused(unchecked, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        dp.ShardingRules(**{"mesh": MESH, **options})


# Specs of a model

MODEL = {
    "blocks": [eqx.nn.Linear(8, 8, key=jax.random.key(i)) for i in range(2)],
    "keys": jax.random.split(jax.random.key(0), 4),
    "ids": np.arange(8, dtype=np.int32),
    "odd": jnp.array([np.nan, -0.0, np.inf, 1e-40], jnp.float32),
    "narrow": jnp.arange(8, dtype=jnp.bfloat16).reshape(4, 2),
    "empty": jnp.zeros((0, 4)),
    "absent": None,
    "width": 0.5,
}
PARAMS = (
    ("blocks.1.bias", P("model")),
    ("**.weight", P("model", None)),
    ("**.bias", P()),
    ("keys", P("data")),
    ("narrow", P("data", "model")),
    ("empty", P("model")),
)
EXPECTED = {
    "blocks.0.weight": P("model", None),
    "blocks.0.bias": P(),
    "blocks.1.weight": P("model", None),
    "blocks.1.bias": P("model"),
    "keys": P("data"),
    "ids": P(),
    "odd": P(),
    "narrow": P("data", "model"),
    "empty": P("model"),
}


def test_the_first_match_wins_and_the_rest_is_replicated():
    assert by_path(rules_of(*PARAMS).specs(MODEL)) == EXPECTED
    assert by_path(rules_of(*PARAMS).specs(eqx.filter_eval_shape(lambda: MODEL))) == EXPECTED
    shadowed = rules_of(("a", P()), ("**", P("model", "data"))).specs({"a": jnp.ones(3)})
    assert by_path(shadowed) == {"a": P()}


UNFIT = [
    ("c", P(), {"a": jnp.ones(2)}, r"'c': no array of the model matches.* are 'a'\."),
    ("**", P("model"), jnp.ones(()), "gives the model.* which has 1 dimensions"),
    ("a.*", P(None, None, "model"), {"a": {"b": jnp.ones((4, 4))}}, r"a\.b .*3 dimensions"),
    ("*", P("data"), {"a": jnp.ones(6)}, r"a of shape \(6,\).* 4 devices of the axis 'data' do"),
    ("*", P(("data", "model")), {"a": jnp.ones(12)}, "8 devices.*dimension 0.*'data': 4"),
]


@pytest.mark.parametrize(("pattern", "spec", "model", "message"), UNFIT)
def test_a_rule_that_does_not_fit(pattern, spec, model, message):
    for method in ("specs", "shard"):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            getattr(rules_of((pattern, spec)), method)(model)


# Placing


def assert_is_placed(found, mesh):
    assert jax.tree.structure(found) == jax.tree.structure(MODEL)
    after = by_path(found)
    for path, value in by_path(MODEL).items():
        if path in EXPECTED:
            assert_lives(after[path], mesh, EXPECTED[path], value)
        else:
            assert after[path] is value


@every_kind
def test_a_model_is_placed(kind):
    mesh = mesh_of(kind)
    rules = rules_of(*PARAMS, mesh=mesh)
    placed = rules.shard(MODEL)
    elsewhere = rules_of(("blocks.*.weight", P("data")), examples="model").shard(MODEL)
    with jax.set_mesh(mesh):
        compiled = [eqx.filter_jit(rules.shard)(model) for model in (MODEL, placed)]
    for found in (placed, rules.shard(placed), rules.shard(elsewhere), *compiled):
        assert_is_placed(found, mesh)


BATCH = {
    "x": np.arange(48, dtype=np.float32).reshape(16, 3),
    "narrow": jnp.arange(32, dtype=jnp.bfloat16).reshape(16, 2),
    "key": jax.random.split(jax.random.key(3), 16),
    "mask": np.arange(16) % 3 == 0,
    "more": [None, (np.full((16, 1, 2), np.nan, np.float32),)],
}


@every_kind
@pytest.mark.parametrize("examples", [("data",), ("fsdp", "data")])
def test_a_batch_is_spread_along_its_leading_axes(kind, examples):
    if len(set(kind)) > 1:
        examples = examples[-1:]
    mesh = mesh_of(kind, ("data", "fsdp"))
    rules = dp.ShardingRules(mesh, examples)
    with jax.set_mesh(mesh):
        found = rules.shard_batch(BATCH)
        compiled = jax.jit(rules.shard_batch)(BATCH)
        stacked = rules.shard_batch({"x": np.ones((3, 8))}, stacked=True)["x"]
    for one in (found, compiled):
        for x, value in zip(*map(jax.tree.leaves, (one, BATCH)), strict=True):
            assert_lives(x, mesh, P(examples), value)
    assert_lives(stacked, mesh, P(None, examples), np.ones((3, 8), np.float32))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (3, "is of type int"),
        (np.array(["a"] * 8), "is an array of <U1"),
        (np.float32(3), r"is an array of float32 with shape \(\)"),
        (np.ones(6), "has 6 examples, .* 4 devices .* axis 'data'"),
        (jax.random.split(jax.random.key(0), 6), "has 6 examples, .* 4 devices"),
    ],
)
def test_what_is_no_batch(leaf, message):
    with pytest.raises(ValueError, match=rf"^batch\.x\.1 {message}"):
        dp.ShardingRules(MESH).shard_batch({"a": np.ones(8), "x": (np.ones(8), leaf)})


@pytest.mark.parametrize(("examples", "num_examples"), [("data", 9), (("data", "model"), 21)])
def test_the_pad_to_that_is_named_does(examples, num_examples):
    rules = dp.ShardingRules(MESH, examples)
    for refuse in (
        lambda: rules.shard_batch(np.ones((num_examples, 2))),
        lambda: rules.check_examples(num_examples),
    ):
        with pytest.raises(ValueError, match="is_padding_example") as error:
            refuse()
        numbers = re.search(r"(?s)pad_to=(\d+).*here (\d+),", str(error.value)).groups()
        pad_to, padded = map(int, numbers)
        assert 0 <= padded - num_examples < rules.num_shards
        rules.check_examples(padded)
        rules.shard_batch(dp.PoissonSampler(100, 0.1, seed=0, pad_to=pad_to).batch(0))


# Accumulators

ZERO = [
    # where the parameter lives, its shape, where its accumulator lives (data 4, model 2)
    (P(), (8, 4), P("data", None)),
    (P(), (6, 4), P(None, "data")),
    (P(), (6, 2), P()),
    (P(), (0, 4), P(None, "data")),
    (P("model"), (8, 4), P("model", "data")),
    (P(None, "model"), (6, 8), P(None, "model")),
    (P("data"), (8, 4), P("data")),
]


@pytest.mark.parametrize(("spec", "shape", "expected"), ZERO)
@every_kind
def test_an_accumulator_is_spread_over_examples(kind, spec, shape, expected):
    mesh = mesh_of(kind)
    rules = rules_of(("w", spec), mesh=mesh, accumulators="examples")
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = rules.accumulator_specs({"w": value, "frozen": None})["w"]
    assert NamedSharding(MESH, found).is_equivalent_to(NamedSharding(MESH, expected), 3)
    assert_lives(rules.shard_accumulators({"w": value})["w"], mesh, expected, value)
    with_parameter = rules_of(("w", spec), mesh=mesh)
    assert with_parameter.accumulator_spec(spec, shape) == spec
