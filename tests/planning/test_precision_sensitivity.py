"""What narrow layers cost: held against the oracle, and the policy that is recommended."""

import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.planning.clipped_errors import Costs
from eqx_dp.planning.layers import MOST_LAYERS, REST, Layer, Level, assembled, layers_of
from eqx_dp.planning.recommended import recommended
from eqx_dp.planning.sensitivity_table import LayerError
from tests import models, oracle

POLICIES = ("mixed_bfloat16", "mixed_float8")
FLOAT8 = "matmul=float8_e4m3fn:float8_e5m2,module:first=bf16,module:**=f32:wide"
WIDE = "module:first=f32,module:hard=f32"


class Cancelling(eqx.Module):
    """A layer whose values lie far apart: what it adds is lost in bfloat16, beside 1,000."""

    weight: jax.Array

    def __call__(self, x):
        return (1000 + self.weight @ x) - 1000


class Net(eqx.Module):
    first: eqx.nn.Linear
    hard: Cancelling

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(4, 6, key=keys[0])
        self.hard = Cancelling(jax.random.normal(keys[1], (3, 6)))

    def __call__(self, x):
        return self.hard(jnp.tanh(self.first(x)))


def loss(model, x, label):
    return models.cross_entropy(model(x), label)


MODEL = Net(jax.random.key(0))
DRAWS = np.random.default_rng(0)
BATCH = DRAWS.normal(size=(8, 4)).astype(np.float32), np.arange(8) % 3
GRAD_FN = dp.filter_clipped_grad(loss, l2_clip_norm=0.7)


@pytest.fixture(scope="module")
def found():
    return dp.precision_sensitivity(GRAD_FN, MODEL, *BATCH)


@pytest.fixture(scope="module")
def truth():
    return oracle.clipped_gradients(loss, MODEL, *BATCH, l2_clip_norm=0.7).grads


def error_of(policy, truth):
    """Of a policy that is written by hand, or loaded, against the oracle."""
    if isinstance(policy, str):
        policy = dp.parse_policy(policy)
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=0.7, policy=policy)
    grads = eqx.filter_jit(grad_fn)(MODEL, *BATCH)
    return grads, oracle.relative_error(grads, truth)


# Errors.


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policy", "layer", "by_hand"),
    [
        ("mixed_bfloat16", "first", "p=f32,c=f32,o=f32,module:first=bf16"),
        ("mixed_bfloat16", REST, f"p=f32,c=bf16,o=f32,{WIDE}"),
        ("mixed_float8", "first", f"p=f32,c=f32,o=f32,{FLOAT8}"),
    ],
)  # fmt: skip
def test_an_error_is_that_of_one_layer_against_the_oracle(policy, layer, by_hand, found, truth):
    row = next(row for row in found.rows if (row.policy, row.layer) == (policy, layer))
    grads, error = error_of(by_hand, truth)
    assert error > 1e-3
    assert row.error == pytest.approx(error, rel=1e-2)
    if layer == REST:
        assert math.isnan(row.own_error)
        assert row.size == 0
        return
    own = oracle.relative_error(getattr(grads, layer), getattr(truth, layer))
    assert row.own_error == pytest.approx(own, rel=1e-2)
    assert row.size == sum(x.size for x in jax.tree.leaves(getattr(MODEL, layer)))


@pytest.mark.slow
def test_errors_of_whole_policies_and_of_each_part(found, truth):
    assert [name for name, _ in found.errors] == [*POLICIES]
    for name, error in found.errors:
        grads, expected = error_of(dp.load_policy(name), truth)
        assert error == pytest.approx(expected, rel=1e-2)
        for layer in ("first", "hard"):
            row = next(row for row in found.rows if (row.policy, row.layer) == (name, layer))
            own = oracle.relative_error(getattr(grads, layer), getattr(truth, layer))
            assert row.own_error_of_all == pytest.approx(own, rel=1e-2)


def test_the_layer_of_great_dynamic_range_costs_most(found):
    for policy in POLICIES:
        rows = [row for row in found.rows if row.policy == policy]
        assert max(rows, key=lambda row: row.error).layer == "hard"
    assert dict(found.formats)["hard"] == "float32"


# What is recommended.


