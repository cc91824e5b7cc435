"""Optimizer state is stored in the declared dtype, and parameters are rounded as declared."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.privacy import fold_text, key_from_secret
from tests import models
from tests.tiers import curated
from tests.training.runs import XS, YS, assert_same, seeded, small_model

NARROW = "optimizer=bf16,narrow_optimizer=true"
MASK = np.zeros(8, bool)
NOISELESS = dp.PrivacyPlan(sampling_prob=0.5, steps=5, noise_multiplier=0.0, delta=1e-5)


def made(policy, optimizer=None, **options):
    return seeded(optimizer=optimizer, policy=dp.parse_policy(policy), **options)


def taken(step, times=2):
    state = step.init(small_model())
    for _ in range(times):
        state = step(state, XS[:8], YS[:8], is_padding_example=MASK)
    return state


def moments(state):
    return [x for x in jax.tree.leaves(state.opt_state[1]) if jnp.issubdtype(x.dtype, jnp.floating)]


NARROWEST = f"c=f32,{NARROW}", "bfloat16"
WIDEST = "c=f32,o=f32,optimizer=f64", "float64"


@pytest.mark.parametrize(
    ("policy", "dtype"),
    curated(
        [("c=bf16,o=f32", "float32"), ("p=bf16,c=bf16,o=f32", "float32"), NARROWEST, WIDEST],
        [NARROWEST, WIDEST],
    ),
)
def test_a_step_holds_it_in_the_declared_dtype(policy, dtype):
    with jax.enable_x64(dtype == "float64"):
        step = made(policy)
        states = step.init(small_model()), taken(step)
    for state in states:
        assert {x.dtype for x in moments(state)} == {jnp.dtype(dtype)}
        assert np.isfinite(moments(state)[0].astype(np.float32)).all()
        arrays = jax.tree.leaves(eqx.filter(state.model, eqx.is_array))
        assert {x.dtype for x in arrays} == {step.grad_fn.policy.param_dtype}


def test_narrow_state_is_updated_wide_and_rounded_once():
    """Without noise, the moments after one step are those of float32, rounded."""
    policies = f"c=f32,{NARROW}", "c=f32"
    narrow, wide = (moments(taken(made(policy, plan=NOISELESS), 1)) for policy in policies)
    pairs = [*zip(narrow, wide, strict=True)]
    for one, other in pairs:
        np.testing.assert_array_equal(one, other.astype(jnp.bfloat16))
    assert any((one.astype(jnp.float32) != other).any() for one, other in pairs)


def test_what_an_optimizer_narrows_by_itself_is_refused():
    optimizer = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    found = r"optimizer state\[0\]\.mu.*: found bfloat16; allowed: float32 or wider.*mu_dtype"
    with pytest.raises(ValueError, match=found):
        made("c=bf16,o=f32", optimizer).init(small_model())
    taken(made(f"c=f32,{NARROW}", optimizer))


@pytest.mark.slow
def test_the_bits_are_of_the_seed_the_step_and_the_path():
    """What a step makes of its parameters is what `apply_updates` makes with its key."""
    rate, policy = 2.0**-9, "p=bf16,c=bf16,o=f32,rounding=stochastic"
    decay = optax.chain(optax.set_to_zero(), optax.add_decayed_weights(-rate))
    loss = lambda model, x, y: 0 * jnp.sum(model(x))  # noqa: E731
    step = made(policy, decay, plan=NOISELESS, loss=loss)
    state = step.init(small_model())
    root = fold_text(key_from_secret(step._secret_of(0), "step"), "rounding")
    expected = step.init(small_model()).model
    for t in range(2):
        params = eqx.filter(expected, eqx.is_inexact_array)
        updates = jax.tree.map(lambda x: -rate * x.astype(jnp.float32), params)
        key = jax.random.fold_in(root, t)
        expected = dp.apply_updates(expected, updates, step.grad_fn.policy, key=key)
        state = step(state, XS[:8], YS[:8], is_padding_example=MASK)
    assert_same(state.model, expected)


@pytest.mark.parametrize("given", curated([jnp.bfloat16, jnp.float32], [jnp.bfloat16]))
def test_what_is_frozen_keeps_its_dtype_unless_a_rule_has_one(given):
    """Layer 0 is frozen, a rule stores layer 1 in bfloat16, of which the bias is frozen too.

    Weight decay moves none of it.
    """
    case = models.mlp()
    policy = dp.parse_policy("p=f32,c=bf16,o=f32,module:layers.1=bf16:params=bf16")
    cast = lambda x: x.astype(given) if eqx.is_inexact_array(x) else x  # noqa: E731
    model = jax.tree.map(cast, case.model)
    where = lambda m: [m.layers[1].weight, m.layers[2].weight, m.layers[2].bias]  # noqa: E731
    nothing = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(where, nothing, replace_fn=lambda _: True)
    options = {"policy": policy, "filter_spec": spec, "loss": case.loss}
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    step, batch = seeded(optimizer=optimizer, **options), case.batch(8)
    state = step.init(model)
    for _ in range(2):
        after = step(state, *batch, is_padding_example=MASK)
        first, second, third = after.model.layers
        assert {first.weight.dtype, first.bias.dtype} == {jnp.dtype(given)}
        np.testing.assert_array_equal(first.weight, model.layers[0].weight)
        np.testing.assert_array_equal(second.bias, model.layers[1].bias.astype(jnp.bfloat16))
        assert {second.weight.dtype, second.bias.dtype} == {jnp.dtype(jnp.bfloat16)}
        assert {third.weight.dtype, third.bias.dtype} == {jnp.dtype(jnp.float32)}
        state = after
    sizes = sorted(x.size for x in moments(state) if x.ndim)
    assert sizes == sorted(2 * [x.size for x in where(model)])
    check = dp.check_precision(step, state, *batch, is_padding_example=MASK, policy=policy)
    check.raise_if_violated()
    rows = dp.explain(step.grad_fn, model, *batch, is_padding_example=MASK).rows
    assert [row.param_dtype for row in rows] == ["bfloat16", "float32", "float32"]
    plan = dp.plan_memory(step.grad_fn, model, *batch, compiled=False)
    arrays = jax.tree.leaves(eqx.filter(state.model, eqx.is_array))
    copies = sum(x.size * 2 for x in arrays if x.dtype == jnp.float32)  # for the loss, in bfloat16
    assert plan.parts.parameters == sum(x.nbytes for x in arrays) + copies
