"""Sharding rules: what they refuse, what they say of a tree, and where they put it.

Where an array ought to live is worked out here from the mesh's grid of devices, shard by shard.
"""

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.paths import dotted

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MIXED = (EXPLICIT, AUTO)
KINDS = [(AUTO, AUTO), (EXPLICIT, EXPLICIT), MIXED, MIXED[::-1]]
KIND_IDS = ["auto", "explicit", "explicit_auto", "auto_explicit"]

every_kind = pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)


def mesh_of(kind=(AUTO, AUTO), names=("data", "model"), shape=(4, 2)):
    return jax.make_mesh(shape, names, axis_types=tuple(kind))


MESH = mesh_of()
FSDP = mesh_of(names=("data", "fsdp"))


# The oracle


def raw(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def part_of(value, mesh, spec, device):
    """The part of an array that a device is to hold."""
    where = dict(zip(mesh.axis_names, np.argwhere(mesh.devices == device)[0], strict=True))
    for dimension, entry in enumerate(spec):
        index, count = 0, 1
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            index, count = index * mesh.shape[axis] + where[axis], count * mesh.shape[axis]
        value = np.split(value, count, axis=dimension)[index]
    return value


def assert_lives(x, mesh, spec, value):
    """Every device holds its part, bit for bit; where nothing lives does not matter."""
    assert x.dtype == value.dtype
    assert x.shape == value.shape
    if x.size == 0:
        return
    assert {shard.device for shard in x.addressable_shards} == set(mesh.devices.flat)
    for shard in x.addressable_shards:
        found, expected = raw(shard.data), part_of(raw(value), mesh, spec, shard.device)
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()


def by_path(tree):
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# Construction


def test_one_axis_needs_no_tuple():
    assert dp.ShardingRules(MESH, examples="data").examples == ("data",)


def test_lists_will_do(unchecked):
    rules = dp.ShardingRules(MESH, examples=["data"], params=[["a", P("model")], ("b", P())])
    assert rules.examples == ("data",)
    assert rules.params == (("a", P("model")), ("b", P()))
    assert hash(rules) == hash(dp.ShardingRules(MESH, params=rules.params))


def test_params_may_come_from_a_generator():
    assert dp.ShardingRules(MESH, params=((name, P()) for name in "ab")).params == (
        ("a", P()),
        ("b", P()),
    )


def test_defaults():
    rules = dp.ShardingRules(MESH)
    assert (rules.examples, rules.params, rules.accumulators) == (("data",), (), "params")


REFUSED = {
    "examples on an axis that the mesh lacks": (
        {"examples": ("data", "batch")},
        r"examples .*'batch'.* lacks.* 'data', 'model'",
    ),
    "examples on the empty axis": ({"examples": ""}, "examples .*''.* lacks"),
    "no example axes": ({"examples": ()}, r"examples names no axis.*examples=\('data',\)"),
    "examples on an axis twice": ({"examples": ("data", "data")}, "examples .* twice.*'data'"),
    "examples that are no axes": ({"examples": 3}, "examples must be .*, found 3"),
    "examples None": ({"examples": None}, "examples must be .*, found None"),
    "examples without an order": ({"examples": {"data", "model"}}, "examples must be .* tuple"),
    "examples as a spec": ({"examples": P("data")}, r"examples must be .* found P\('data'"),
    "an axis that is no name": ({"examples": (3,)}, "examples .* 3.* lacks"),
    "no mesh": ({"mesh": None}, r"mesh must be .*jax.make_mesh.* found None"),
    "an abstract mesh": (
        {"mesh": MESH.abstract_mesh},
        "mesh must be .* of type AbstractMesh",
    ),
    "rules for a mesh": (
        {"mesh": dp.ShardingRules(MESH)},
        "mesh must be .* of type ShardingRules",
    ),
    "a mesh with Manual axes": (
        {"mesh": mesh_of((AUTO, AxisType.Manual))},
        "Manual.* Auto or Explicit",
    ),
    "examples on axes of two types": (
        {"mesh": mesh_of(MIXED), "examples": ("model", "data")},
        "^examples .* one dimension over 'model', 'data', .* one type",
    ),
    "a dimension on axes of two types": (
        {"mesh": mesh_of(MIXED), "params": (("a", P(None, ("data", "model"))),)},
        "'a': P.* one dimension over 'data', 'model', .* one type",
    ),
    "accumulators elsewhere": (
        {"accumulators": "zero"},
        "accumulators must be one of 'params', 'examples', 'params_once', found 'zero'",
    ),
    "params None": ({"params": None}, "params holds pairs .* found None"),
    "params a mapping": ({"params": {"a": P()}}, r"params holds pairs .*\.items\(\)"),
    "params a string": ({"params": "ab"}, "params holds pairs .* found 'ab'"),
    "a pair without its tuple": ({"params": ("a", P())}, "pairs .* found 'a'.* comma"),
    "a pattern without a spec": ({"params": (("a",),)}, r"pairs .* found \('a',\)"),
    "a triple": ({"params": (("a", P(), 1),)}, r"pairs .* found \('a', P\(\), 1\)"),
    "strings for pairs": ({"params": ["ab"]}, "pairs .* found 'ab'"),
    "a pattern that is no string": ({"params": ((3, P()),)}, "pattern is a string .* not 3"),
    "an empty pattern": ({"params": (("", P()),)}, "pattern is a string .* not ''"),
    "a string for a spec": ({"params": (("a", "model"),)}, "'a' .*PartitionSpec, found 'model'"),
    "a tuple for a spec": ({"params": (("a", (None, "model")),)}, r"'a' .*Spec, found \(None"),
    "None for a spec": ({"params": (("a", None),)}, "'a' .*PartitionSpec, found None"),
    "a sharding for a spec": (
        {"params": (("a", NamedSharding(MESH, P())),)},
        "'a' .*PartitionSpec, found a value of type NamedSharding",
    ),
    "a spec with an axis that the mesh lacks": (
        {"params": (("a", P()), ("b", P(None, "tensor")))},
        r"'b': P\(None, 'tensor'\) .*'tensor'.* lacks.* 'data', 'model'",
    ),
    "a lacking axis in a tuple": ({"params": (("a", P(("model", "tensor"))),)}, "'tensor'.* lacks"),
    "a spec with an axis twice": ({"params": (("a", P("model", "model")),)}, "'a'.* twice"),
    "an axis twice in a tuple": ({"params": (("a", P(("model", "model"))),)}, "'a'.* twice"),
    "an unconstrained dimension": (
        {"params": (("a", P(None, P.UNCONSTRAINED)),)},
        "'a' .*UNCONSTRAINED.*each dimension",
    ),
    "a partial sum": ({"params": (("a", P(unreduced={"model"})),)}, "'a' .*partly reduced"),
    "a sum": ({"params": (("a", P(reduced={"model"})),)}, "'a' .*partly reduced"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_is_refused(unchecked, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        dp.ShardingRules(**{"mesh": MESH, **options})


def test_type_checkers_are_told(request):
    if not request.config.getoption("--check-types"):
        pytest.skip("annotations are checked with --check-types alone")
    with pytest.raises(jaxtyping.TypeCheckError):
        dp.ShardingRules(MESH, params=("a", P()))


# A value


def written_again(**options):
    """The same rules from other objects, none shared but the devices."""
    given = {
        "mesh": Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")),
        "examples": ["".join(["da", "ta"])],
        "params": [("**.weight", P(None, "model")), ("**.bias", P(("model",)))],
        "accumulators": "examples",
    }
    return dp.ShardingRules(**{**given, **options})


def test_equal_rules_hash_alike():
    assert written_again() == written_again()
    assert hash(written_again()) == hash(written_again())
    assert len({written_again(), written_again()}) == 1


DIFFERENT = {
    "mesh": Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model")),
    "axis types": Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(EXPLICIT,) * 2
    ),
    "devices": Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("data", "model")),
    "examples": {"examples": ("model",)},
    "order of examples": {"examples": ("data", "model")},
    "params": {"params": [("**.weight", P(None, "model"))]},
    "order of params": {"params": [("**.bias", P("model")), ("**.weight", P(None, "model"))]},
    "accumulators": {"accumulators": "params"},
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_other_rules_differ(change):
    options = {"mesh": change} if isinstance(change, Mesh) else change
    assert written_again(**options) != written_again()
    if "examples" in options:
        other = ("model", "data") if len(options["examples"]) == 2 else ("data", "model")
        assert written_again(**options) != written_again(examples=other)


def test_rules_do_not_change():
    rules = written_again()
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.accumulators = "params"
    assert dataclasses.replace(rules, accumulators="params") == written_again(accumulators="params")
    with pytest.raises(ValueError, match="lacks"):
        dataclasses.replace(rules, examples=("batch",))


def test_rules_hold_no_arrays():
    assert jax.tree.leaves(eqx.filter(written_again(), eqx.is_array)) == []


class Holder(eqx.Module):
    rules: dp.ShardingRules = eqx.field(static=True)
    weight: jax.Array


def test_a_static_field_recompiles_for_other_rules_alone():
    traced = []

    @eqx.filter_jit
    def double(holder):
        traced.append(holder.rules)
        return holder.weight * 2

    for _ in range(3):
        double(Holder(written_again(), jnp.ones(2)))
    assert len(traced) == 1
    double(Holder(written_again(accumulators="params"), jnp.ones(2)))
    assert len(traced) == 2


def test_a_static_argument_recompiles_for_other_rules_alone():
    traced = []

    def double(rules, x):
        traced.append(rules)
        return x * 2

    by_number, by_filter = jax.jit(double, static_argnums=0), eqx.filter_jit(double)
    for compiled in (by_number, by_filter):
        traced.clear()
        for _ in range(2):
            compiled(written_again(), jnp.ones(2))
        assert len(traced) == 1
        compiled(written_again(examples="model"), jnp.ones(2))
        assert len(traced) == 2


@pytest.mark.parametrize(
    ("mesh", "examples", "shards"),
    [
        (MESH, "data", 4),
        (MESH, "model", 2),
        (MESH, ("data", "model"), 8),
        (FSDP, ("fsdp", "data"), 8),
        (mesh_of((AUTO,), ("data",), (1,)), "data", 1),
    ],
)
def test_num_shards(mesh, examples, shards):
    assert dp.ShardingRules(mesh, examples).num_shards == shards


# Specs of a model


class Block(eqx.Module):
    query_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.query_proj = eqx.nn.Linear(8, 8, key=key)
        self.output_proj = eqx.nn.Linear(8, 8, use_bias=False, key=key)
        self.norm = eqx.nn.LayerNorm(8)


class Model(eqx.Module):
    blocks: list[Block]
    tables: dict[str, Any]
    absent: None
    width: float
    name: str
    activation: Any
    depth: int = eqx.field(static=True)

    def __init__(self):
        key = jax.random.key(0)
        self.blocks = [Block(key), Block(key)]
        self.tables = {
            "keys": jax.random.split(key, 4),
            "ids": np.arange(8, dtype=np.int32),
            "is_on": jnp.array([True, False]),
            "odd": jnp.array([np.nan, -0.0, np.inf, 1e-40], jnp.float32),
            "narrow": jnp.arange(8, dtype=jnp.bfloat16).reshape(4, 2),
            "empty": jnp.zeros((0, 4)),
            "scalar": jnp.float32(3),
        }
        self.absent, self.width, self.name, self.activation = None, 0.5, "model", jax.nn.relu
        self.depth = 2


PARAMS = (
    ("**.output_proj.weight", P(None, "model")),
    ("**.*_proj.weight", P("model", None)),
    ("blocks.1.**.bias", P("model")),
    ("tables.keys", P("data")),
    ("tables.ids", P(("data", "model"))),
    ("tables.narrow", P("data", "model")),
    ("tables.empty", P("model")),
)
EXPECTED = {
    "blocks.0.query_proj.weight": P("model", None),
    "blocks.0.query_proj.bias": P(),
    "blocks.0.output_proj.weight": P(None, "model"),
    "blocks.0.norm.weight": P(),
    "blocks.0.norm.bias": P(),
    "blocks.1.query_proj.weight": P("model", None),
    "blocks.1.query_proj.bias": P("model"),
    "blocks.1.output_proj.weight": P(None, "model"),
    "blocks.1.norm.weight": P(),
    "blocks.1.norm.bias": P("model"),
    "tables.keys": P("data"),
    "tables.ids": P(("data", "model")),
    "tables.is_on": P(),
    "tables.odd": P(),
    "tables.narrow": P("data", "model"),
    "tables.empty": P("model"),
    "tables.scalar": P(),
}


def placed_on(kind):
    """Rules for the model, and where its arrays are to live."""
    if len(set(kind)) == 1:
        return PARAMS, EXPECTED
    params = tuple(rule for rule in PARAMS if rule[0] != "tables.ids")
    return params, {**EXPECTED, "tables.ids": P()}


def rules_of(*params, mesh=MESH, **options):
    return dp.ShardingRules(mesh, params=params, **options)


def test_first_match_wins_and_the_rest_is_replicated():
    specs = rules_of(*PARAMS).specs(Model())
    assert by_path(specs) == EXPECTED


def test_specs_have_the_models_structure():
    model = Model()
    specs = rules_of(*PARAMS).specs(model)
    assert isinstance(specs, Model)
    assert specs.absent is specs.width is specs.name is specs.activation is None
    assert specs.blocks[0].output_proj.bias is None
    assert jax.tree.structure(specs) == jax.tree.structure(
        eqx.filter(model, eqx.is_array, replace=None)
    )


def test_specs_of_shapes_and_under_jit():
    rules, model = rules_of(*PARAMS), Model()
    assert by_path(rules.specs(eqx.filter_eval_shape(Model))) == EXPECTED
    found = []
    eqx.filter_jit(lambda model: found.append(by_path(rules.specs(model))))(model)
    assert found == [EXPECTED]


def test_order_decides():
    narrow, wide = ("a.b", P("model")), ("a.*", P("data"))
    model = {"a": {"b": jnp.ones(8), "c": jnp.ones(8)}}
    assert by_path(rules_of(narrow, wide).specs(model)) == {"a.b": P("model"), "a.c": P("data")}
    assert by_path(rules_of(wide, narrow).specs(model)) == {"a.b": P("data"), "a.c": P("data")}


def test_a_rule_in_front_of_all_others_is_no_error():
    specs = rules_of(("**", P()), ("a", P("model"))).specs({"a": jnp.ones(8)})
    assert by_path(specs) == {"a": P()}


def test_a_shadowed_spec_need_not_fit():
    specs = rules_of(("a", P()), ("**", P("model", "data"))).specs({"a": jnp.ones(3)})
    assert by_path(specs) == {"a": P()}


def test_a_pattern_that_matches_nothing():
    model = {"b": jnp.ones(8), "a": [jnp.ones(8), None, 3.0, jnp.ones(2)]}
    rules = rules_of(("a.0", P("model")), ("a.1", P()), ("a.2", P()), ("c", P()))
    message = r"ShardingRules\.params: 'a\.1', 'a\.2', 'c': no array.* are a\.0, a\.3, b\."
    with pytest.raises(ValueError, match=message):
        rules.specs(model)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({f"w{n}": jnp.ones(1) for n in range(8)}, r"arrays are w0, .*, w7\."),
        ({f"w{n}": jnp.ones(1) for n in range(9)}, r"arrays are w0, .*, w7 and 1 more\."),
        ({"a": 3, "b": None}, "no arrays"),
        (jnp.ones(1), "one array, which has an empty path"),
    ],
)
def test_the_error_tells_the_arrays_there_are(model, told):
    with pytest.raises(ValueError, match=f"'c': no array of the model matches.*{told}"):
        rules_of(("c", P())).specs(model)


@pytest.mark.parametrize("pattern", ["**", "*", "**.**"])
def test_a_model_that_is_one_array(pattern):
    assert rules_of((pattern, P("model"))).specs(jnp.ones(2)) == P("model")
    with pytest.raises(ValueError, match=r"gives the model.* the spec P\('model',\).*shape \(\)"):
        rules_of((pattern, P("model"))).specs(jnp.ones(()))


@pytest.mark.parametrize(
    ("spec", "shape"), [(P(None), ()), (P("model"), ()), (P(None, None, "model"), (4, 4))]
)
def test_a_spec_longer_than_the_rank(spec, shape):
    message = rf"'a\.\*' gives a\.b the spec {re.escape(str(spec))}.* {len(spec)} dim.*shape "
    with pytest.raises(ValueError, match=message + re.escape(str(shape))):
        rules_of(("a.*", spec)).specs({"a": {"b": jnp.ones(shape)}})


@pytest.mark.parametrize(
    ("spec", "shape", "dimension", "parts"),
    [
        (P("model"), (3,), 0, 2),
        (P(None, "data"), (4, 6), 1, 4),
        (P(("data", "model")), (12,), 0, 8),
        (P("model", "data"), (4, 2), 1, 4),
        (P("model"), (1, 2), 0, 2),
    ],
)
def test_a_dimension_that_does_not_divide(spec, shape, dimension, parts):
    message = (
        rf"'\*' spreads dimension {dimension} of a over .*, {parts} devices,.* length "
        rf"{shape[dimension]} \(shape {re.escape(str(shape))}, {re.escape(str(spec))}, mesh "
        r"{'data': 4, 'model': 2}\)"
    )
    with pytest.raises(ValueError, match=message):
        rules_of(("*", spec)).specs({"a": jnp.ones(shape)})


@pytest.mark.parametrize("method", ["shard", "shard_accumulators", "accumulator_specs"])
def test_what_does_not_fit_is_placed_nowhere(method):
    rules = rules_of(("a", P("model")))
    with pytest.raises(ValueError, match="which do not divide"):
        getattr(rules, method)({"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="dimensions; the array has shape"):
        getattr(rules, method)({"a": jnp.ones(())})


def test_a_pattern_may_speak_of_an_array_that_is_not_trained():
    rules, model = rules_of(("a", P("model")), ("b", P("data"))), {"a": jnp.ones(8), "b": None}
    assert by_path(rules.accumulator_specs(model)) == {"a": P("model")}
    assert_lives(rules.shard_accumulators(model)["a"], MESH, P("model"), np.ones(8, np.float32))
    with pytest.raises(ValueError, match="'b': no array"):
        rules.shard(model)


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        key = jax.random.key(0)
        layers = (eqx.nn.Embedding(8, 4, key=key), eqx.nn.Linear(4, 8, key=key))
        self.shared = eqx.nn.Shared(
            layers, lambda pair: pair[1].weight, lambda pair: pair[0].weight
        )


def test_a_shared_array_has_one_path():
    model = Tied()
    rules = rules_of(("shared.**.weight", P("model")))
    assert by_path(rules.specs(model)) == {
        "shared.pytree.0.weight": P("model"),
        "shared.pytree.1.bias": P(),
    }
    embedding, head = rules.shard(model).shared()
    assert head.weight is embedding.weight
    assert_lives(head.weight, MESH, P("model"), model.shared()[0].weight)
    with pytest.raises(ValueError, match=r"'shared\.pytree\.1\.weight': no array"):
        rules_of(("shared.pytree.1.weight", P())).specs(model)


def test_state():
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="ema")
    placed, placed_state = rules_of(("0.weight", P("model"))).shard((model, state))
    assert_lives(placed.weight, MESH, P("model"), model.weight)
    before, after = jax.tree.leaves(state), jax.tree.leaves(placed_state)
    assert len(before) == len(after) > 0
    for x, y in zip(before, after, strict=True):
        assert_lives(y, MESH, P(), x)
    run = jax.vmap(placed, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    assert run(jnp.ones((2, 4)), placed_state)[0].shape == (2, 4)


# Placing a model


def assert_is_placed(found, model, mesh, expected):
    before, after = by_path(model), by_path(found)
    assert list(before) == list(after)
    assert jax.tree.structure(found) == jax.tree.structure(model)
    for path, value in before.items():
        if path in expected:
            assert_lives(after[path], mesh, expected[path], value)
        else:
            assert after[path] is value


@every_kind
def test_shard_places_every_array_and_nothing_else(kind):
    mesh, model = mesh_of(kind), Model()
    params, expected = placed_on(kind)
    rules = rules_of(*params, mesh=mesh)
    placed = rules.shard(model)
    assert_is_placed(placed, model, mesh, expected)
    assert_is_placed(rules.shard(placed), model, mesh, expected)


@every_kind
def test_shard_takes_a_model_from_elsewhere(kind):
    model = Model()
    elsewhere = rules_of(("blocks.*.*.weight", P("data")), examples="model").shard(model)
    mesh, (params, expected) = mesh_of(kind), placed_on(kind)
    assert_is_placed(rules_of(*params, mesh=mesh).shard(elsewhere), model, mesh, expected)


@every_kind
@pytest.mark.parametrize("is_placed", [False, True])
def test_shard_under_jit(kind, is_placed):
    mesh, model = mesh_of(kind), Model()
    params, expected = placed_on(kind)
    rules = rules_of(*params, mesh=mesh)
    given = rules.shard(model) if is_placed else model
    with jax.set_mesh(mesh):
        found = eqx.filter_jit(rules.shard)(given)
    assert_is_placed(found, model, mesh, expected)


@every_kind
def test_an_updated_model_stays_where_it_was(kind):
    mesh = mesh_of(kind)
    rules = rules_of(("w", P("model", "data")), mesh=mesh)
    w, update = np.ones((8, 8), np.float32), np.full((8, 8), 0.5, np.float32)

    @jax.jit
    def step(model, update):
        return rules.shard(jax.tree.map(jnp.add, rules.shard(model), rules.shard({"w": update})))

    with jax.set_mesh(mesh):
        assert_lives(step({"w": w}, update)["w"], mesh, P("model", "data"), w + update)


@every_kind
@pytest.mark.parametrize("constant", [np.ones((8, 8)), jnp.ones((8, 8))], ids=["numpy", "jax"])
def test_a_constant_under_jit(kind, constant):
    mesh = mesh_of(kind)
    rules = rules_of(("w", P("model")), mesh=mesh)
    with jax.set_mesh(mesh):
        model, batch = jax.jit(
            lambda: (rules.shard({"w": constant}), rules.shard_batch((constant,)))
        )()
    assert_lives(model["w"], mesh, P("model"), np.ones((8, 8), np.float32))
    assert_lives(batch[0], mesh, P("data"), np.ones((8, 8), np.float32))


def test_shard_leaves_shapes_alone():
    shapes = eqx.filter_eval_shape(Model)
    assert_is_placed(rules_of(*PARAMS).shard(shapes), shapes, MESH, {})


def test_shard_is_differentiable():
    rules = rules_of(("w", P("model")))
    gradient = jax.jit(jax.grad(lambda model: jnp.sum(rules.shard(model)["w"] ** 2)))
    assert np.array_equal(gradient({"w": jnp.arange(4.0)})["w"], 2 * np.arange(4))


# Placing a batch


BATCH = {
    "x": np.arange(48, dtype=np.float32).reshape(16, 3),
    "y": jnp.arange(16, dtype=jnp.int8),
    "narrow": jnp.arange(32, dtype=jnp.bfloat16).reshape(16, 2),
    "key": jax.random.split(jax.random.key(3), 16),
    "mask": np.arange(16) % 3 == 0,
    "more": [None, (np.full((16, 1, 2), np.nan, np.float32),)],
}


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        *((kind, ("data",)) for kind in KINDS),
        *((kind, ("data", "fsdp")) for kind in KINDS[:2]),
        *((kind, ("fsdp", "data")) for kind in KINDS[:2]),
    ],
)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_batch_is_spread_along_its_leading_axes(kind, examples, is_jitted):
    mesh = mesh_of(kind, ("data", "fsdp"))
    rules = dp.ShardingRules(mesh, examples)
    with jax.set_mesh(mesh):
        found = (jax.jit if is_jitted else lambda f: f)(rules.shard_batch)(BATCH)
        again = rules.shard_batch(found)
    assert jax.tree.structure(found) == jax.tree.structure(BATCH)
    for x, y, value in zip(*map(jax.tree.leaves, (found, again, BATCH)), strict=True):
        assert_lives(x, mesh, P(examples), value)
        assert_lives(y, mesh, P(examples), value)


@every_kind
@pytest.mark.parametrize("is_jitted", [False, True])
def test_an_empty_batch(kind, is_jitted):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        shard_batch = dp.ShardingRules(mesh).shard_batch
        found = (jax.jit if is_jitted else lambda f: f)(shard_batch)(np.ones((0, 3), np.float32))
    assert found.shape == (0, 3)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (3, "is no array of numbers but of type int"),
        (2.5, "is no array of numbers but of type float"),
        ("text", "is no array of numbers but of type str"),
        (jax.ShapeDtypeStruct((8,), jnp.float32), "is no array .* ShapeDtypeStruct"),
        (np.array(["a"] * 8), "is no array of numbers but of type <U1"),
        (np.array([None] * 8), "is no array of numbers but of type object"),
        (np.arange(8).astype("datetime64[D]"), "is no array of numbers but of type datetime64"),
        (np.float32(3), "is a scalar: it has no leading axis"),
        (jnp.ones(()), "is a scalar: it has no leading axis"),
        (np.ones(6), "has 6 examples, .* 4 devices .* axis 'data'"),
        (jax.random.split(jax.random.key(0), 6), "has 6 examples, .* 4 devices"),
    ],
)
def test_what_is_no_batch(leaf, message):
    with pytest.raises(ValueError, match=rf"^batch\.x\.1 {message}"):
        dp.ShardingRules(MESH).shard_batch({"a": np.ones(8), "x": (np.ones(8), leaf)})


