"""Canaries: what is planted, what a canary adds to the sum, and the bound against closed forms."""

import json
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.audit import canaries
from tests.models import mlp, mlp_loss
from tests.tiers import curated

PLAN = dp.PrivacyPlan(sampling_prob=0.5, steps=1, noise_multiplier=1.0, delta=1e-9)
CASE = mlp()
DATA = CASE.batch(30)
IMAGES = CASE.batch(100, seed=1)


def planted_images(seed=0):
    return canaries.plant(DATA, IMAGES, seed=seed)


def planted_gradients(number=100, seed=0, norm=1.0):
    return canaries.plant_gradients(DATA, number, norm=norm, seed=seed)


def rows(planted, which):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[which]), planted.data)


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# The data set.


@pytest.mark.parametrize("plant", [planted_images, planted_gradients])
def test_examples_come_first_and_all_canaries_behind_them(plant):
    planted = plant()
    first, *both = planted.data
    assert planted.num_examples == len(first) == 130
    assert_close(jax.tree.map(lambda leaf: leaf[:30], both), DATA)
    if plant is planted_images:
        assert_close(planted.examples(), IMAGES)
        np.testing.assert_array_equal(first, [*[True] * 30, *planted.is_in])
    else:
        canary = np.where(planted.is_in, np.arange(100), -2)
        np.testing.assert_array_equal(first, [*[-1] * 30, *canary])
    # Neither data nor coins are printed.
    assert re.fullmatch(r"\w+Canaries\(num_examples=130(, norm=1.0)?\)", repr(planted))


def test_coins_are_fair_independent_and_follow_the_seed():
    many = [planted_gradients(4_000, seed=seed).is_in for seed in range(10)]
    assert abs(np.mean(many) - 0.5) < 4 * 0.5 / math.sqrt(40_000)
    assert np.all(np.abs(np.corrcoef(many)[np.triu_indices(10, 1)]) < 5 / math.sqrt(4_000))
    assert abs(np.corrcoef(planted_images().is_in, planted_gradients().is_in)[0, 1]) < 0.5
    for plant in (planted_images, planted_gradients):
        np.testing.assert_array_equal(plant(seed=5).is_in, plant(seed=5).is_in)


# What a row adds to the sum.


def clipped_sum(loss, model, batch, clip=1.0, policy=None, **named):
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=clip, policy=policy)
    return grad_fn(model, *batch, **named)


@pytest.mark.parametrize("plant", curated([planted_images, planted_gradients], []))
def test_a_canary_that_is_out_adds_exactly_zero(plant):
    planted = plant()
    model = CASE.model if plant is planted_images else planted.model(CASE.model)
    out = rows(planted, 30 + np.flatnonzero(~planted.is_in))
    for clip in (1.0, dp.clipping.Quantile()):  # with its count
        sums = clipped_sum(planted.loss(mlp_loss), model, out, clip)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(sums))


CLIPS = [(0.7, None), (1.0, "mixed_bfloat16")]


@pytest.mark.parametrize(("clip", "policy"), curated(CLIPS, CLIPS[:1]))
def test_a_gradient_that_is_in_adds_one_entry_of_the_clip_norm(clip, policy):
    planted = planted_gradients(norm=clip)
    one, other = np.flatnonzero(planted.is_in)[[0, -1]]
    model, batch = planted.model(CASE.model), rows(planted, [30 + one, 30 + other])
    policy = policy and dp.load_policy(policy)
    sums = clipped_sum(planted.loss(mlp_loss), model, batch, clip, policy)
    expected = np.zeros(100)
    expected[[one, other]] = clip
    np.testing.assert_allclose(sums.marks, expected, rtol=1e-4)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(sums.model))


# Scores.


@pytest.mark.slow
def test_scores_say_how_far_losses_fell_and_parameters_went_down():
    planted, after = planted_images(), mlp(depth=1).model
    before, then = (
        np.array([mlp_loss(model, x, y) for x, y in zip(*IMAGES, strict=True)])
        for model in (CASE.model, after)
    )
    found = planted.loss_scores(mlp_loss, after, CASE.model)
    np.testing.assert_allclose(found, before - then, rtol=1e-4, atol=1e-5)
    lowest = planted.loss_scores(lambda model, x, y: jnp.nan * y, CASE.model)
    assert np.all(lowest == -np.inf)
    planted = planted_gradients()
    trained = eqx.tree_at(lambda m: m.marks, planted.model(CASE.model), jnp.arange(100.0))
    np.testing.assert_array_equal(planted.scores(trained), -np.arange(100.0))


# The bound.


def given_away(planted):
    """Scores that give all coins away."""
    return planted.is_in + np.linspace(0, 0.5, len(planted.is_in))


