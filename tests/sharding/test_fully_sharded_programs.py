"""What a fully sharded private step holds and sends, and whole steps of it, end to end."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.benchmarks import fully_sharded
from tests.sharding.compiled import collectives
from tests.sharding.fully_sharded_net import batch_of, loss, net, rules_of

METHODS = ("ghost", "book_keeping")


# Memory


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("method", METHODS)
def test_memory_falls_with_the_number_of_devices(method):
    case, found = fully_sharded.layers(256), []
    for devices in (2, 8):
        plain, private = (fully_sharded.measure(case, x, devices) for x in ("non-private", method))
        # Of eight layers, one device has neither all parameters nor a whole sum.
        assert private.temporary <= 2 * plain.temporary + 2 * case.layer_bytes
        assert private.arguments == plain.arguments
        assert private.outputs == plain.outputs
        found.append(private.total)
    assert found[1] < found[0] / 2


@pytest.mark.slow
@pytest.mark.optimized
def test_without_remat_no_whole_parameter_is_kept_for_the_backward_pass():
    case = fully_sharded.layers(256, remat=False)
    plain, private = (fully_sharded.measure(case, x, 8) for x in ("non-private", "ghost"))
    assert private.temporary <= 2 * plain.temporary + case.layer_bytes


@pytest.mark.slow
@pytest.mark.optimized
def test_a_checkpoint_around_a_scan_keeps_no_whole_parameter():
    layers, width = 8, 256
    rules = rules_of(params=(("**", P(None, "data")),))

    def fun(weights, x):
        scanned = jax.checkpoint(
            lambda x, weights: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]
        )
        return jnp.sum(scanned(x, weights) ** 2)

    options = {"l2_clip_norm": 1.0, "sharding": rules, "method": "ghost", "microbatch_size": 1}
    run = eqx.filter_jit(dp.filter_clipped_grad(fun, **options))
    with jax.set_mesh(rules.mesh):
        weights = rules.shard(jnp.ones((layers, width, width)))
        batch = rules.shard_batch(np.ones((8, 4, width), np.float32))
        compiled = run.lower(weights, batch).compile().compiled
    assert compiled.memory_analysis().temp_size_in_bytes < weights.nbytes / 2


# What is sent


def sent(policy):
    """The text that the compiler is given of a clipped gradient."""
    rules = rules_of()
    options = {"l2_clip_norm": 1.0, "sharding": rules, "policy": dp.load_policy(policy)}
    grad_fn = dp.filter_clipped_grad(loss, method="ghost", microbatch_size=1, **options)
    with jax.set_mesh(rules.mesh):
        args = rules.shard(net()), *rules.shard_batch(batch_of(16))
        return eqx.filter_jit(grad_fn).lower(*args).as_text()


def entries(text, name):
    """How many entries each result of a collective has, and of which type."""
    found = re.findall(
        rf'"stablehlo\.{name}".*?\) -> (?:tuple<)?tensor<((?:\d+x)*)(\w+)>', text, re.DOTALL
    )
    return [(math.prod(int(n) for n in dims.split("x") if n), kind) for dims, kind in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_parameters_are_cast_before_and_sums_are_wide(policy):
    text = sent(policy)
    assert {kind for _, kind in entries(text, "all_gather")} == {"bf16"}
    assert {kind for _, kind in entries(text, "reduce_scatter")} == {"f32"}
    assert {kind for size, kind in entries(text, "all_reduce") if size > 1} <= {"f32"}


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_over_another_axis_each_device_gathers_and_scatters_its_own_part(kind):
    """The compiler would first gather over `model` what devices along that divide."""
    width, layers, params = 64, 4, (("**", P(None, "data", "model")),)
    rules = rules_of(kind, {"data": 4, "model": 2}, params=params)
    again = jax.lax.with_sharding_constraint if kind == "auto" else jax.sharding.reshard

    def fun(weights, x):
        layer = jax.checkpoint(lambda x, w: (again(jnp.tanh(x @ w), P()), None))
        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    options = {"l2_clip_norm": 1.0, "sharding": rules, "method": "ghost", "microbatch_size": 1}
    run = eqx.filter_jit(dp.filter_clipped_grad(fun, **options))
    with jax.set_mesh(rules.mesh):
        weights = rules.shard(jnp.ones((layers, width, width)))
        batch = rules.shard_batch(np.ones((8, 2, width), np.float32))
        text = run.lower(weights, batch).compile().compiled.as_text()
    shapes = {
        (found.name, *map(int, re.findall(r"\d+", found.type.partition("[")[2].partition("]")[0])))
        for found in collectives(text)
    }
    assert ("all-gather", width, width // 2) in shapes
    assert ("reduce-scatter", width // 4, width // 2) in shapes
    assert not {("all-gather", width, width), ("reduce-scatter", width // 4, width)} & shapes


# Whole steps


PLAN = dp.PrivacyPlan(sampling_prob=0.25, steps=3, noise_multiplier=20.0, delta=1e-5)


def trained(rules, steps=3, **options):
    """The model after some steps, and the step."""
    step = dp.make_step(
        loss,
        optax.adam(1e-2),
        PLAN,
        num_examples=64,
        seed=0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321,
        l2_clip_norm=1.0,
        sharding=rules,
        **options,
    )
    data = batch_of(64)
    state, sampler = step.init(net()), step.sampler()
    for t in range(steps):
        indices, mask = sampler.batch(t)
        *batch, mask = step.shard_batch((*(x[indices] for x in data), mask))
        state = step(state, *batch, is_padding_example=mask)
    return state, step


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_steps_are_those_of_one_device(kind):
    options = {"method": "ghost", "microbatch_size": 2}
    rules = rules_of(kind)
    found, _ = trained(rules, **options)
    expected, _ = trained(None, **options)
    for a, b in zip(*map(arrays, (found.model, expected.model)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    up = found.model.up
    spec = jax.sharding.NamedSharding(rules.mesh, P(None, "data"))
    assert up.sharding.is_equivalent_to(spec, 3)
    moments = [x for x in arrays(found) if x.shape == up.shape]
    assert len(moments) == 3
    assert all(x.sharding.is_equivalent_to(spec, 3) for x in moments)


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))


def made(policy=None, **options):
    rules = rules_of()
    policy = None if policy is None else dp.load_policy(policy)
    state, step = trained(rules, 0, policy=policy, **options)
    *batch, mask = step.shard_batch((*batch_of(16), np.zeros(16, bool)))
    return step, (state, *batch), {"is_padding_example": mask}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["ghost", "book_keeping"])
def test_a_step_passes_its_checks(method):
    step, args, kwargs = made("mixed_bfloat16", method=method, microbatch_size=1)
    precision = dp.check_precision(step, *args, **kwargs, policy=dp.load_policy("mixed_bfloat16"))
    assert precision.ok, str(precision)
    privacy = dp.check_privacy(step, *args, **kwargs)
    assert privacy.ok, str(privacy)


def test_explain_says_when_a_device_needs_all_of_a_parameter():
    def reasons(fun, method):
        grad_fn = dp.filter_clipped_grad(fun, l2_clip_norm=1.0, sharding=rules_of(), method=method)
        return {row.path: row.reason for row in dp.explain(grad_fn, net(), *batch_of(8)).rows}

    used, beginning = "it is gathered where it is used", "all of it is gathered at the beginning"
    ghost, each = reasons(loss, "ghost"), reasons(loss, "per_example")
    assert ghost["up"].endswith(used)
    assert each["up"].endswith(beginning)
    assert "gathered" not in ghost["shift"]
    penalised = reasons(lambda model, *x: loss(model, *x) + jnp.sum(model.up**2), "ghost")
    assert penalised["up"].endswith(beginning)
    assert penalised["down"].endswith(used)
