"""The memory planner: its parts against counts by hand, and the compiler's word."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp import device, plan_memory
from tests import models


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp(**options):
    case = models.mlp()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, **options)
    shapes = eqx.filter_eval_shape(lambda: case.model)
    batch = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.batch(16)]
    return grad_fn, shapes, batch


def sizes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "size"))


def test_a_plan_adds_up():
    grad_fn, model, batch = mlp(method="per_example", microbatch_size=4)
    noise = dp.gaussian_privatizer(stddev=1.0, key=0)
    plan = plan_memory(grad_fn, model, *batch, optimizer=optax.chain(noise, optax.adam(1e-3)))
    parts, compiled = plan.parts, plan.compiled
    assert parts.total == sum(parts)
    assert parts.parameters == sizes(model)  # float32 is given to the loss as it is
    assert parts.gradients == 3 * sizes(model)  # of all, in two floats, and of a microbatch
    assert 0 <= parts.optimizer - 2 * sizes(model) < 64  # mu and nu, and counters
    assert parts.batch == sizes(batch) + 16  # and the mask
    assert parts.per_example >= 4 * sizes(model)  # four gradients at once
    assert parts.noise == max(map(sizes, jax.tree.leaves(model)))
    with device._made_for("gpu"):
        assert plan_memory(grad_fn, model, *batch, compiled=False).parts.noise == 0
    given = sizes(model) + parts.optimizer + parts.batch
    assert abs(compiled.arguments - given) < 64
    assert compiled.shared >= 3 * sizes(model)  # the old state gives way to the new
    own = compiled.arguments + compiled.results - compiled.shared
    assert compiled.total == own + compiled.temporary
    assert plan.total == compiled.total
    assert (plan.method, plan.microbatch_size, plan.num_examples) == ("per_example", 4, 16)
    for word in ("per_example", "sum of parts", "compiled", "microbatch 4"):
        assert word in str(plan)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_largest_microbatch_within_a_limit(compiled):
    grad_fn, model, batch = mlp(method="per_example")

    def total(size):
        return plan_memory(grad_fn, model, *batch, microbatch_size=size, compiled=compiled).total

    for size in (5,) if compiled else (1, 5, 16):
        limit = total(size)
        found = plan_memory(grad_fn, model, *batch, limit=limit, compiled=compiled)
        assert found.total <= limit
        assert found.microbatch_size >= size
        assert found.microbatch_size == 16 or total(found.microbatch_size + 1) > limit
    found = plan_memory(grad_fn, model, *batch, limit=2**40, microbatch_size=3, compiled=False)
    assert found.microbatch_size == 3
    with pytest.raises(ValueError, match=r"Not even one example at a time fits: it takes .* KiB"):
        plan_memory(grad_fn, model, *batch, limit=1, compiled=compiled)
    with pytest.raises(ValueError, match="limit must be at least 1; found 0"):
        plan_memory(grad_fn, model, *batch, limit=0)


def layers(width, depth, batch=16):
    return [array(width, width) for _ in range(depth)], array(batch, width)


def layers_loss(weights, x):
    for weight in weights:
        x = jax.nn.relu(weight @ x)
    return jnp.sum(x**2)


def test_nothing_is_allocated():
    model, batch = layers(2**20, 3)  # four tebibytes a layer
    grad_fn = dp.filter_clipped_grad(layers_loss, l2_clip_norm=1.0, method="ghost")
    plan = plan_memory(grad_fn, model, batch, compiled=False)
    assert plan.compiled is None
    assert plan.parts.parameters == 3 * 2**42
    assert plan.total == plan.parts.total


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_what_is_spread_counts_by_its_part(axis_type):
    model, batch = layers(256, 2)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    rules = dp.ShardingRules(mesh, params=(("0", P("model")),), accumulators="examples")
    options = {"l2_clip_norm": 1.0, "sharding": rules, "method": "book_keeping"}
    grad_fn = dp.filter_clipped_grad(layers_loss, **options)
    noise = dp.gaussian_privatizer(stddev=1.0, key=0, sharding=rules)
    plan = plan_memory(grad_fn, model, batch, optimizer=optax.chain(noise, optax.adam(1e-3)))
    weight = 256**2 * 4
    # The first weight is halved, the other whole; of accumulators each has a quarter of that.
    assert 0 <= plan.parts.optimizer - 2 * (weight / 8 + weight / 4) < 64
    assert plan.parts.batch == 4 * 256 * 4 + 4
    assert plan.num_devices == 8
    given = plan.parts.parameters + plan.parts.optimizer + plan.parts.batch
    assert abs(plan.compiled.arguments - given) < 64
