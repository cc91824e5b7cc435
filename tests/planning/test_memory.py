"""The memory planner, against counts by hand and against the compiler."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.planning import TransformerShape, plan_memory
from eqx_dp.planning.footprint import Footprint
from eqx_dp.planning.liveness import Buffer, Operation, breadth_first, worst_moment
from tests import models


def held(function, *shapes, platform="cpu"):
    """What a function holds beside what it is given and gives back."""
    program = jax.make_jaxpr(function)(*shapes)
    return Footprint(platform, {}).held(program, [(frozenset(), False)] * len(shapes)).total()


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# What is alive when.


def test_a_chain_holds_two_neighbours():
    a, b, c, d = (Buffer(size, "x") for size in (10, 20, 5, 1))
    chain = [Operation([], [a]), Operation([a], [b]), Operation([b], [c]), Operation([c], [d])]
    assert worst_moment(chain, [d]).total() == 30
    assert worst_moment(chain, [a], has_room=False).total() == 35  # the first is kept to the end
    assert worst_moment(chain, [a]).total() == 25  # where there is room for it outside
    taken = [*chain[:1], Operation([a], [b], takes_over=[(b, a)]), *chain[2:]]
    assert worst_moment(taken, [d]).total() == 25


def test_a_loop_writes_where_it_carries_unless_that_is_still_read():
    old, new, other = Buffer(10, "x", is_own=False), Buffer(10, "x"), Buffer(3, "x")
    reads_first = [Operation([old], [other]), Operation([other], [new])]
    reads_last = [Operation([], [new]), Operation([old, new], [other])]
    assert worst_moment(reads_first, [new], [old]).total() == 3
    assert worst_moment(reads_last, [new], [old]).total() == 13


def test_breadth_first_runs_what_is_ready():
    a, b, c, d = (Buffer(1, "x") for _ in range(4))
    deep = [Operation([], [a]), Operation([a], [b]), Operation([], [c]), Operation([b, c], [d])]
    assert [op.writes[0] for op in breadth_first(deep)] == [a, c, b, d]


# What is stored.


def test_elementwise_operations_are_not_stored():
    x = array(1000, 10)
    assert held(lambda x: jnp.sum(2 * x + 1), x) == 0
    assert held(lambda x: jnp.sum(jnp.exp(x) + 1), x) == 0
    # Two want the exponential: it is stored.
    assert held(lambda x: jnp.sum(jnp.exp(x) / jnp.sum(jnp.exp(x)[::2], 0)), x) >= 0
    twice = lambda x: (lambda e: jnp.sum(e / jnp.sum(e, axis=0)))(jnp.exp(x))  # noqa: E731
    assert held(twice, x) >= 40_000


def test_contractions_are_stored_and_widened_on_cpu():
    x, w, v = array(100, 20), array(20, 30), array(30, 40)
    hidden = 100 * 30 * 4
    assert held(lambda x, w, v: x @ w @ v, x, w, v) == hidden
    narrow = [array(*s.shape, dtype=jnp.bfloat16) for s in (x, w, v)]
    assert held(lambda x, w, v: x @ w @ v, *narrow, platform="gpu") == hidden // 2
    # Three operands and two results in float32, of which the last gives way to the rounded one.
    first = 4 * (100 * 20 + 20 * 30 + 100 * 30)
    assert first <= held(lambda x, w, v: x @ w @ v, *narrow) <= first + 4 * (30 * 40 + 100 * 40)


def test_a_scan_counts_its_body_once_and_its_stack_as_a_whole():
    w = array(24, 30, 30)

    def run(w):
        def layer(x, w):
            y = x @ w
            return y, y

        return jnp.sum(jax.lax.scan(layer, jnp.zeros((50, 30)), w)[1] ** 2)

    stack, carry = 24 * 50 * 30 * 4, 50 * 30 * 4
    assert stack + carry <= held(run, w) <= stack + 4 * carry


# Plans.


def mlp(**options):
    case = models.mlp()
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, **options)
    shapes = eqx.filter_eval_shape(lambda: case.model)
    batch = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.batch(16)]
    return grad_fn, shapes, batch


def sizes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "size"))


def test_a_plan_adds_up_and_is_data():
    grad_fn, model, batch = mlp(method="per_example", microbatch_size=4)
    noise = dp.gaussian_privatizer(stddev=1.0, key=jax.random.key(0))
    plan = plan_memory(
        grad_fn, model, *batch, optimizer=optax.chain(noise, optax.adam(1e-3)), device_memory=2**30
    )
    formula, compiled = plan.formula, plan.compiled
    parts = ("parameters", "gradients", "optimizer", "batch", "activations", "per_example")
    total = sum(getattr(formula, part) for part in (*parts, "noise", "other"))
    assert formula.total == total
    assert formula.parameters >= sizes(model)
    assert 0 <= formula.optimizer - 2 * sizes(model) < 64  # mu and nu, and counters
    assert formula.batch == sizes(batch) + 16  # and the mask
    given = sizes(model) + formula.optimizer + formula.batch
    assert abs(compiled.arguments - given) < 64
    assert compiled.shared >= 3 * sizes(model)  # the old state gives way to the new
    assert compiled.total == (
        compiled.arguments + compiled.results - compiled.shared + compiled.temporary
    )
    assert plan.total == compiled.total
    assert plan.fits(plan.total)
    assert not plan.fits(plan.total - 1)
    assert (plan.method, plan.microbatch_size, plan.num_examples) == ("per_example", 4, 16)
    assert json.loads(json.dumps(plan.to_dict()))["compiled_total"] == compiled.total
    for word in ("per-example", "compiled", "fits a device of 1.00 GiB", "microbatch 4"):
        assert word in str(plan)


class Layers(eqx.Module):
    weights: list[jax.Array]

    def __call__(self, x):
        for weight in self.weights:
            x = jax.nn.relu(weight @ x)
        return x


def layers(width, depth, batch=16):
    model = Layers([array(width, width) for _ in range(depth)])
    return model, array(batch, width)


def layers_loss(model, x):
    return jnp.sum(model(x) ** 2)


def test_nothing_is_allocated():
    model, batch = layers(2**20, 3)  # four tebibytes a layer
    grad_fn = dp.filter_clipped_grad(layers_loss, l2_clip_norm=1.0, method="ghost")
    plan = plan_memory(grad_fn, model, batch, compiled=False)
    assert plan.compiled is None
    assert plan.formula.parameters >= 3 * 2**42
    assert plan.total == plan.formula.total


def test_per_example_gradients_are_proportional_to_the_microbatch():
    model, batch = layers(512, 3, batch=64)  # less, and the noise would weigh more
    grad_fn = dp.filter_clipped_grad(layers_loss, l2_clip_norm=1.0, method="per_example")

    def total(size):
        return plan_memory(grad_fn, model, batch, microbatch_size=size, compiled=False).total

    per_example = 3 * 512**2 * 4
    assert (total(32) - total(16)) / 16 == pytest.approx(per_example, rel=0.1)
    book_keeping = plan_memory(grad_fn, model, batch, method="book_keeping", compiled=False)
    assert book_keeping.total < total(32) / 2


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_what_is_spread_counts_by_its_part(axis_type):
    model, batch = layers(256, 2)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    rules = dp.ShardingRules(mesh, params=(("weights.0", P("model")),), accumulators="examples")
    grad_fn = dp.filter_clipped_grad(
        layers_loss, l2_clip_norm=1.0, sharding=rules, method="book_keeping"
    )
    noise = dp.gaussian_privatizer(stddev=1.0, key=jax.random.key(0), sharding=rules)
    plan = plan_memory(grad_fn, model, batch, optimizer=optax.chain(noise, optax.adam(1e-3)))
    weight = 256**2 * 4
    # The first weight is halved, the other whole; of accumulators each has a quarter of that.
    assert 0 <= plan.formula.optimizer - 2 * (weight / 8 + weight / 4) < 64
    assert plan.formula.batch == 4 * 256 * 4 + 4
    assert plan.num_devices == 8
    given = weight * 1.5 + plan.formula.optimizer + plan.formula.batch
    assert abs(plan.compiled.arguments - given) < 64
    assert plan.formula.total == pytest.approx(plan.compiled.total, rel=0.35)


def test_frozen_leaves_have_no_optimizer_state():
    model, batch = layers(64, 2)
    trained = Layers([False, True])
    grad_fn = dp.filter_clipped_grad(layers_loss, l2_clip_norm=1.0, filter_spec=trained)
    plan = plan_memory(grad_fn, model, batch, optimizer=optax.adam(1e-3), compiled=False)
    assert 0 <= plan.formula.optimizer - 2 * 64**2 * 4 < 64


def test_the_textbook():
    # Three tables of T x T numbers a head and layer, beside 12 width^2 parameters a layer.
    heads, width, length, layers_ = 8, 1024, 1024, 24
    shape = TransformerShape(heads, width, length)
    tables = layers_ * 3 * heads * length**2 * 4
    assert shape.activation_bytes(layers_ * 12 * width**2 * 4, 3) == pytest.approx(3 * tables)
    with pytest.raises(ValueError, match="heads must divide the width"):
        TransformerShape(3, 64, 8)
    with pytest.raises(ValueError, match="length must be at least 1"):
        TransformerShape(3, 63, 0)


def test_refuses_what_is_no_clipped_gradient():
    case = models.mlp()
    with pytest.raises((ValueError, TypeError)):
        plan_memory(jax.grad(case.loss), case.model, *case.batch(2))
    with pytest.raises(ValueError, match="No batch"):
        plan_memory(dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0), case.model)
