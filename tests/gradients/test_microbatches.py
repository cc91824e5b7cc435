"""A batch in microbatches: what is computed, what comes back, and where."""

import collections
import functools

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

NUM = 10
MASKS = {
    "none real": [],
    "the first": [0],
    "the last": [9],
    "two apart": [2, 8],
    "a microbatch": [1, 4, 7],
    "one more": [0, 4, 7, 9],
    "two microbatches": [0, 1, 4, 6, 7, 9],
    "interleaved": [1, 3, 5, 7, 9],
    "in front": [0, 1, 2, 3],
    "at the end": [5, 6, 7, 8, 9],
    "all but one": [0, 1, 2, 3, 4, 6, 7, 8, 9],
    "all": list(range(NUM)),
}
SIZES = [1, 3, 4, None, NUM, 25]


def padding_of(real):
    mask = np.ones(NUM, bool)
    mask[list(real)] = False
    return mask


class Counting:
    """A step that notes the examples that it is given, and which of them are padding."""

    def __init__(self):
        self.seen = []

    def __call__(self, leaves, is_padding):
        (x,) = leaves
        jax.debug.callback(lambda *of: self.seen.append(tuple(map(np.asarray, of))), x, is_padding)
        real = jnp.where(is_padding, 0, x)
        return real.sum(), {"value": 2 * x + 1, "odd": x % 2 == 1, "row": jnp.stack([x, -x], 1)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*MASKS, "no mask"])
def test_what_is_computed_and_what_comes_back(name, size):
    has_mask = name in MASKS
    real = MASKS.get(name, range(NUM))
    step, x = Counting(), jnp.arange(NUM) + 100
    run = jax.jit(lambda x, mask: over_microbatches(step, [x], mask, NUM, size))
    total, values = run(x, padding_of(real) if has_mask else None)
    jax.effects_barrier()
    at_once = min(size or NUM, NUM)
    count = -(-len(real) // at_once)
    # As many microbatches as hold an example; every example once, in the order of slots.
    assert len(step.seen) == count
    assert all(x.shape == (at_once,) for x, _ in step.seen)
    given = np.concatenate([np.zeros(0, int), *(x for x, _ in step.seen)])
    is_padding = np.concatenate([np.zeros(0, bool), *(mask for _, mask in step.seen)])
    np.testing.assert_array_equal(given[~is_padding], 100 + np.array(list(real), int))
    # What is left over comes last, and holds the first real example.
    np.testing.assert_array_equal(is_padding, np.arange(count * at_once) >= len(real))
    assert set(given[is_padding]) <= {100 + min(real, default=0)}
    # Results.
    assert int(total) == sum(100 + i for i in real)
    there = ~padding_of(real)
    np.testing.assert_array_equal(values["value"], np.where(there, 2 * x + 1, 0))
    np.testing.assert_array_equal(values["odd"], there & (np.asarray(x) % 2 == 1))
    np.testing.assert_array_equal(values["row"], np.where(there[:, None], np.stack([x, -x], 1), 0))
    assert values["odd"].dtype == bool
    assert values["value"].dtype == x.dtype


@pytest.mark.parametrize("size", SIZES)
def test_only_the_trip_count_depends_on_the_mask(size):
    """One program for all masks: no branch, and no loop around a batch that has no mask."""
    step = Counting()
    run = jax.jit(lambda x, mask: over_microbatches(step, [x], mask, NUM, size))
    x = jnp.arange(NUM)
    for real in MASKS.values():
        run(x, padding_of(real))
    assert run._cache_size() == 1
    program = str(jax.make_jaxpr(run)(x, padding_of([])))
    assert "cond[" not in program
    without = str(jax.make_jaxpr(lambda x: run(x, None))(x))
    assert "while[" not in without
    assert ("scan[" in without) == ((size or NUM) < NUM)


def test_devices_may_agree_on_more():
    """What is computed beyond the examples there are adds nothing."""
    step, x = Counting(), jnp.arange(NUM) + 100
    for real, more in (([4], 2), ([], 1), ([1, 2, 3, 4], 4)):
        total, values = over_microbatches(
            step, [x], jnp.asarray(padding_of(real)), NUM, 3, lambda _, more=more: jnp.int32(more)
        )
        jax.effects_barrier()
        assert len(step.seen) == more
        step.seen.clear()
        assert int(total) == sum(100 + i for i in real)
        np.testing.assert_array_equal(np.flatnonzero(values["value"]), real)


# The clipped gradient.


def loss_and_aux(model, x, y):
    loss = models.squared_error(model, x, y)
    return loss, {"int": jnp.int32(7) + jnp.int32(x[0] > 0), "bool": y > -10, "x": x}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
def test_against_the_oracle(method, size):
    case = models.linear_regression()
    batch = case.batch(NUM)
    options = {"l2_clip_norm": 0.7, "has_aux": True}
    grad_fn = compiled(method, size)
    for real in MASKS.values():
        padding = padding_of(real)
        per_example, grads = grad_fn(case.model, *batch, is_padding_example=padding)
        truth = oracle.clipped_gradients(
            loss_and_aux, case.model, *batch, is_padding_example=padding, **options
        )
        assert oracle.relative_error(grads, truth.grads) < 1e-5 + oracle.room(NUM)
        assert oracle.relative_error(per_example.loss, truth.loss) < 1e-5
        assert oracle.relative_error(per_example.grad_norm, truth.grad_norm) < 1e-5
        assert oracle.relative_error(per_example.aux, truth.aux) < 1e-6
        assert (per_example.aux["int"].dtype, per_example.aux["bool"].dtype) == (jnp.int32, bool)
        for leaf in jax.tree.leaves(per_example):
            assert not np.asarray(leaf)[padding].any()


@functools.cache
def compiled(method, size):
    return jitted.value_and_grad(
        loss_and_aux, l2_clip_norm=0.7, has_aux=True, method=method, microbatch_size=size
    )


@pytest.mark.parametrize("size", [1, 3, None])
def test_the_order_of_slots_does_not_matter(size):
    case = models.linear_regression()
    batch, padding = case.batch(NUM), padding_of(MASKS["one more"])
    grad_fn = compiled("book_keeping", size)
    per_example, grads = grad_fn(case.model, *batch, is_padding_example=padding)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(NUM)
        shuffled = [leaf[order] for leaf in batch]
        other, same = grad_fn(case.model, *shuffled, is_padding_example=padding[order])
        assert oracle.relative_error(same, grads) < 1e-6
        in_order = jax.tree.map(lambda leaf, order=order: leaf[order], per_example)
        assert oracle.relative_error(other, in_order) < 1e-6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 3, None])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -7.0, 1e38])
