"""Every planted fault is found, by the rule that it breaks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_dp as dp
from eqx_dp import audit
from tests.audit.by_hand import (
    BATCH,
    CLIP_NORM,
    LOSS,
    MODEL,
    NOISE,
    STDDEV,
    audited,
    clipped,
    norms,
    rows,
    rules_of,
    stepped,
    weighted,
)


def real(found, mask):
    return jnp.isfinite(found) & ~mask


# Gradients that are wrong, each in a step that is otherwise right.


def not_clipped(model, x, y, mask):
    gradients = rows(model, x, y)
    return weighted(gradients, jnp.ones(len(x)), real(norms(gradients), mask))


def clipped_as_a_whole(model, x, y, mask):
    total = not_clipped(model, x, y, mask)
    factor = jnp.minimum(1, CLIP_NORM / optax.tree.norm(total))
    return jax.tree.map(lambda leaf: leaf * factor, total)


def clipped_by_microbatch(model, x, y, mask):
    def one(x, y, mask):
        total = not_clipped(model, x, y, mask)
        factor = jnp.minimum(1, CLIP_NORM / jnp.maximum(optax.tree.norm(total), 1e-30))
        return jax.tree.map(lambda leaf: jnp.nan_to_num(leaf * factor), total)

    parts = jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), (x, y, mask))
    return jax.tree.map(lambda leaf: leaf.sum(0), jax.vmap(one)(*parts))


def clipped_leaf_by_leaf(model, x, y, mask):
    """One clip norm a leaf, and the sensitivity of one."""
    gradients = rows(model, x, y)
    counts = real(norms(gradients), mask)
    return jax.tree.map(
        lambda leaf: weighted([leaf], jnp.minimum(1, CLIP_NORM / norms([leaf])), counts)[0],
        gradients,
    )


def norms_rounded_to_bfloat16(model, x, y, mask):
    gradients = rows(model, x, y)
    found = norms(gradients).astype(jnp.bfloat16).astype(jnp.float32)
    return weighted(gradients, jnp.minimum(1, CLIP_NORM / found), real(found, mask))


def summed_in_bfloat16(model, x, y, mask):
    gradients = rows(model, x, y)
    found = norms(gradients)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), gradients)
    factors = jnp.minimum(1, CLIP_NORM / found).astype(jnp.bfloat16)
    total = weighted(narrow, factors, real(found, mask))
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), total)


def clipped_at_the_median(model, x, y, mask):
    gradients = rows(model, x, y)
    found = norms(gradients)
    bound = jnp.nanmedian(found)
    return weighted(gradients, jnp.minimum(1, bound / found), real(found, mask))


def scaled_behind_the_clip(model, x, y, mask):
    return jax.tree.map(lambda leaf: 4 * leaf, clipped(model, x, y, mask))


def with_statistics_of_the_batch(model, x, y, mask):
    x = jnp.where(jnp.isfinite(x), x, 0)
    return clipped(model, x - x.mean(0), y, mask)


def poisoned(model, x, y, mask):
    """NaN times zero is NaN."""
    gradients = rows(model, x, y)
    factors = jnp.minimum(1, CLIP_NORM / norms(gradients))
    return weighted(gradients, factors * ~mask, jnp.ones(len(x), bool))


def zero_if_poisoned(model, x, y, mask):
    total = poisoned(model, x, y, mask)
    is_finite = jnp.isfinite(optax.tree.norm(total))
    return jax.tree.map(lambda leaf: jnp.where(is_finite, leaf, 0), total)


def padding_counts(model, x, y, mask):
    return clipped(model, x, y, jnp.zeros_like(mask))


def an_example_twice(model, x, y, mask):
    """What the last slot holds counts in every padding slot, as an index of -1 has it."""
    x, y = (jnp.where(mask.reshape(-1, *[1] * (part.ndim - 1)), part[2], part) for part in (x, y))
    return clipped(model, x, y, jnp.zeros_like(mask))


GRADIENTS = {
    not_clipped: "movement",
    clipped_as_a_whole: "movement",
    clipped_by_microbatch: "movement",
    clipped_leaf_by_leaf: "movement",
    norms_rounded_to_bfloat16: "movement",
    summed_in_bfloat16: "movement",
    clipped_at_the_median: "movement",
    scaled_behind_the_clip: "movement",
    with_statistics_of_the_batch: "movement",
    poisoned: "movement",
    zero_if_poisoned: "movement",
    padding_counts: "padding",
    an_example_twice: "movement",
}


@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda gradient: gradient.__name__)
def test_a_wrong_gradient(gradient):
    report = audited(*stepped(gradient))
    assert GRADIENTS[gradient] in rules_of(report)
    with pytest.raises(ValueError, match=GRADIENTS[gradient]):
        report.raise_if_violated()


def test_a_movement_is_measured():
    report = audited(*stepped(scaled_behind_the_clip))
    assert report.largest == pytest.approx(4, rel=1e-4)
    (violation,) = report.violations
    assert "by 4 times the sensitivity" in violation.found
    assert "others " in violation.where


def test_a_sensitivity_of_another_relation():
    step, state = stepped(clipped)
    replace_one = dp.NeighboringRelation.REPLACE_ONE
    report = audited(step, state, neighboring_relation=replace_one)
    assert rules_of(report) == {"movement"}
    assert 1.5 < report.largest <= 2 + 2 * report.rounding
    assert audited(step, state, neighboring_relation=replace_one, sensitivity=2 * CLIP_NORM).ok


def test_a_mean_over_the_number_sampled():
    """An example moves a mean of few examples further than its share of the expected batch."""

    def mean(model, x, y, mask):
        total = clipped(model, x, y, mask)
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(1, jnp.sum(~mask)), total)

    assert rules_of(audited(*stepped(mean), sensitivity=CLIP_NORM / 6)) == {"movement"}


def test_an_optimizer_before_the_noise():
    report = audited(*stepped(clipped, optax.chain(optax.adam(1e-2), NOISE)))
    assert {"movement", "beside the noise"} & rules_of(report)


def test_noise_by_a_key_that_depends_on_the_data():
    @jax.jit
    def step(model, state, x, y, mask):
        key = jax.random.fold_in(state.key, jnp.sum(jnp.nan_to_num(x)).astype(jnp.int32))
        gradient, after = NOISE.update(clipped(model, x, y, mask), state._replace(key=key))
        return gradient, after._replace(key=state.key)

    report = audited(step, NOISE.init(MODEL))
    assert rules_of(report) == {"noise"}
    assert "the noise changes with the data" in str(report)


def test_noise_by_hand_that_depends_on_the_data():
    @jax.jit
    def step(model, key, x, y, mask):
        key = jax.random.fold_in(key, jnp.sum(jnp.nan_to_num(x)).astype(jnp.int32))
        gradient = clipped(model, x, y, mask)
        return jax.tree.map(lambda g: g + STDDEV * jax.random.normal(key, g.shape), gradient)

    report = audited(step, jax.random.key(1), release=lambda result: result)
    assert "movement" in rules_of(report)


# What leaves beside the release.


def loss_of_the_batch(model, x, y, mask):
    losses = jax.vmap(LOSS, (None, 0, 0))(model, x, y)
    return jnp.where(mask, 0, losses).sum()


def with_its_loss(step):
    return lambda model, state, *batch: (
        *step(model, state, *batch),
        loss_of_the_batch(model, *batch),
    )


def with_its_size(step):
    return lambda model, state, x, y, mask: (*step(model, state, x, y, mask), jnp.sum(~mask))


def with_statistics_in_the_model(step):
    def telling(model, state, x, y, mask):
        after, state = step(model, state, x, y, mask)
        seen = jnp.where(mask, 0, jnp.isnan(y)).sum()
        return {**after, "bias": after["bias"] + 0.01 * seen}, state

    return telling


@pytest.mark.parametrize(
    ("telling", "result"),
    [(with_its_loss, "2"), (with_its_size, "2"), (with_statistics_in_the_model, "0.bias")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_results_beside_the_release(telling, result):
    step, state = stepped(clipped)
    report = audited(telling(step), state)
    assert rules_of(report) == {"beside the noise"}
    assert f"result {result} changes" in str(report)
    assert audited(telling(step), state, disclose=[result]).ok


def test_noise_for_one_leaf_alone():
    noise = optax.masked(NOISE, {"weight": True, "bias": False})
    report = audited(*stepped(clipped, optax.chain(noise, optax.sgd(0.1))))
    assert rules_of(report) == {"beside the noise"}
    assert "result 0.bias changes" in str(report)


def test_an_error_on_an_example():
    step, state = stepped(clipped)

    def checking(model, state, x, y, mask):
        x = eqx.error_if(x, ~jnp.isfinite(x), "not finite")
        return step(model, state, x, y, mask)

    report = audited(checking, state)
    assert rules_of(report) == {"stopped"}
    assert "not finite" not in str(report)


def test_an_engine_whose_examples_meet():
    grad_fn = dp.filter_clipped_grad(LOSS, l2_clip_norm=CLIP_NORM)

    @jax.jit
    def step(model, x, y, is_padding_example):
        x = x - jnp.nan_to_num(x).mean(0)
        return grad_fn(model, x, y, is_padding_example=is_padding_example)

    report = audit.neighbours(
        *(step, MODEL, *BATCH, jnp.zeros(6, bool)),
        private=(1, 2),
        padding=3,
        sensitivity=CLIP_NORM,
        release=lambda grads: grads,
    )
    assert rules_of(report) == {"movement", "padding"}