@pytest.mark.parametrize("examples", ["data", "model", ("data", "model")])
@pytest.mark.parametrize("num_examples", [1, 9, 21])
def test_the_pad_to_that_is_named_does(examples, num_examples):
    rules = dp.ShardingRules(MESH, examples)
    messages = []
    for refuse in (
        lambda: rules.shard_batch(np.ones((num_examples, 2))),
        lambda: jax.jit(rules.shard_batch)(np.ones((num_examples, 2))),
        lambda: rules.check_examples(num_examples),
    ):
        with pytest.raises(ValueError, match="is_padding_example") as error:
            refuse()
        messages.append(str(error.value))
    for message in messages:
        assert all(repr(axis) in message for axis in rules.examples)
        (pad_to,) = {int(number) for number in re.findall(r"pad_to=(\d+)", message)}
        padded = int(re.search(r"here (\d+),", message)[1])
        assert 0 <= padded - num_examples < rules.num_shards
        rules.check_examples(padded)
        sampler = dp.PoissonSampler(100, 0.1, seed=0, pad_to=pad_to)
        rules.shard_batch(sampler.batch(0))


@pytest.mark.parametrize("num_examples", [0, 8, 16])
def test_what_divides_is_let_through(num_examples):
    assert dp.ShardingRules(MESH, ("data", "model")).check_examples(num_examples) is None


