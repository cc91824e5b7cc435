"""Gradients with products in narrow dtypes: what is computed, and that examples stay apart."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models, oracle
from tests.gradients import jitted
from tests.gradients.cases import branches, layers
from tests.gradients.rounded import rounded_loss
from tests.tiers import by_method, curated

ALL = ("book_keeping", "ghost", "per_example")
METHODS = pytest.mark.parametrize("method", curated(ALL, []))
FLOAT8 = dp.Matmul("float8_e4m3fn", "float8_e5m2")
# All else is as wide as it can be, so that what is seen is the products.
PRODUCTS = dp.Policy("float32", "float32", "float32", matmul=FLOAT8)
MIXED = dp.load_policy("mixed_float8")


def gradients(loss, policy=PRODUCTS, clip_norm=1.0, **options):
    return jitted.value_and_grad(loss, l2_clip_norm=clip_norm, policy=policy, **options)


def agree(loss, rounded, model, batch, policy=PRODUCTS, **options):
    """Against a loss with rounded operands in float64: nothing is left but float32's own error."""
    truth = oracle.clipped_gradients(rounded, model, *batch, l2_clip_norm=1.0)
    per_example, grads = gradients(loss, policy, **options)(model, *batch)
    assert oracle.relative_error(grads, truth.grads) < 2e-5
    np.testing.assert_allclose(per_example.loss, truth.loss, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(per_example.grad_norm, truth.grad_norm, rtol=1e-5)


CASES = {
    **{
        name: lambda name=name: layers.case(name)
        for name in ("linear_tokens", "conv1d_all", "attention", "gru_scan", "weight_norm")
    },
    "gpt": models.gpt,  # under scan and remat
}


@pytest.mark.parametrize(
    ("name", "method"), by_method(CASES, book_keeping=(), ghost=("linear_tokens",), every=4)
)
def test_the_gradient_is_that_of_rounded_operands(name, method):
    case = CASES[name]()
    agree(case.loss, rounded_loss(case.loss, FLOAT8), case.model, case.batch(3), method=method)


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["float16", "bfloat16:float16", "float8_e4m3fn:bfloat16:none"])
def test_every_pair_of_dtypes(matmul):
    policy = dp.parse_policy(f"p=f32,c=f32,o=f32,matmul={matmul}")
    case = layers.case("conv1d_all")
    agree(case.loss, rounded_loss(case.loss, policy.matmul), case.model, case.batch(2), policy)


# Which products are narrow


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


def rounded(part, x):
    return rounded_loss(lambda part, x: part(x), FLOAT8)(part, x)


def bent(x):
    return jnp.maximum(x, 0)


def past_the_body(model, x):
    first, second = model.body.layers
    return jnp.sum(model.head(second(bent(first(x)))) ** 2)


def with_a_wide_first(model, x):
    first, second = model.body.layers
    return jnp.sum(rounded(model.head, rounded(second, bent(first(x)))) ** 2)


def with_a_wide_body(model, x):
    return jnp.sum(rounded(model.head, model.body(x)) ** 2)


WIDE = [
    ("no rule", squares, (), rounded_loss(squares, FLOAT8)),
    ("head", squares, ("head",), lambda m, x: jnp.sum(m.head(rounded(m.body, x)) ** 2)),
    ("body", squares, ("body",), with_a_wide_body),
    ("body, called past", past_the_body, ("body",), with_a_wide_body),
    ("first layer", squares, ("body.layers.0",), with_a_wide_first),
    ("class", squares, ("Linear",), squares),
    ("float32 says wide", squares, ("!body",), with_a_wide_body),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss", "rules", "truth"), curated(WIDE, [WIDE[1]]), ids=[name for name, *_ in WIDE]
)
def test_module_rules_keep_products_wide(name, loss, rules, truth):
    modules = tuple(
        dp.ModuleRule(rule.strip("!"), "float32", None if rule.startswith("!") else "wide")
        for rule in rules
    )
    policy = dataclasses.replace(PRODUCTS, modules=modules)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    agree(loss, truth, ends(), (x,), policy)


# Examples stay apart.


def with_others(others):
    x = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    return jnp.asarray(np.concatenate([x[:1], np.broadcast_to(others, (3, 4))]), jnp.float32)


FIRST_ALONE = np.array([False, True, True, True])


@pytest.mark.optimized
@METHODS
def test_what_an_example_adds_does_not_depend_on_the_others(method):
    """No scale is found from the batch, and what is not finite adds zero."""
    call, model = gradients(squares, MIXED, method=method), ends()
    expected = call(model, with_others(0.1), is_padding_example=FIRST_ALONE)
    assert float(expected[0].grad_norm[0]) > 0
    for others in (-1e30, np.inf, [0.5, np.nan, 0.5, 0.5], [np.inf, 1, 1, 1], 1e-30):
        for there in (FIRST_ALONE, np.zeros(4, bool)):
            values, found = call(model, with_others(others), is_padding_example=there)
            if there is FIRST_ALONE or not np.all(np.isfinite(others)):
                np.testing.assert_array_equal(oracle.vector(found), oracle.vector(expected[1]))
        assert values.loss[0] == expected[0].loss[0]
        assert values.grad_norm[0] == expected[0].grad_norm[0]


# At any scale.


@pytest.mark.parametrize("method", curated(ALL, ["book_keeping"]))
def test_powers_of_two_between_operands_change_nothing(method):
    rng = np.random.default_rng(0)
    first, second, x = (rng.normal(size=s) for s in ((4, 6), (6, 3), (3, 5, 4)))

    def loss(weights, x):
        first, second = weights
        return jnp.sum(jnp.sin(x @ first @ second))

    found = gradients(loss, clip_norm=np.inf, method=method)

    def run(a, b, c):
        weights = jnp.asarray(np.ldexp(first, a), "f4"), jnp.asarray(np.ldexp(second, b), "f4")
        values, grads = found(weights, jnp.asarray(np.ldexp(x, c), "f4"))
        pairs = zip(grads, (a, b), strict=True)
        return np.asarray(values.loss), [np.ldexp(np.asarray(g, "f8"), e) for g, e in pairs]

    plain, grads = run(0, 0, 0)
    # 2^100 is about 1e30.
    for powers in ((100, -70, -30), (-100, 60, 40)):
        other, others = run(*powers)
        np.testing.assert_array_equal(plain, other)
        for a, b in zip(grads, others, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@METHODS
def test_a_branch_in_a_loop(method):
    case = branches.BRANCHES["cond in a scan"]("cond in a scan")
    call = lambda *policy: gradients(case.loss, *policy, method=method)  # noqa: E731
    wide, found = (call(*policy)(case.model, *case.batch(3))[1] for policy in ([None], []))
    assert 1e-3 < oracle.relative_error(found, wide) < 0.3
