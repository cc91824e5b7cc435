"""Gradients with products in narrow dtypes: what is computed, and that examples stay apart."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap

import eqx_dp as dp
from eqx_dp.gradients import narrow_products
from tests import models, oracle
from tests.gradients.engine import layers, uses
from tests.gradients.engine import models as networks
from tests.gradients.engine.rounded import rounded_loss
from tests.gradients.test_clip_holds import matrix, one_at_a_time, tokens

pytestmark = pytest.mark.sampled(6)

METHODS = ["book_keeping", "ghost", "per_example"]
EACH_METHOD = pytest.mark.parametrize("method", METHODS)
FLOAT8 = dp.Matmul("float8_e4m3fn", "float8_e5m2")
# All else is as wide as it can be, so that what is seen is the products.
PRODUCTS = dp.Policy("float32", "float32", "float32", matmul=FLOAT8)
MIXED = dp.load_policy("mixed_float8")


def gradients(loss, model, policy=PRODUCTS, clip_norm=1.0, **options):
    function = dp.filter_value_and_clipped_grad(
        loss, l2_clip_norm=clip_norm, policy=policy, **options
    )
    return uses.freshly_jitted(function, model)


def lowered(loss, model, *batch, policy=MIXED, **options):
    """The two operand types of every contraction and convolution, and that of the result."""
    function = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, policy=policy, **options)
    arrays, static = eqx.partition(model, eqx.is_array)
    program = jax.jit(lambda arrays, *batch: function(eqx.combine(arrays, static), *batch))
    text = program.lower(arrays, *batch).as_text()
    lines = [x for x in text.splitlines() if "dot_general" in x or "stablehlo.convolution" in x]
    dtypes = [re.findall(r"tensor<(?:\d+x)*(\w+)>", line.rsplit(" : ", 1)[1]) for line in lines]
    return [tuple(x.removeprefix("f8") for x in found) for found in dtypes]


E4, E5 = "E4M3FN", "E5M2"


# Against a loss with rounded operands in float64: nothing is left but float32's own error.

CASES = {
    "linear_tokens": lambda: layers.case("linear_tokens"),
    "conv1d_all": lambda: layers.case("conv1d_all"),
    "attention": lambda: layers.case("attention"),
    "gru_scan": lambda: layers.case("gru_scan"),
    "conv_transpose2d_all": lambda: layers.case("conv_transpose2d_all"),
    "weight_norm": lambda: layers.case("weight_norm"),
    "mlp": lambda: layers.case("mlp"),
    "conv2d_depthwise": lambda: layers.case("conv2d_depthwise"),
    "low_rank": lambda: layers.case("low_rank"),
    "stacked_gpt": networks.stacked_gpt,  # under scan and remat
}
QUICK = ("linear_tokens", "conv1d_all")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if name in QUICK else pytest.mark.exhaustive)
        for method in METHODS
        for name in CASES
    ],
)
def test_the_gradient_is_that_of_rounded_operands(name, method):
    case = CASES[name]()
    batch = case.batch(3)
    truth = oracle.clipped_gradients(
        rounded_loss(case.loss, FLOAT8), case.model, *batch, l2_clip_norm=1.0
    )
    per_example, grads = gradients(case.loss, case.model, method=method)(*batch)
    assert oracle.relative_error(grads, truth.grads) < 2e-5
    np.testing.assert_allclose(per_example.loss, truth.loss, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(per_example.grad_norm, truth.grad_norm, rtol=1e-5)


@pytest.mark.parametrize("matmul", ["float16", "bfloat16:float16", "float8_e4m3fn:bfloat16:none"])
def test_every_pair_of_dtypes(matmul):
    policy = dp.parse_policy(f"p=f32,c=f32,o=f32,matmul={matmul}")
    case = layers.case("conv1d_all")
    batch = case.batch(2)
    truth = oracle.clipped_gradients(
        rounded_loss(case.loss, policy.matmul), case.model, *batch, l2_clip_norm=1.0
    )
    _, grads = gradients(case.loss, case.model, policy, method="book_keeping")(*batch)
    assert oracle.relative_error(grads, truth.grads) < 2e-5


# What is compiled.


def test_products_take_operands_of_8_bits():
    """One product of the whole microbatch each: forward, backward, and of single examples."""
    case = models.mlp()
    found = lowered(case.loss, case.model, *case.batch(4), method="per_example")
    layer = [(E4, E4, "f32")]
    assert found[:3] == 3 * layer
    # Back to the activations of two layers, and to the parameters of three.
    assert sorted(found[3:]) == sorted(5 * [(E5, E4, "f32")])


def test_sums_over_examples_are_wide():
    case = models.mlp()
    found = lowered(case.loss, case.model, *case.batch(4), method="book_keeping")
    assert found[:5] == [*3 * [(E4, E4, "f32")], *2 * [(E5, E4, "f32")]]
    assert set(found[5:]) <= {("f32", "f32", "f32")}


def test_convolutions_take_operands_of_8_bits():
    """JAX convolves no two formats: backward both are in the narrowest that holds either."""
    case = models.cnn()
    found = lowered(case.loss, case.model, *case.batch(2), method="book_keeping")
    assert found[0] == (E4, E4, "f32")
    assert set(found) <= {(E4, E4, "f32"), (E5, E4, "f32"), ("bf16", "bf16", "f32"), 3 * ("f32",)}


def test_inner_products_stay_wide():
    model, x = jnp.ones(5), jnp.ones((2, 5))
    found = lowered(lambda w, x: jnp.vdot(w, x) ** 2, model, x, method="per_example")
    assert all(E4 not in dtypes for dtypes in found)


class Ends(eqx.Module):
    body: eqx.nn.MLP
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(self.body(x))


def ends():
    keys = jax.random.split(jax.random.key(0))
    return Ends(eqx.nn.MLP(4, 5, 6, 1, key=keys[0]), eqx.nn.Linear(5, 2, key=keys[1]))


def squares(model, x):
    return jnp.sum(model(x) ** 2)


RULES = {
    "head": [(E4, E4, "f32"), (E4, E4, "f32"), 3 * ("bf16",)],
    "body": [3 * ("bf16",), 3 * ("bf16",), (E4, E4, "f32")],
    "body.layers.0": [3 * ("bf16",), (E4, E4, "f32"), (E4, E4, "f32")],
    "Linear": 3 * [3 * ("bf16",)],
}


@pytest.mark.parametrize("match", RULES)
def test_module_rules_keep_products_wide(match):
    policy = dataclasses.replace(MIXED, modules=(dp.ModuleRule(match, "bfloat16", "wide"),))
    x = jnp.ones((2, 4))
    assert lowered(squares, ends(), x, policy=policy)[:3] == RULES[match]


def test_a_rule_holds_for_a_module_that_is_called_past_the_one_it_matches():
    policy = dataclasses.replace(MIXED, modules=(dp.ModuleRule("body", "bfloat16", "wide"),))

    def loss(model, x):
        for layer in model.body.layers:
            x = layer(x)
        return jnp.sum(model.head(x))

    found = lowered(loss, ends(), jnp.ones((2, 4)), policy=policy)[:3]
    assert found == RULES["body"]


def test_the_innermost_rule_counts():
    rules = (dp.ModuleRule("body.layers.1", "bfloat16"), dp.ModuleRule("body", "bfloat16", "wide"))
    policy = dataclasses.replace(MIXED, modules=rules)
    found = lowered(squares, ends(), jnp.ones((2, 4)), policy=policy)[:3]
    assert found == [3 * ("bf16",), (E4, E4, "f32"), (E4, E4, "f32")]


def test_a_preset_with_rules_is_for_models_without_such_modules_too():
    policy = dp.load_policy("mixed_float8_wide_heads")
    assert lowered(squares, ends(), jnp.ones((2, 4)), policy=policy)[:3] == RULES["head"]
    mlp = eqx.nn.MLP(4, 5, 6, 1, key=jax.random.key(0))
    assert lowered(squares, mlp, jnp.ones((2, 4)), policy=policy)[:2] == 2 * [(E4, E4, "f32")]


def test_explain_names_the_dtype():
    policy = dataclasses.replace(MIXED, modules=(dp.ModuleRule("head", "bfloat16", "wide"),))
    function = dp.filter_clipped_grad(squares, l2_clip_norm=1.0, policy=policy)
    rows = {row.path: row.uses for row in dp.explain(function, ends(), jnp.ones((2, 4))).rows}
    assert rows["body.layers.0.weight"] == ("contraction[float8_e4m3fn]",)
    assert rows["head.weight"] == ("contraction",)


# Examples stay apart.


def with_others(others):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 4)).astype(np.float32)
    return jnp.asarray(np.concatenate([x[:1], np.broadcast_to(others, (3, 4))]), jnp.float32)


@EACH_METHOD
def test_what_an_example_adds_does_not_depend_on_the_others(method):
    call = gradients(squares, ends(), MIXED, method=method)
    # The others are padding, so that the sum is what the first example adds.
    mask = jnp.asarray([False, True, True, True])
    expected = call(with_others(0.1), is_padding_example=mask)
    assert float(expected[0].grad_norm[0]) > 0
    for others in (-1e30, np.inf, np.nan, 1e-30):
        found = call(with_others(others), is_padding_example=mask)
        for a, b in zip(*map(jax.tree.leaves, (found[1], expected[1])), strict=True):
            np.testing.assert_array_equal(a, b)
        values = call(with_others(others))[0]
        assert values.loss[0] == expected[0].loss[0]
        assert values.grad_norm[0] == expected[0].grad_norm[0]


@EACH_METHOD
def test_what_is_not_finite_adds_zero(method):
    call = gradients(squares, ends(), MIXED, method=method)
    for others in (np.nan, np.inf):
        x = with_others(others).at[1:, 1:].set(0.5)  # one such entry an example
        values, grads = call(x)
        assert not np.isfinite(values.grad_norm[1:]).any()
        _, alone = call(x, is_padding_example=jnp.asarray([False, True, True, True]))
        for a, b in zip(*map(jax.tree.leaves, (grads, alone)), strict=True):
            np.testing.assert_array_equal(a, b)


@EACH_METHOD
def test_a_scale_from_the_batch_is_refused(method, monkeypatch):
    """Planted where the engine finds the scale of an operand."""

    @custom_vmap
    def largest(exponent):
        return exponent

    @largest.def_vmap
    def _(size, is_mapped, exponent):
        return jnp.broadcast_to(jnp.max(exponent), (size,)), True

    monkeypatch.setattr(
        narrow_products,
        "_power",
        lambda exponent, power=narrow_products._power: power(largest(exponent)),
    )
    with pytest.raises(ValueError, match="Examples m"):
        gradients(squares, ends(), method=method)(with_others(0.1))


# The clip bound, at any scale.


@EACH_METHOD
@pytest.mark.parametrize("policy", [MIXED, PRODUCTS], ids=["bfloat16", "float32"])
def test_the_clip_bound_holds(policy, method):
    for kind in ("random", "cancelling", "one huge"):
        x, g = tokens(64, kind)
        norms, _ = one_at_a_time(
            matrix, jnp.zeros((5, 8)), x, g, clip_norm=0.1, method=method, policy=policy
        )
        assert (norms <= 0.1).all(), kind
        assert kind == "cancelling" or (norms >= 0.99 * 0.1).all(), kind


def tokens_loss(weights, x):
    first, second = weights
    return jnp.sum(jnp.sin(x @ first @ second))


@EACH_METHOD
def test_powers_of_two_between_operands_change_nothing(method):
    rng = np.random.default_rng(0)
    first, second, x = (rng.normal(size=s) for s in ((4, 6), (6, 3), (3, 5, 4)))

    def run(a, b, c):
        weights = jnp.asarray(np.ldexp(first, a), "f4"), jnp.asarray(np.ldexp(second, b), "f4")
        found = gradients(tokens_loss, weights, clip_norm=np.inf, method=method)
        values, grads = found(jnp.asarray(np.ldexp(x, c), "f4"))
        return np.asarray(values.loss), [
            np.ldexp(np.asarray(g, "f8"), e) for g, e in zip(grads, (a, b), strict=True)
        ]

    loss, grads = run(0, 0, 0)
    # 2^100 is about 1e30.
    for powers in ((100, -70, -30), (-100, 60, 40)):
        other, others = run(*powers)
        np.testing.assert_array_equal(loss, other)
        for a, b in zip(grads, others, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@EACH_METHOD
def test_a_branch_and_a_loop(method):
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)

    def loss(weight, x):
        def step(x, _):
            return jax.checkpoint(lambda x: jnp.tanh(x @ weight))(x), None

        x, _ = jax.lax.scan(step, x, None, length=3)
        x = jax.lax.cond(x[0, 0] > 0, lambda: x @ weight, lambda: x)
        return jnp.sum(x**2)

    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2, 4)), jnp.float32)
    _, wide = gradients(loss, weight, None, method=method)(x)
    _, found = gradients(loss, weight, method=method)(x)
    error = np.linalg.norm(found - wide) / np.linalg.norm(wide)
    assert 1e-4 < error < 0.3


@pytest.mark.slow
def test_operand_scaling_is_no_loss_scale():
    """Between products, cotangents are in the compute dtype: what a probing loss scale is for."""
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(2, 4, 8)), jnp.float32)

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return 1e-7 * jnp.mean(x.astype(jnp.float32) ** 2)

    truth = oracle.clipped_gradients(loss, weights, x, l2_clip_norm=1e-9).grads

    def error(text):
        policy = dp.parse_policy(text)
        _, grads = gradients(loss, weights, policy, 1e-9, method="book_keeping")(x)
        return oracle.relative_error(grads, truth)

    assert error("p=f32,c=f16,o=f32,matmul=f16") > 0.5
    assert error("p=f32,c=f16,o=f32,loss_scale=1048576") < 2e-3
    assert error("p=f32,c=f32,o=f32,matmul=f16") < 2e-3