def test_a_processs_part_of_a_batch(monkeypatch):
    # Of two processes this one holds every device, so its part is the whole.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = dp.ShardingRules(MESH).shard_batch(BATCH)
    for x, value in zip(*map(jax.tree.leaves, (found, BATCH)), strict=True):
        assert_lives(x, MESH, P("data"), value)
    # With two of the four shards here, a part has to divide over two and the whole over four.
    monkeypatch.setattr(dp.ShardingRules, "local_shards", lambda rules: 2)
    dp.ShardingRules(MESH).shard_batch(np.ones(8))
    with pytest.raises(ValueError, match=r"has 7 examples, .*pad_to=2\)"):
        dp.ShardingRules(MESH).shard_batch(np.ones(7))
    with pytest.raises(ValueError, match=r"has 6 examples, .*pad_to=4\)"):
        jax.jit(dp.ShardingRules(MESH).shard_batch)(np.ones(6))


# Accumulators


ZERO = [
    # where the parameter lives, its shape, where its accumulator lives (data 4, model 2)
    (P(), (8, 4), P("data", None)),
    (P(), (6, 4), P(None, "data")),
    (P(), (6, 2), P()),
    (P(), (), P()),
    (P(), (0, 4), P(None, "data")),
    (P(), (2, 3, 4), P(None, None, "data")),
    (P("model"), (8, 4), P("model", "data")),
    (P("model", None), (8, 4), P("model", "data")),
    (P(None, "model"), (8, 4), P("data", "model")),
    (P(None, "model"), (6, 8), P(None, "model")),
    (P("model"), (8,), P("model")),
    (P("data"), (8, 4), P("data")),
    (P(("model", "data")), (8, 4), P(("model", "data"))),
]


