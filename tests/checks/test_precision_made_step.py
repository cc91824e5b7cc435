"""check_precision of what make_step returns, called as in training."""

import contextlib
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.losses import mesh_of

pytestmark = pytest.mark.sampled(2)

MIXED = dp.load_policy("mixed_bfloat16")
NARROW = dp.parse_policy("p=f32,c=bf16,a=bf16,n=f32,unsafe=true")


def squared_error(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def made(policy=MIXED, mesh=None, noise_multiplier=1.0):
    """A step, and arguments of a call: a state, a batch, a mask."""
    rules = mesh and dp.ShardingRules(mesh, params=(("**.weight", P("model", None)),))
    step = dp.make_step(
        squared_error,
        optax.adam(1e-3),
        dp.PrivacyPlan(0.5, 3, noise_multiplier, 1e-5),
        num_examples=8,
        seed=0,
        l2_clip_norm=1.0,
        policy=policy,
        sharding=rules,
    )
    state = step.init(eqx.nn.MLP(4, 2, 0, 0, key=jax.random.key(0)))
    batch = step.shard_batch((jnp.ones((8, 4)), jnp.ones((8, 2))))
    return step, state, batch, step.shard_batch(jnp.zeros(8, bool))


def check(step, state, batch, mask, policy=MIXED):
    return dp.check_precision(step, state, *batch, is_padding_example=mask, policy=policy)


@pytest.mark.parametrize("preset", [p for p in dp.available_policies() if p != "float64"])
def test_every_preset_passes(preset):
    policy = dp.load_policy(preset)
    report = check(*made(policy), policy)
    report.raise_if_violated()
    assert report.notes == ()


def test_without_noise_there_is_a_note_alone():
    report = check(*made(noise_multiplier=0.0))
    report.raise_if_violated()
    assert any("without noise" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("inside", [False, True])
def test_on_eight_devices(kind, inside):
    """The step enters its mesh by itself, whether or not its caller has done so before."""
    mesh = mesh_of(kind, data=4, model=2)
    step, state, batch, mask = made(mesh=mesh)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        report = check(step, state, batch, mask)
    report.raise_if_violated()
    assert report.notes == ()
    (collective,) = [use for use in report.summary if use.kind == "collective"]
    assert (collective.stage, collective.dtype) == ("psum: sum over devices", "float32")
    # Shapes say as much.
    shapes = eqx.filter_eval_shape(lambda: (state, batch, mask))
    assert check(step, *shapes).summary == report.summary


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_narrow_sum_is_found_on_eight_devices(kind):
    report = check(*made(NARROW, mesh_of(kind, data=4, model=2)))
    assert {"sum over examples", "sum over devices"} <= {row.stage for row in report.violations}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_step_inside_of_another_program_keeps_its_arrays_in_their_places(kind):
    mesh = mesh_of(kind, data=4, model=2)
    step, state, batch, mask = made(mesh=mesh)

    @eqx.filter_jit
    def outer(state):
        return step(state, *batch, is_padding_example=mask)

    with jax.set_mesh(mesh):
        inner = outer(state)
        weight = state.model.layers[0].weight
    assert inner.model.layers[0].weight.sharding.is_equivalent_to(weight.sharding, 2)
    direct = step(state, *batch, is_padding_example=mask)
    for one, other in zip(jax.tree.leaves(inner.model), jax.tree.leaves(direct.model), strict=True):
        if eqx.is_array(one):
            assert jnp.allclose(jax.device_get(one), jax.device_get(other), atol=1e-6)


def test_a_report_as_json():
    report = check(*made(), policy=dp.load_policy("float32"))
    assert not report.ok
    found = json.loads(report.to_json())
    assert (found["format"], found["version"]) == ("eqx_dp.PrecisionReport", 1)
    assert found["ok"] is False
    assert found["policy"] == {"name": "float32", "text": str(report.policy)}
    assert [tuple(row.values()) for row in found["violations"]] == list(report.violations)
    assert [tuple(row.values()) for row in found["summary"]] == list(report.summary)
    assert json.loads(check(*made()).to_json())["ok"] is True