def test_what_is_recommended_is_within_the_tolerance_and_loads_again(found, truth, tmp_path):
    assert found.error <= found.tolerance
    _, error = error_of(found.recommended, truth)
    assert error == pytest.approx(found.error, rel=1e-2)
    file = tmp_path / "recommended.toml"
    file.write_text(found.to_toml())
    again = dp.load_policy(file)
    assert again == found.recommended
    assert dp.parse_policy(found.recommended.to_json()) == again
    assert again.matmul == dp.load_policy("mixed_float8").matmul
    governed = {
        row.path: (str(row.compute), str(row.matmul)) for row in dp.describe(MODEL, again).rows
    }
    assert governed["hard.weight"] == ("float32", "None")
    for layer, told in found.formats:
        if layer != REST:
            assert told in governed[f"{layer}.weight"]


def test_the_table_says_what_it_shows(found):
    text = str(found)
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines[:5]] == [
        *("layer", "first", "hard", "(rest)", "all together")
    ]
    assert "8 public examples against float32" in text
    assert "not private" in text
    assert found.to_toml() in text
    assert found._repr_html_().startswith("<pre>")
    assert "public" in repr(found) or len(repr(found).splitlines()) == 1


LAYERS = (
    *(Layer(name, name, -1, (i,), 1) for i, name in enumerate("abc")),
    Layer(REST, "", -1, (), 0),
)


def cost(name, *errors, floor=0.0, whole=None):
    rows = tuple(
        LayerError(layer.path, 1, name, error, error, error)
        for layer, error in zip(LAYERS, errors, strict=True)
    )
    whole = math.hypot(*errors) if whole is None else whole
    return Costs(name, dp.load_policy(name), rows, floor, whole)


class Measured:
    """In place of programs that are compiled: errors that add up, a factor larger than that."""

    def __init__(self, costs, factor):
        self.factor, self.asked = factor, []
        self.by_level = {"float32": [0.0] * 4}
        for one in costs:
            narrow = one.policy.compute_dtype if one.policy.matmul is None else "float8"
            self.by_level[str(narrow)] = [row.error for row in one.rows]
        self.floor = next((one.floor for one in costs if one.policy.matmul), 0.0)

    def error(self, policy):
        self.asked.append(policy)
        rules = {rule.match.removesuffix(".**"): rule for rule in policy.modules}

        def level(name):
            rule = rules.get(name, rules.get("**"))
            compute = policy.compute_dtype if rule is None else rule.compute_dtype
            is_narrow = policy.matmul and (rule is None or rule.matmul is None)
            return "float8" if is_narrow else str(compute)

        errors = [self.by_level[level(name)][i] for i, name in enumerate("abc")]
        errors.append(max(self.by_level[level("**")][3], self.floor if policy.matmul else 0.0))
        return self.factor * math.hypot(*errors)


# Costs are made up here: to measure them takes programs.
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("tolerance", [1e-3, 0.03, 0.1, 0.9])
@pytest.mark.parametrize("floor", [0.0, 0.05])
def test_the_costliest_layers_are_kept_wide_until_the_measure_is_within(tolerance, factor, floor):
    costs = [
        cost("mixed_bfloat16", 2e-3, 5e-3, 2e-2, 1e-3),
        cost("mixed_float8", 4e-2, 2e-2, 3e-1, math.hypot(1e-3, floor), floor=floor),
    ]
    errors = Measured(costs, factor)
    policy, error, told = recommended(costs, LAYERS, tolerance, errors.error)
    assert error <= tolerance
    assert errors.error(policy) == error
    assert len(errors.asked) == len({*errors.asked, policy}) + 1  # none is measured twice
    order = ("float8_e4m3fn", "bfloat16", "float32")
    a, b, c, _ = map(order.index, told)
    assert b <= a <= c or floor  # as far up as they cost
    if factor == 1 and not floor:
        expected = {0.9: (0, 0, 0), 0.1: (0, 0, 1), 0.03: (1, 0, 1), 1e-3: (2, 2, 2)}[tolerance]
        assert (a, b, c) == expected


def test_nothing_is_recommended_where_nothing_is_within():
    class Never(Measured):
        def error(self, policy):
            super().error(policy)
            return 0.5

    costs = [cost("mixed_bfloat16", 1e-2, 1e-2, 1e-2, 1e-2)]
    assert recommended(costs, LAYERS, 0.1, Never(costs, 1.0).error) == (None, 0.5, ["-"] * 4)
    nothing = dp.PrecisionSensitivity(
        costs[0].rows, (("mixed_bfloat16", 0.5),), (("a", "-"),), None, 0.5, 0.1, "float64", 8
    )
    assert "none is within the tolerance of 0.1" in str(nothing)
    with pytest.raises(ValueError, match="No policy is recommended"):
        nothing.to_toml()