@pytest.mark.parametrize(("spec", "shape", "expected"), ZERO)
@every_kind
def test_an_accumulator_is_spread_over_examples(kind, spec, shape, expected):
    mesh = mesh_of(kind)
    if len(set(kind)) > 1 and any(isinstance(entry, tuple) for entry in spec):
        return  # refused
    rules = rules_of(("w", spec), mesh=mesh, accumulators="examples")
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert_same(rules.accumulator_spec(spec, shape), expected)
    assert_same(rules.accumulator_specs({"w": value})["w"], expected)
    assert_lives(rules.shard_accumulators({"w": value})["w"], mesh, expected, value)
    with jax.set_mesh(mesh):
        under_jit = jax.jit(rules.shard_accumulators)({"w": value})["w"]
    assert_lives(under_jit, mesh, expected, value)


def assert_same(found, expected):
    """Specs name the same axes in each dimension, whether written as a tuple or not."""
    assert NamedSharding(MESH, found).is_equivalent_to(NamedSharding(MESH, expected), 3)


@pytest.mark.parametrize(("spec", "shape"), [case[:2] for case in ZERO])
def test_an_accumulator_lives_with_its_parameter(spec, shape):
    rules, value = rules_of(("w", spec)), np.zeros(shape, np.float32)
    assert rules.accumulator_spec(spec, shape) == spec
    assert_lives(rules.shard_accumulators({"w": value})["w"], MESH, spec, value)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(), (16, 3), P(("data", "fsdp"))),
        (P(), (4, 8), P(None, ("data", "fsdp"))),
        (P(), (4, 4), P()),
        (P("fsdp"), (16, 16), P("fsdp")),
    ],
)
def test_several_example_axes_go_together(spec, shape, expected):
    rules = dp.ShardingRules(FSDP, ("data", "fsdp"), [("w", spec)], "examples")
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert_lives(rules.shard_accumulators({"w": value})["w"], FSDP, expected, value)


@every_kind
def test_the_state_of_adam_lives_with_the_accumulators(kind):
    mesh = mesh_of(kind)
    rules = rules_of(("**.weight", P("model", None)), mesh=mesh, accumulators="examples")
    params = eqx.filter(eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    params = eqx.tree_at(lambda tree: tree.layers[1].weight, params, jnp.ones((2, 8)))
    expected = {
        "layers.0.weight": P("model", "data"),
        "layers.0.bias": P("data"),
        "layers.1.weight": P("model", "data"),
        "layers.1.bias": P(),
    }
    with jax.set_mesh(mesh):
        state = optax.adam(1e-3).init(rules.shard_accumulators(params))
    for moments in (state[0].mu, state[0].nu):
        assert set(by_path(moments)) == set(expected)
        for path, x in by_path(moments).items():
            assert_lives(x, mesh, expected[path], np.zeros(x.shape, np.float32))