def test_padding_stops_nothing_and_changes_no_bit(garbage, size):
    """The loss refuses such numbers: no slot that is padding is looked at."""

    def loss(model, x, y):
        x = eqx.error_if(x, ~jnp.all(jnp.abs(x) < 5), "an example that was never there")
        return models.squared_error(model, x, y)

    case = models.linear_regression()
    x, y = case.batch(NUM)
    x = jnp.clip(x, -4, 4)
    grad_fn = jitted.value_and_grad(loss, l2_clip_norm=0.7, microbatch_size=size)
    for name in ("none real", "the last", "two apart", "one more", "interleaved"):
        padding = padding_of(MASKS[name])
        filled = jnp.where(padding[:, None], garbage, x)
        found = grad_fn(case.model, filled, y, is_padding_example=padding)
        expected = grad_fn(case.model, x, y, is_padding_example=padding)
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.isfinite(one).all()
    bad = jnp.where(padding_of([2])[:, None], x, garbage)
    with pytest.raises(Exception, match="never there"):
        jax.block_until_ready(grad_fn(case.model, bad, y, is_padding_example=padding_of([2])))


def test_a_loss_that_loops_until_done_ends_on_padding():
    """Zeros would keep it busy for ever."""

    def loss(model, x):
        steps, _ = jax.lax.while_loop(
            lambda state: state[1] < 10, lambda state: (state[0] + 1, state[1] * x), (0, 1.0)
        )
        return model * jax.lax.stop_gradient(steps.astype(jnp.float32))

    x = jnp.where(padding_of([3, 6]), 0.0, 2.0)
    grads = jitted.grad(loss, l2_clip_norm=100.0, microbatch_size=4)(
        jnp.ones(()), x, is_padding_example=padding_of([3, 6])
    )
    assert float(grads) == pytest.approx(8.0, rel=1e-5)


# On a mesh.


REAL_OF_16 = {
    "none": [],
    "one device alone": [5],
    "different numbers": [0, 1, 2, 3, 4, 6, 12],
    "one device with none": [1, 2, 9, 10, 11, 15],
    "all": list(range(16)),
}


def on_a_mesh_and_on_one_device(loss, name, size, axes):
    rules = dp.ShardingRules(mesh_of("auto", **axes), examples=("data",))
    options = {"l2_clip_norm": 0.7, "microbatch_size": size}
    padding = np.ones(16, bool)
    padding[REAL_OF_16[name]] = False
    model = jnp.arange(1.0, 5.0)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    x[:, 0] = np.arange(16)
    expected = jitted.value_and_grad(square, **options)(model, x, is_padding_example=padding)
    grad_fn = dp.filter_value_and_clipped_grad(loss, sharding=rules, **options)
    with jax.set_mesh(rules.mesh):
        found = eqx.filter_jit(grad_fn)(
            rules.shard(model), *rules.shard_batch((x,)), is_padding_example=padding
        )
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5 + oracle.room(16), atol=1e-6)
    for leaf in jax.tree.leaves(found[0]):
        assert not np.asarray(leaf)[padding].any()


def square(model, x):
    return jnp.sum(model * x) ** 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("axes", [{"data": 4, "model": 2}, {"data": 4}], ids=str)
@pytest.mark.parametrize("size", [1, 3, None])
@pytest.mark.parametrize("name", REAL_OF_16)
def test_devices_with_different_numbers_of_examples(name, size, axes):
    on_a_mesh_and_on_one_device(square, name, size, axes)


@pytest.mark.parametrize("name", REAL_OF_16)
def test_each_device_computes_its_own_examples_alone(name):
    counts = collections.Counter()

    def loss(model, x):
        jax.debug.callback(lambda first: counts.update([int(first)]), x[0])
        return square(model, x)

    on_a_mesh_and_on_one_device(loss, name, 1, {"data": 4})
    jax.effects_barrier()
    assert counts == dict.fromkeys(REAL_OF_16[name], 1)


@pytest.mark.parametrize("num_real", [0, 1, 4])
def test_what_devices_have_to_compute_beside_their_own_says_nothing_of_padding(num_real):
    """Slots hold a copy of the first real example; without any, zeros and not what they held."""
    x, seen = jnp.arange(1.0, 5.0), []

    def step(leaves, is_padding):
        jax.debug.callback(lambda x: seen.append(float(x)), leaves[0][0])
        return jnp.sum(jnp.where(is_padding, 0, leaves[0])), leaves[0]

    padding = jnp.arange(4) >= num_real
    total, values = over_microbatches(step, [x], padding, 4, 1, agree=lambda trips: trips + 2)
    jax.effects_barrier()
    real = list(range(1, num_real + 1))
    assert sorted(seen) == sorted([*real, *[1.0 if num_real else 0.0] * 2])
    assert total == sum(real)
    np.testing.assert_array_equal(values, [*real, *[0] * (4 - num_real)])