def test_right_guesses_alone_give_the_closed_form():
    planted = planted_gradients(200)
    for confidence in (0.95, 0.99):
        audit = planted.audit(given_away(planted), PLAN, attack="all", confidence=confidence)
        # Epsilon at which all of 75 guesses are right with a fourth of 1 - confidence, one share
        # of four; delta hardly counts.
        right = ((1 - confidence) / 4) ** (1 / 75)
        assert audit.lower == pytest.approx(math.log(right / (1 - right)), abs=1e-3)
    for scores in (np.zeros(200), -given_away(planted)):
        audit = planted.audit(scores, PLAN, attack="says nothing, or is wrong")
        assert (audit.lower, audit.lower_gaussian) == (0, 0)


@pytest.mark.slow
def test_bounds_of_a_gaussian_mechanism_stay_below_its_epsilon_and_are_not_trivial():
    plan = dp.PrivacyPlan(sampling_prob=1.0, steps=1, noise_multiplier=1.0, delta=1e-5)
    found = []
    for seed in range(10):
        planted = planted_gradients(2_000, seed=seed)
        noise = np.random.default_rng(seed).normal(size=2_000)
        found.append(planted.audit(planted.is_in + noise, plan, attack="sum"))
    assert all(audit.ok for audit in found)
    assert np.median([audit.lower for audit in found]) > 0.7
    assert np.median([audit.lower_gaussian / audit.lower for audit in found]) > 1.25
    # The mechanism is the Gaussian one: its mu is 1, and both upper bounds are one.
    assert found[0].upper_gaussian == pytest.approx(found[0].upper, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_real_run_is_accused_if_its_noise_is_too_small(share):
    plan = dp.PrivacyPlan.calibrate(epsilon=3.0, delta=1e-5, sampling_prob=0.25, steps=12)
    used = dp.PrivacyPlan(0.25, 12, share * plan.noise_multiplier, 1e-5)
    planted = planted_gradients(2_000, seed=3)
    options = {"num_examples": planted.num_examples, "seed": 3, "l2_clip_norm": 1.0}
    step = dp.make_step(planted.loss(mlp_loss), optax.sgd(1.0), used, **options)
    trained = dp.Trainer(step, planted.data, progress=False).run(planted.model(CASE.model)).model
    audit = planted.audit(planted.scores(trained), plan, attack="gradient")
    assert audit.ok == (share == 1)
    assert audit.lower > 0.3


# What is shown and written.


def an_audit(**changed):
    planted = planted_gradients(200)
    return planted.audit(given_away(planted), PLAN, attack="gradient")._replace(**changed)


def test_the_text_says_what_was_found():
    given = {"lower": 2.0, "num_in": 99, "lower_gaussian": 3.0, "upper_gaussian": 4.0}
    head, bound, shape, counts = str(an_audit(upper=1.0, **given)).splitlines()
    assert head == "attack by gradient: MORE than the plan allows"
    assert bound == "epsilon at least 2.00 with probability 0.95, by the plan at most 1.00"
    assert shape == "as a Gaussian mechanism: at least 3.00, by the plan at most 4.00"
    assert counts == "200 canaries, 99 in; delta 1e-09"
    assert str(an_audit(upper=100.0, upper_gaussian=99.0)).startswith("attack by gradient: no more")
    assert not an_audit(upper=100.0, lower_gaussian=3.0, upper_gaussian=2.9).ok


def test_a_file_keeps_what_else_is_in_it(tmp_path):
    path = tmp_path / "audit.json"
    path.write_text('{"neighbours": {"ok": true}, "canaries": {"loss": 1, "gradient": 2}}')
    audit = an_audit(upper=math.inf, upper_gaussian=math.inf)
    audit.save(tmp_path)
    found = json.loads(path.read_text())
    assert found["neighbours"] == {"ok": True}
    assert found["canaries"]["loss"] == 1
    written = found["canaries"]["gradient"]
    assert written == {"ok": True, **audit._asdict(), "upper": None, "upper_gaussian": None}


# What is refused.

X, Y = np.zeros((30, 6), np.float32), np.zeros(30, np.int32)
ZEROS = np.zeros(100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.audit(np.zeros(99), PLAN, attack="a"), r"100 numbers.* shape \(99,\)"),
        (lambda p: p.audit(ZEROS + np.nan, PLAN, attack="a"), "NaN"),
        (lambda p: p.audit(ZEROS, PLAN, attack="a", confidence=0.5), "confidence must be above"),
        (lambda p: planted_gradients(norm=0.0), "norm must be above 0"),
        (lambda p: canaries.plant((X, Y), (X[:19], Y[:19]), seed=0), "at least 20; found 19"),
        (lambda p: canaries.plant((X, Y), (X, Y[:29]), seed=0), "canaries must be a tuple"),
        (lambda p: canaries.plant((X, Y), (X, Y, Y), seed=0), "have the structure of data"),
        (lambda p: canaries.plant((X, Y), (X[:, :5], Y), seed=0), r"found float32 of .*\(5,\)"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(planted_gradients())
