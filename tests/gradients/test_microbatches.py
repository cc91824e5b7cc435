"""A batch in microbatches: what is computed, what comes back, and where."""

import collections
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients.microbatches import over_microbatches
from tests import models, oracle
from tests.gradients import jitted
from tests.sharding.losses import mesh_of
from tests.tiers import METHODS, curated

NUM = 10
MASKS = {
    "none real": [],
    "the first": [0],
    "the last": [9],
    "two apart": [2, 8],
    "one more": [0, 4, 7, 9],
    "interleaved": [1, 3, 5, 7, 9],
    "all": list(range(NUM)),
}
SIZES = [1, 3, None]


def padding_of(real):
    mask = np.ones(NUM, bool)
    mask[list(real)] = False
    return mask


def loss_and_aux(model, x, y):
    loss = models.squared_error(model, x, y)
    return loss, {"int": jnp.int32(7) + jnp.int32(x[0] > 0), "bool": y > -10, "x": x}


@pytest.mark.parametrize(
    ("method", "size"),
    curated(
        itertools.product(METHODS, SIZES),
        [("per_example", 3), ("book_keeping", 1), ("book_keeping", None), ("ghost", 3)],
    ),
)
def test_against_the_oracle(method, size):
    case = models.linear_regression()
    batch = case.batch(NUM)
    grad_fn = compiled(method, size)
    for real in MASKS.values():
        padding = padding_of(real)
        per_example, grads = grad_fn(case.model, *batch, is_padding_example=padding)
        options = {"l2_clip_norm": 0.7, "has_aux": True, "is_padding_example": padding}
        truth = oracle.clipped_gradients(loss_and_aux, case.model, *batch, **options)
        assert oracle.relative_error(grads, truth.grads) < 1e-5 + oracle.room(NUM)
        assert oracle.relative_error(per_example.loss, truth.loss) < 1e-5
        assert oracle.relative_error(per_example.grad_norm, truth.grad_norm) < 1e-5
        assert oracle.relative_error(per_example.aux, truth.aux) < 1e-6
        assert (per_example.aux["int"].dtype, per_example.aux["bool"].dtype) == (jnp.int32, bool)
        for leaf in jax.tree.leaves(per_example):
            assert not np.asarray(leaf)[padding].any()


@functools.cache
def compiled(method, size):
    options = {"method": method, "microbatch_size": size, "has_aux": True}
    return jitted.value_and_grad(loss_and_aux, l2_clip_norm=0.7, **options)


@pytest.mark.parametrize(
    ("size", "method"), [(1, "per_example"), *itertools.product(SIZES[1:], METHODS)]
)
def test_padding_stops_nothing_and_changes_no_bit(size, method):
    """The loss refuses such numbers, and zeros: no slot that is padding is looked at or blank."""

    def loss(model, x, y):
        is_there = (jnp.abs(x) < 5) & (x != 0)
        x = eqx.error_if(x, ~jnp.all(is_there), "an example that was never there")
        return models.squared_error(model, x, y)

    case = models.linear_regression()
    x, y = case.batch(NUM)
    x = jnp.clip(x, -4, 4)
    options = {"l2_clip_norm": 0.7, "microbatch_size": size, "method": method}
    grad_fn = jitted.value_and_grad(loss, **options)
    names = ("none real", "the last", "two apart", "one more", "interleaved")
    for name, garbage in itertools.product(names, (np.nan, np.inf, -7.0, 1e38, 0.0)):
        padding = padding_of(MASKS[name])
        filled = jnp.where(padding[:, None], garbage, x)
        found = grad_fn(case.model, filled, y, is_padding_example=padding)
        expected = grad_fn(case.model, x, y, is_padding_example=padding)
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.isfinite(one).all()
    bad = jnp.where(padding_of([2])[:, None], x, np.nan)
    with pytest.raises(Exception, match="never there"):
        jax.block_until_ready(grad_fn(case.model, bad, y, is_padding_example=padding_of([2])))


def test_a_step_is_traced_once_and_is_not_run_on_padding_alone():
    """Tracing it again for the shapes of its sums would double the time of tracing."""
    traced, ran = [], []

    def step(examples, is_padding):
        traced.append(len(is_padding))
        jax.debug.callback(lambda mask: ran.append(int(np.sum(~mask))), is_padding)
        return jnp.where(is_padding, 0, examples[0]).sum(), is_padding

    run = jax.jit(lambda x, padding: over_microbatches(step, [x], padding, NUM, 3))
    for real in MASKS.values():
        ran.clear()
        total, _ = run(jnp.arange(10.0), padding_of(real))
        jax.effects_barrier()
        assert (float(total), sum(ran), len(ran)) == (sum(real), len(real), -(-len(real) // 3))
    ran.clear()  # without a mask all are there
    total, _ = jax.jit(lambda x: over_microbatches(step, [x], None, NUM, 3))(jnp.arange(10.0))
    jax.effects_barrier()
    assert (float(total), sorted(ran), traced) == (45, [1, 3, 3, 3], [3])


def test_slots_hold_zeros_where_other_devices_alone_have_examples():
    """One more microbatch is agreed on; padding slots count here, and hold a real example."""
    for real, total in (([], 0), ([2], 6 * 3)):
        arguments = [jnp.arange(1.0, 11.0)], padding_of(real), NUM, 3, lambda count: count + 1
        found, _ = over_microbatches(lambda xs, mask: (jnp.sum(xs[0]), mask), *arguments)
        assert found == total


# On a mesh.


REAL_OF_16 = {
    "none": [],
    "one device alone": [5],
    "different numbers": [0, 1, 2, 3, 4, 6, 12],
    "one device with none": [1, 2, 9, 10, 11, 15],
    "all": list(range(16)),
}


@pytest.mark.parametrize(
    ("size", "axes"),
    [(3, {"data": 4, "model": 2}), *curated([(1, {"data": 4}), (None, {"data": 4})], [])],
)
def test_devices_with_different_numbers_of_examples(size, axes):
    """Each computes its own examples alone, and the sum is that of one device."""
    counts = collections.Counter()

    def square(model, x):
        return jnp.sum(model * x) ** 2

    def counted(model, x):
        jax.debug.callback(lambda first: counts.update([int(first)]), x[0])
        return square(model, x)

    rules = dp.ShardingRules(mesh_of("auto", **axes), examples=("data",))
    options = {"l2_clip_norm": 0.7, "microbatch_size": size}
    alone = jitted.value_and_grad(square, **options)
    on_mesh = jitted.value_and_grad(counted, sharding=rules, **options)
    model = jnp.arange(1.0, 5.0)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    x[:, 0] = np.arange(16)
    for real in REAL_OF_16.values():
        counts.clear()
        padding = ~np.isin(np.arange(16), real)
        expected = alone(model, x, is_padding_example=padding)
        with jax.set_mesh(rules.mesh):
            batch = rules.shard_batch((x,))
            found = on_mesh(rules.shard(model), *batch, is_padding_example=padding)
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5 + oracle.room(16), atol=1e-6)
        for leaf in jax.tree.leaves(found[0]):
            assert not np.asarray(leaf)[padding].any()
        jax.effects_barrier()
        assert size != 1 or counts == dict.fromkeys(real, 1)
