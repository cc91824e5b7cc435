"""What a fully sharded private step holds and sends, and whole steps of it, end to end."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.benchmarks import fully_sharded
from tests.sharding.compiled import compiled
from tests.sharding.fully_sharded_net import batch_of, loss, net, rules_of
from tests.training import runs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "remat"), [("ghost", True), ("book_keeping", True), ("ghost", False)]
)
def test_memory_falls_with_the_number_of_devices(method, remat):
    """Of eight layers, one device has neither all parameters nor a whole sum."""
    case, found = fully_sharded.layers(256, remat=remat), []
    for devices in (2, 8):
        plain, private = (fully_sharded.measure(case, x, devices) for x in ("non-private", method))
        # A device's part of the sums in two floats, and what a microbatch adds to them.
        sums = 3 * plain.outputs
        assert private.temporary <= 2 * plain.temporary + 2 * case.layer_bytes + sums
        assert private.arguments == plain.arguments
        assert private.outputs == plain.outputs
        found.append(private.total)
    assert found[1] < found[0] / 2


def program(rules, fun, width, batch):
    """A clipped gradient of eight layers in one array, compiled."""
    options = {"l2_clip_norm": 1.0, "method": "ghost", "microbatch_size": 1}
    grad_fn = dp.filter_clipped_grad(fun, sharding=rules, **options)
    with jax.set_mesh(rules.mesh):
        weights = rules.shard(jnp.ones((8, width, width)))
        return compiled(grad_fn, weights, *rules.shard_batch((batch,)))


def test_a_checkpoint_around_a_scan_keeps_no_whole_parameter():
    @jax.checkpoint
    def scanned(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def fun(weights, x):
        return jnp.sum(scanned(x, weights) ** 2)

    rules = rules_of(params=(("**", P(None, "data")),))
    found = program(rules, fun, 256, np.ones((8, 4, 256), np.float32))
    assert found.temporary_bytes < 8 * 256**2 * 4 / 2


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_over_another_axis_each_device_gathers_and_scatters_its_own_part(kind):
    """The compiler would first gather over `model` what devices along that divide."""
    rules = rules_of(kind, {"data": 4, "model": 2}, params=(("**", P(None, "data", "model")),))
    again = jax.lax.with_sharding_constraint if kind == "auto" else jax.sharding.reshard

    def fun(weights, x):
        layer = jax.checkpoint(lambda x, w: (again(jnp.tanh(x @ w), P()), None))
        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    found = program(rules, fun, 64, np.ones((8, 2, 64), np.float32))
    shapes = {
        (one.name, *map(int, re.findall(r"\d+", one.type.partition("[")[2].partition("]")[0])))
        for one in found.collectives
    }
    assert {("all-gather", 64, 32), ("reduce-scatter", 16, 32)} <= shapes
    assert not {("all-gather", 64, 64), ("reduce-scatter", 16, 64)} & shapes


# Whole steps


DATA = batch_of(runs.NUM_EXAMPLES)


def step_on(rules, **options):
    return runs.seeded(loss=loss, sharding=rules, method="ghost", **options)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_steps_are_those_of_one_device(kind):
    rules = rules_of(kind)
    steps = (step_on(its, microbatch_size=2) for its in (rules, None))
    (*_, found), (*_, expected) = (runs.states_of(step, net(), 3, DATA) for step in steps)
    for a, b in zip(*(map(runs.leaves, (found.model, expected.model))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    spec = jax.sharding.NamedSharding(rules.mesh, P(None, "data"))
    arrays = jax.tree.leaves(eqx.filter(found, eqx.is_inexact_array))
    moments = [x for x in arrays if x.shape == found.model.up.shape]
    assert len(moments) == 3  # and the parameter
    assert all(x.sharding.is_equivalent_to(spec, 3) for x in moments)


def test_a_step_passes_its_checks():
    policy = dp.load_policy("mixed_bfloat16")
    step = step_on(rules_of(), policy=policy, microbatch_size=1)
    batch, mask = runs.batch_of(step, 0, DATA)
    for check, options in ((dp.check_precision, {"policy": policy}), (dp.check_privacy, {})):
        report = check(step, step.init(net()), *batch, **mask, **options)
        assert report.ok, str(report)
