"""Every planted fault is found, by the rule that it breaks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_dp as dp
from tests.audit import by_hand
from tests.audit.by_hand import CLIP_NORM, audited, clipped, norms, rules_of, stepped, weighted

pytestmark = pytest.mark.slow

# Gradients that are wrong, each in a step that is otherwise right.


def clipped_leaf_by_leaf(model, x, y, mask):
    """One clip norm a leaf, and the sensitivity of one."""
    gradients = by_hand.rows(model, x, y)
    counts = jnp.isfinite(norms(gradients)) & ~mask
    return jax.tree.map(
        lambda leaf: weighted([leaf], jnp.minimum(1, CLIP_NORM / norms([leaf])), counts)[0],
        gradients,
    )


def summed_in_bfloat16(model, x, y, mask):
    gradients = by_hand.rows(model, x, y)
    found = norms(gradients)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), gradients)
    factors = jnp.minimum(1, CLIP_NORM / found).astype(jnp.bfloat16)
    total = weighted(narrow, factors, jnp.isfinite(found) & ~mask)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), total)


def with_statistics_of_the_batch(model, x, y, mask):
    x = jnp.where(jnp.isfinite(x), x, 0)
    return clipped(model, x - x.mean(0), y, mask)


def poisoned(model, x, y, mask):
    """NaN times zero is NaN."""
    gradients = by_hand.rows(model, x, y)
    factors = jnp.minimum(1, CLIP_NORM / norms(gradients))
    return weighted(gradients, factors * ~mask, jnp.ones(len(x), bool))


GRADIENTS = {
    "clipped leaf by leaf": (clipped_leaf_by_leaf, "movement"),
    "summed in bfloat16": (summed_in_bfloat16, "movement"),
    "with statistics of the batch": (with_statistics_of_the_batch, "movement"),
    "poisoned": (poisoned, "movement"),
    "padding counts": (lambda *args: clipped(*args[:3], jnp.zeros_like(args[3])), "padding"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_gradient(name):
    gradient, rule = GRADIENTS[name]
    report = audited(*stepped(gradient))
    assert rule in rules_of(report)
    with pytest.raises(ValueError, match=rule):
        report.raise_if_violated()


def test_a_sensitivity_of_another_relation():
    step, state = stepped(clipped)
    replace_one = dp.NeighboringRelation.REPLACE_ONE
    report = audited(step, state, neighboring_relation=replace_one)
    assert rules_of(report) == {"movement"}
    assert 1.5 < report.largest <= 2 + 2 * report.rounding
    assert audited(step, state, neighboring_relation=replace_one, sensitivity=2 * CLIP_NORM).ok


def test_an_optimizer_before_the_noise():
    report = audited(*stepped(clipped, optax.chain(optax.adam(1e-2), by_hand.NOISE)))
    assert {"movement", "beside the noise"} & rules_of(report)


def test_noise_by_a_key_that_depends_on_the_data():
    @jax.jit
    def step(model, state, x, y, mask):
        number = jnp.sum(jnp.nan_to_num(x)).astype(jnp.int32)
        stream = state.stream._replace(key=jax.random.fold_in(state.stream.key, number))
        changed = state._replace(stream=stream)
        return by_hand.NOISE.update(clipped(model, x, y, mask), changed)[0], state

    assert rules_of(audited(step, by_hand.NOISE.init(by_hand.MODEL))) == {"noise"}


# Results beside the release: of the step's model and state, and of the batch.


def loss_of_the_batch(model, x, y, mask):
    return jnp.where(mask, 0, jax.vmap(by_hand.LOSS, (None, 0, 0))(model, x, y)).sum()


BESIDE = {
    "2": lambda model, state, *call: (model, state, loss_of_the_batch(*call)),
    "2.size": lambda model, state, before, x, y, mask: (model, state, {"size": jnp.sum(~mask)}),
    "0.bias": lambda model, state, before, x, y, mask: (
        {**model, "bias": model["bias"] + jnp.where(mask, 0, jnp.isnan(y)).sum()},
        state,
    ),
}


@pytest.mark.parametrize("result", BESIDE)
def test_results_beside_the_release(result):
    step, state = stepped(clipped)

    def telling(model, state, *batch):
        return BESIDE[result](*step(model, state, *batch), model, *batch)

    report = audited(telling, state)
    assert rules_of(report) == {"beside the noise"}
    assert f"result {result} changes" in str(report)
    assert audited(telling, state, disclose=[result]).ok


def test_an_error_on_an_example():
    step, state = stepped(clipped)

    def checking(model, state, x, y, mask):
        x = eqx.error_if(x, ~jnp.isfinite(x), "not finite")
        return step(model, state, x, y, mask)

    report = audited(checking, state)
    assert rules_of(report) == {"stopped"}
    assert "not finite" not in str(report)
