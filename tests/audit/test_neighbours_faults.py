"""Every planted fault is found, by the rule that it breaks."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp import audit
from tests.audit.by_hand import (
    BATCH,
    CLIP_NORM,
    LOSS,
    MASK,
    MODEL,
    NOISE,
    PLAN,
    STDDEV,
    audited,
    clipped,
    noise_of,
    norms,
    rows,
    rules_of,
    stepped,
    weighted,
)

pytestmark = pytest.mark.sampled(6)

COMPILED = jax.jit(clipped)
REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE


def real(found, mask):
    return jnp.isfinite(found) & ~mask


# Gradients that are wrong, each in a step that is otherwise right.


def over_the_number_sampled(model, x, y, mask):
    total = clipped(model, x, y, mask)
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(1, jnp.sum(~mask)), total)


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
    over_the_number_sampled: "examples apart",
    not_clipped: "movement",
    clipped_as_a_whole: "movement",
    clipped_by_microbatch: "movement",
    clipped_leaf_by_leaf: "movement",
    norms_rounded_to_bfloat16: "movement",
    summed_in_bfloat16: "movement",
    clipped_at_the_median: "examples apart",
    scaled_behind_the_clip: "movement",
    with_statistics_of_the_batch: "examples apart",
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
    (violation,) = (each for each in report.violations if each.rule == "movement")
    assert "times the sensitivity" in violation.found
    assert "slot " in violation.where


def test_a_sensitivity_of_another_relation():
    step, state = stepped(clipped)
    plan = dp.PrivacyPlan(0.5, 10, 2.0, 1e-5, REPLACE_ONE)
    assert rules_of(audited(step, state, plan=None)) == set()
    report = audited(step, state, plan=plan)
    assert rules_of(report) == {"movement"}
    assert 1.5 < report.largest <= 2 + 2 * report.rounding


# Noise that is wrong.


def test_noise_divided_by_four():
    report = audited(*stepped(clipped, optax.chain(noise_of(STDDEV / 4), optax.adam(1e-2))))
    assert rules_of(report) == {"noise"}
    found = float(re.search(r"noise has ([\d.]+) times", report.violations[0].found)[1])
    assert 0.15 < found < 0.35


def test_noise_for_one_leaf_alone():
    noise = optax.masked(NOISE, {"weight": True, "bias": False})
    report = audited(*stepped(clipped, optax.chain(noise, optax.sgd(0.1))))
    assert rules_of(report) == {"beside the noise"}
    assert "result 0.bias changes with the data, and not with the noise" in str(report)


def test_an_optimizer_before_the_noise():
    report = audited(*stepped(clipped, optax.chain(optax.adam(1e-2), NOISE)))
    assert {"movement", "beside the noise"} & rules_of(report)


def test_noise_that_is_the_same_at_every_step():
    step, state = stepped(clipped)

    def forgetful(model, state, x, y, mask):
        return step(model, state, x, y, mask)[0], state

    report = audited(forgetful, state)
    assert rules_of(report) == {"noise"}
    assert "two steps have the same noise" in str(report)


def drawn_by_hand(noise):
    """A step that returns the noised gradient, and draws by a rule of its own."""

    @jax.jit
    def step(model, key, x, y, mask):
        return jax.tree.map(jnp.add, clipped(model, x, y, mask), noise(key, model, x))

    return step


def released(result):
    return result


def normal(key, leaf):
    return STDDEV * jax.random.normal(key, leaf.shape)


SEED = jax.random.key(0)


def test_noise_of_a_constant_key():
    step = drawn_by_hand(lambda key, model, x: jax.tree.map(lambda p: normal(SEED, p), model))
    report = audited(step, jax.random.key(1), release=released)
    assert rules_of(report) == {"noise"}


def test_one_noise_for_two_leaves():
    model = {"one": jnp.zeros(4), "other": jnp.zeros(4)}
    x = jax.random.normal(SEED, (6, 2, 4))

    def loss(model, x):
        return model["one"] @ x[0] + model["other"] @ x[1]

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=CLIP_NORM)

    @jax.jit
    def step(model, key, x, is_padding_example):
        gradient = grad_fn(model, x, is_padding_example=is_padding_example)
        return jax.tree.map(lambda leaf: leaf + normal(key, leaf), gradient)

    report = audit.neighbours(
        step,
        model,
        jax.random.key(1),
        x,
        is_padding_example=MASK,
        private=["x"],
        sensitivity=CLIP_NORM,
        plan=PLAN,
        release=released,
    )
    assert rules_of(report) == {"noise"}
    assert "the noise of leaf 0" in str(report)


def test_noise_that_depends_on_the_data():
    def noise(key, model, x):
        key = jax.random.fold_in(key, jnp.sum(jnp.nan_to_num(x)).astype(jnp.int32))
        return jax.tree.map(lambda p: normal(key, p), model)

    report = audited(drawn_by_hand(noise), jax.random.key(1), release=released)
    assert "movement" in rules_of(report)


def test_noise_of_the_privatizer_by_a_key_that_depends_on_the_data():
    @jax.jit
    def step(model, state, x, y, mask):
        key = jax.random.fold_in(state.key, jnp.sum(jnp.nan_to_num(x)).astype(jnp.int32))
        gradient, after = NOISE.update(clipped(model, x, y, mask), state._replace(key=key))
        return gradient, after._replace(key=state.key)

    report = audited(step, NOISE.init(MODEL))
    assert "noise" in rules_of(report)
    assert "the noise changes with the data" in str(report)


def test_noise_from_elsewhere():
    """Numpy's generator goes on from call to call; traced, it is a constant."""
    rng = np.random.default_rng(0)

    def eager(model, x, y, mask):
        np.asarray(x)  # not to be traced
        gradient = COMPILED(model, x, y, mask)
        return jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape), gradient)

    report = audited(eager, release=released)
    assert "two calls with the same arguments" in str(report)