def test_a_loss_scale_is_no_rule():
    costs = [cost("mixed_float16", *[1e-3] * 4), cost("mixed_float8", *[1e-1] * 4)]
    _, _, told = recommended(costs, LAYERS, 0.15, Measured(costs, 1.0).error)
    assert sorted(set(told)) == ["float32", "float8_e4m3fn"]


# Layers.


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    scale: jax.Array


class Deep(eqx.Module):
    embedding: jax.Array
    blocks: list[Block]
    frozen: eqx.nn.Linear
    head: eqx.nn.Linear


@pytest.fixture
def deep():
    def make(blocks):
        def build():
            key = jax.random.key(0)
            linear = eqx.nn.Linear(4, 4, key=key)
            attention = eqx.nn.MultiheadAttention(2, 4, key=key)
            block = Block(attention, eqx.nn.LayerNorm(4), jnp.ones(4))
            return Deep(jnp.ones((8, 4)), [block] * blocks, linear, linear)

        model = eqx.filter_eval_shape(build)
        is_shape = jax.tree.map(lambda x: isinstance(x, jax.ShapeDtypeStruct), model)
        spec = eqx.tree_at(lambda m: m.frozen, is_shape, replace=False)
        return model, eqx.filter(model, spec)

    return make


def test_layers_lie_as_far_in_as_there_are_few(deep):
    twelve = layers_of(*deep(12), None)
    assert [layer.path for layer in twelve] == [*(f"blocks.{i}" for i in range(12)), "head", REST]
    two = [layer.path for layer in layers_of(*deep(2), None)]
    projections = [f"attention.{x}_proj" for x in ("query", "key", "value", "output")]
    assert two == [
        *(f"blocks.{i}.{x}" for i in range(2) for x in (*projections, "norm")),
        *("head", REST),
    ]
    many = [layer.path for layer in layers_of(*deep(17), None)]
    assert len(many) == 19 > MOST_LAYERS  # level by level: there is none further out


def test_every_leaf_belongs_to_the_innermost_layer(deep):
    model, trained = deep(2)
    layers = layers_of(model, trained, ("Block", "**.attention", "head"))
    paths = [layer.path for layer in layers]
    assert paths == [
        *("blocks.0", "blocks.0.attention", "blocks.1", "blocks.1.attention", "head", REST)
    ]
    assert [layer.within for layer in layers] == [-1, 0, -1, 2, -1, -1]
    leaves = jax.tree.leaves(trained)
    assert sorted(itertools.chain(*(x.leaves for x in layers))) == [*range(len(leaves))]
    assert [layer.size for layer in layers] == [12, 64, 12, 64, 20, 32]


def test_rules_give_every_layer_its_level(deep):
    model, trained = deep(2)
    layers = layers_of(model, trained, ("Block", "**.attention", "head"))
    base = dp.load_policy("mixed_float8")
    kinds = Level(base.compute_dtype), Level(base.compute_dtype, True), Level(np.dtype("f4"), True)
    draws = np.random.default_rng(0)
    for _ in range(4):
        levels = [kinds[i] for i in draws.integers(0, 3, len(layers))]
        policy = assembled(base, layers, levels)
        paths = [jax.tree_util.keystr(path, simple=True, separator=".")
                 for path, _ in jax.tree_util.tree_leaves_with_path(trained)]  # fmt: skip
        rows = {row.path: row for row in dp.describe(model, policy).rows}
        for layer, level in zip(layers, levels, strict=True):
            for leaf in layer.leaves:
                row = rows[paths[leaf]]
                assert (row.compute, row.matmul is None) == level


def test_paths_that_patterns_cannot_hold():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    model = {"a b": linear, "c": linear}
    layers = layers_of(model, eqx.filter(model, eqx.is_inexact_array), None)
    assert [(layer.path, layer.pattern) for layer in layers[:-1]] == [("a b", "a?b"), ("c", "c")]
    for other in ("a=b", "Linear"):
        model = {"a b": linear, other: linear}
        with pytest.raises(
            ValueError, match=r"modules: found '.*, whose pattern in a rule matches"
        ):
            layers_of(model, eqx.filter(model, eqx.is_inexact_array), None)


# What is outside of modules.


def test_products_of_the_loss_itself_cannot_be_kept_wide():
    model = {"weight": jax.random.normal(jax.random.key(0), (3, 4))}
    grad_fn = dp.filter_clipped_grad(
        lambda model, x, label: models.cross_entropy(model["weight"] @ x, label), l2_clip_norm=1.0
    )
    found = dp.precision_sensitivity(
        grad_fn, model, *BATCH, policies=("mixed_float8",), tolerance=1e-3
    )
    (row,) = found.rows
    assert row.layer == REST
    assert row.error == found.errors[0][1] > 1e-2
    assert found.recommended == dp.load_policy("float32")
    assert found.error < 1e-6