# What leaves beside the release.


def test_a_loss_beside_the_model():
    step, state = stepped(clipped)

    def telling(model, state, x, y, mask):
        losses = jax.vmap(LOSS, (None, 0, 0))(model, x, y)
        return *step(model, state, x, y, mask), jnp.where(mask, 0, losses).sum()

    report = audited(telling, state)
    assert rules_of(report) == {"beside the noise"}
    assert "result 2 " in str(report)
    assert audited(telling, state, disclose=["2"]).ok


def test_statistics_in_the_state():
    """They move with the noise as well, in the same leaf as what is released."""
    step, state = stepped(clipped)

    def telling(model, state, x, y, mask):
        after, state = step(model, state, x, y, mask)
        seen = jnp.where(mask, 0, jnp.where(jnp.isnan(y), 1, 0)).sum()
        return {**after, "bias": after["bias"] + 0.01 * seen}, state

    report = audited(telling, state)
    assert rules_of(report) == {"beside the noise"}
    assert "although what is released is the same" in str(report)


def test_a_counter_of_examples():
    step, state = stepped(clipped)

    def counting(model, state, x, y, mask):
        return *step(model, state, x, y, mask), jnp.sum(~mask)

    report = audited(counting, state)
    assert "counters" in rules_of(report)
    assert audited(counting, state, disclose=["*"], plan=None).ok


# What data must not decide.


@pytest.mark.slow
def test_shapes_that_depend_on_the_data():
    def cut(model, x, y, mask):
        mask = np.asarray(mask)
        return COMPILED(model, x[~mask], y[~mask], np.zeros(int((~mask).sum()), bool))

    report = audited(cut, release=released, plan=None)
    assert rules_of(report) == {"compilations", "stopped"}  # no example is too few for it


def test_a_branch_of_python():
    def branching(model, x, y, mask):
        total = COMPILED(model, x, y, mask)
        return total if bool(jnp.isfinite(x).all()) else jax.tree.map(jnp.zeros_like, total)

    assert "movement" in rules_of(audited(branching, release=released, plan=None))


def test_a_result_of_another_form():
    def growing(model, x, y, mask):
        total = COMPILED(model, x, y, mask)
        return total if bool(jnp.isfinite(x).all()) else [total, total]

    assert "form" in rules_of(audited(growing, release=released, plan=None))


def test_an_error_on_an_example():
    step, state = stepped(clipped)

    def checking(model, state, x, y, mask):
        x = eqx.error_if(x, ~jnp.isfinite(x), "not finite")
        return step(model, state, x, y, mask)

    report = audited(checking, state)
    assert rules_of(report) == {"stopped"}
    assert "not finite" not in str(report)


# Functions without a mask.


def test_a_mean_over_the_batch():
    @jax.jit
    def mean(model, x, y):
        total = clipped(model, x, y, jnp.zeros(len(x), bool))
        return jax.tree.map(lambda leaf: leaf / len(x), total)

    report = audit.neighbours(
        mean,
        MODEL,
        *BATCH,
        private=(1, 2),
        sensitivity=CLIP_NORM / len(BATCH[0]),
        release=released,
    )
    assert rules_of(report) == {"movement"}


# Clipped gradients whose engine has been broken.


def test_an_engine_that_lets_examples_meet():
    """Values of the other examples are the same bits, or it is found."""
    grad_fn = dp.filter_value_and_clipped_grad(LOSS, l2_clip_norm=CLIP_NORM)
    finish = grad_fn._finish

    def mixing(per_example, grads):
        loss = per_example.loss
        others = jnp.where(jnp.isfinite(loss), jnp.tanh(loss), 0).sum()
        return finish(per_example._replace(loss=loss + 1e-4 * others), grads)

    broken = type(grad_fn)(LOSS, grad_fn._filter_spec, grad_fn._configuration, mixing)
    report = audit.neighbours(broken, MODEL, *BATCH)
    assert rules_of(report) == {"examples apart", "padding"}
    assert "loss: values of others change with one" in str(report)


def test_values_in_another_order():
    """Real examples first, as the engine computes them, and not put back."""
    grad_fn = dp.filter_value_and_clipped_grad(LOSS, l2_clip_norm=CLIP_NORM)
    finish = grad_fn._finish

    def sorting(per_example, grads):
        order = jnp.argsort(per_example.grad_norm == 0, stable=True)
        return finish(jax.tree.map(lambda leaf: leaf[order], per_example), grads)

    broken = type(grad_fn)(LOSS, grad_fn._filter_spec, grad_fn._configuration, sorting)
    report = audit.neighbours(broken, MODEL, *BATCH)
    assert "values of other examples change when one becomes padding" in str(report)