@pytest.mark.slow
def test_the_reference_is_float64_where_there_is_such():
    with jax.enable_x64(True):
        model = models.mlp(0).model
        grad_fn = dp.filter_clipped_grad(models.mlp().loss, l2_clip_norm=1.0)
        found = dp.precision_sensitivity(
            grad_fn, model, *models.mlp().batch(4), policies=("float32",), tolerance=1e-3
        )
    assert found.reference == "float64"
    assert 0 < found.errors[0][1] < 1e-5
    assert found.recommended == dp.load_policy("float32")


@pytest.mark.slow
def test_keys_sampling_and_a_paired_model_are_taken_as_they_are():
    case = models.dropout()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0)
    grad_fn = grad_fn.of_samples(dp.PrivacyPlan(0.5, 3, 1.0, 1e-5).sampling)  # calls need a mask
    model = dp.apply_policy(case.model, dp.load_policy("bfloat16"))
    given = {"key": jax.random.key(3), "policies": ("mixed_bfloat16",), "modules": ("layers.1",)}
    found = [dp.precision_sensitivity(grad_fn, model, *case.batch(4), **given) for _ in range(2)]
    assert found[0] == found[1] or str(found[0]) == str(found[1])  # NaN is not equal to itself
    assert [row.layer for row in found[0].rows] == ["layers.1", REST]
    assert all(0 < row.error < 0.05 for row in found[0].rows)


# Refusals.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_padding_example": np.zeros(8, bool)}, r"is_padding_example must be left out.*public"),
        ({"policies": ()}, "policies: found none"),
        ({"policies": "mixed_float8"}, "policies must be a tuple"),
        ({"policies": ("mixed_flot8",)}, r"policies\[0\]: policy preset: found 'mixed_flot8'"),
        ({"policies": ("mixed_bfloat16", 3)}, r"policies\[1\] must be"),
        ({"policies": ("float32",)}, r"policies\[0\].dtypes.compute: found float32.*not narrower"),
        ({"policies": ("mixed_bfloat16",) * 2}, r"policies\[1\]: found 'mixed_bfloat16' again"),
        ({"policies": ("mixed_float8_wide_heads",)}, r"policies\[0\].modules: found rules for '\*"),
        (
            {"policies": (dp.parse_policy("p=f32,c=bf16,accumulate=bf16,noise=f32,unsafe=true"),)},
            r"policies\[0\]: found unsafe",
        ),
        ({"modules": ()}, "modules: found none"),
        ({"modules": "hard"}, "modules must be a tuple"),
        ({"modules": ("hart",)}, "modules.match: found 'hart'.*hard Cancelling"),
        ({"modules": ("hard.weight",)}, "hard.weight is a leaf"),
        ({"modules": ("Net",)}, "modules: found 'Net', the model itself"),
        ({"modules": (3,)}, "modules: a pattern must be"),
        ({"tolerance": 0.0}, "tolerance must be greater than 0"),
        ({"tolerance": 1.0}, "tolerance must be greater than 0 and less than 1"),
    ],
)
def test_what_is_refused(options, words, unchecked):
    with pytest.raises(ValueError, match=words):
        dp.precision_sensitivity(GRAD_FN, MODEL, *BATCH, **options)


def test_calls_that_nothing_can_be_measured_of():
    with pytest.raises(ValueError, match="public_batch: found no examples"):
        dp.precision_sensitivity(GRAD_FN, MODEL, BATCH[0][:0], BATCH[1][:0])
    frozen = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, filter_spec=lambda _: False)
    with pytest.raises(ValueError, match="Nothing is trainable"):
        dp.precision_sensitivity(frozen, MODEL, *BATCH)
    with pytest.raises(ValueError, match="must hold arrays"):
        dp.precision_sensitivity(GRAD_FN, eqx.filter_eval_shape(lambda: MODEL), *BATCH)
    with pytest.raises(ValueError, match="while one is traced"):
        jax.jit(lambda x: dp.precision_sensitivity(GRAD_FN, MODEL, x, BATCH[1]))(BATCH[0])
    zero = dp.filter_clipped_grad(loss, l2_clip_norm=0.0)
    with pytest.raises(ValueError, match="public_batch: found examples whose clipped gradients"):
        dp.precision_sensitivity(zero, MODEL, *BATCH)
