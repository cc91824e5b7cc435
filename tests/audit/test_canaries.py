"""Canaries: what is planted, what a canary adds to the sum, and the bounds against closed forms."""

import json
import math
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.audit import canaries
from eqx_dp.extras import MissingExtra
from tests.models import mlp, mlp_loss

pytestmark = pytest.mark.sampled(2)

DELTA = 1e-9
PLAN = dp.PrivacyPlan(sampling_prob=0.5, steps=1, noise_multiplier=1.0, delta=DELTA)
CASE = mlp()
DATA = CASE.batch(30)
IMAGES = CASE.batch(100, seed=1)
ROWS = 130


def planted_images(seed=0):
    return canaries.plant(DATA, IMAGES, seed=seed)


def planted_gradients(number=100, seed=0, norm=1.0):
    return canaries.plant_gradients(DATA, number, norm=norm, seed=seed)


def rows(planted, which):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[which]), planted.data)


def same(found, expected):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


# The data set.


def test_examples_come_first_and_all_canaries_behind_them():
    planted = planted_images()
    is_there, *both = planted.data
    assert planted.num_examples == len(is_there) == ROWS
    assert same(jax.tree.map(lambda leaf: leaf[:30], both), DATA)
    assert same(planted.examples(), IMAGES)
    np.testing.assert_array_equal(is_there, [*[True] * 30, *planted.is_in])


def test_rows_of_gradients_tell_examples_from_canaries():
    planted = planted_gradients()
    row, *both = planted.data
    assert planted.num_examples == len(row) == ROWS
    assert same(jax.tree.map(lambda leaf: leaf[:30], both), DATA)
    assert not any(np.any(leaf[30:]) for leaf in jax.tree.leaves(both))
    assert np.all(row[:30] == -1)
    np.testing.assert_array_equal(row[30:], np.where(planted.is_in, np.arange(100), -2))


@pytest.mark.parametrize("plant", [planted_images, planted_gradients])
def test_coins_follow_the_seed(plant):
    np.testing.assert_array_equal(plant(seed=5).is_in, plant(seed=5).is_in)
    assert np.any(plant(seed=5).is_in != plant(seed=6).is_in)


def test_coins_are_fair_and_independent():
    many = [planted_gradients(4_000, seed=seed).is_in for seed in range(10)]
    assert abs(np.mean(many) - 0.5) < 4 * 0.5 / math.sqrt(40_000)
    assert np.all(np.abs(np.corrcoef(many)[np.triu_indices(10, 1)]) < 5 / math.sqrt(4_000))
    both = planted_images().is_in, planted_gradients().is_in
    assert abs(np.corrcoef(*both)[0, 1]) < 0.5


def test_sources_may_be_trees_and_keep_their_dtypes():
    data = ({"a": np.zeros((5, 2), np.float32)}, np.zeros(5, np.int8))
    images = ({"a": jnp.ones((20, 2))}, np.ones(20, np.int64))
    with_images = canaries.plant(data, images, seed=0)
    with_gradients = canaries.plant_gradients(data, 20, norm=1.0, seed=0)
    for planted in (with_images, with_gradients):
        _, tree, label = planted.data
        assert (tree["a"].dtype, label.dtype) == (np.float32, np.int8)
        assert (tree["a"].shape, label.shape) == ((25, 2), (25,))


@pytest.mark.parametrize("plant", [planted_images, planted_gradients])
def test_neither_data_nor_coins_are_printed(plant):
    assert re.fullmatch(r"\w+Canaries\(num_examples=130(, norm=1.0)?\)", repr(plant()))


# What a row adds to the sum.


def clipped_sum(loss, model, batch, clip=1.0, policy=None, **named):
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=clip, policy=policy)
    return grad_fn(model, *batch, **named)


def test_an_image_that_is_out_adds_exactly_zero():
    planted = planted_images()
    out = rows(planted, 30 + np.flatnonzero(~planted.is_in))
    sums = clipped_sum(planted.loss(mlp_loss), CASE.model, out)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(sums))


@pytest.mark.slow
def test_other_rows_add_what_they_add_without_coins():
    planted = planted_images()
    there = rows(planted, np.flatnonzero(planted.data[0]))
    sums = clipped_sum(planted.loss(mlp_loss), CASE.model, there)
    expected = clipped_sum(mlp_loss, CASE.model, there[1:])
    for found, wanted in zip(jax.tree.leaves(sums), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert np.any(found)


@pytest.mark.parametrize(
    "policy", [None, "mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("clip", [0.7, 1.0])
def test_a_gradient_that_is_in_adds_one_entry_of_the_clip_norm(clip, policy):
    planted = planted_gradients(norm=clip)
    policy = policy and dp.load_policy(policy)
    one, other = np.flatnonzero(planted.is_in)[[0, -1]]
    model, batch = planted.model(CASE.model), rows(planted, [30 + one, 30 + other])
    sums = clipped_sum(planted.loss(mlp_loss), model, batch, clip, policy)
    expected = np.zeros(100)
    expected[[one, other]] = clip
    np.testing.assert_allclose(sums.marks, expected, rtol=1e-4)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(sums.model))


def test_a_gradient_that_is_out_adds_exactly_zero():
    planted = planted_gradients()
    out = rows(planted, 30 + np.flatnonzero(~planted.is_in))
    sums = clipped_sum(planted.loss(mlp_loss), planted.model(CASE.model), out)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(sums))


@pytest.mark.slow
def test_examples_add_to_the_model_alone_what_they_add_without_canaries():
    planted = planted_gradients()
    model = planted.model(CASE.model)
    sums = clipped_sum(planted.loss(mlp_loss), model, rows(planted, np.arange(30)))
    expected = clipped_sum(mlp_loss, CASE.model, DATA)
    assert not np.any(sums.marks)
    pairs = zip(jax.tree.leaves(sums.model), jax.tree.leaves(expected), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model(DATA[0][0]), CASE.model(DATA[0][0]))


@pytest.mark.parametrize("kind", ["examples", "gradients"])
def test_a_loss_with_a_key_gets_it(kind):
    def noisy(model, x, label, key):
        return mlp_loss(model, x + jax.random.normal(key, x.shape), label)

    planted = planted_images() if kind == "examples" else planted_gradients()
    model = CASE.model if kind == "examples" else planted.model(CASE.model)
    loss, batch = planted.loss(noisy), rows(planted, np.arange(2))
    one = clipped_sum(loss, model, batch, key=jax.random.key(0))
    assert not same(one, clipped_sum(loss, model, batch, key=jax.random.key(1)))
    with pytest.raises(ValueError, match="takes a key and none was given"):
        clipped_sum(loss, model, batch)
    with pytest.raises(ValueError, match="no parameter named 'key'"):
        clipped_sum(planted.loss(mlp_loss), model, batch, key=jax.random.key(0))


def test_a_loss_of_any_arguments_can_be_planted_in():
    planted = planted_images()
    loss = planted.loss(lambda *args, **named: mlp_loss(*args))
    sums = clipped_sum(loss, CASE.model, rows(planted, np.arange(2)))
    expected = clipped_sum(mlp_loss, CASE.model, [leaf[:2] for leaf in DATA])
    for found, wanted in zip(jax.tree.leaves(sums), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


# Scores.


@pytest.mark.slow
def test_the_loss_attack_scores_how_far_losses_fell():
    planted, after = planted_images(), mlp(depth=1).model
    losses = [
        np.array([mlp_loss(model, x, y) for x, y in zip(*IMAGES, strict=True)])
        for model in (CASE.model, after)
    ]
    found = planted.loss_scores(mlp_loss, after, CASE.model)
    np.testing.assert_allclose(found, losses[0] - losses[1], rtol=1e-4, atol=1e-5)
    alone = planted.loss_scores(mlp_loss, after)
    np.testing.assert_allclose(alone, -losses[1], rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_nan_scores_lowest():
    found = planted_images().loss_scores(lambda model, x, y: jnp.nan * y, CASE.model)
    assert np.all(found == -np.inf)


def test_gradients_score_how_far_their_parameters_went_down():
    planted = planted_gradients()
    trained = eqx.tree_at(lambda m: m.marks, planted.model(CASE.model), jnp.arange(100.0))
    np.testing.assert_array_equal(planted.scores(trained), -np.arange(100.0))


# Bounds.


def told_apart(planted):
    """Scores that give all coins away."""
    return planted.is_in + np.linspace(0, 0.5, len(planted.is_in))


def logit(probability):
    return math.log(probability / (1 - probability))


def test_right_guesses_alone_give_the_closed_form():
    planted = planted_gradients(200)
    audit = planted.audit(told_apart(planted), PLAN, attack="all", guesses=[0.3])
    # Epsilon at which 60 guesses are all right with probability 0.05; delta hardly counts.
    assert audit.lower == pytest.approx(logit(0.05 ** (1 / 60)), abs=1e-3)
    wider = planted.audit(told_apart(planted), PLAN, attack="all", guesses=[0.3], confidence=0.99)
    assert wider.lower == pytest.approx(logit(0.01 ** (1 / 60)), abs=1e-3)


def test_the_choice_among_guesses_is_paid_for():
    planted = planted_gradients(200)
    audit = planted.audit(told_apart(planted), PLAN, attack="all", guesses=[0.3, 0.2])
    assert audit.lower == pytest.approx(logit(0.025 ** (1 / 60)), abs=1e-3)


def test_rates_give_the_closed_form():
    planted = planted_gradients(200)
    audit = planted.audit(planted.is_in, PLAN, attack="all")
    num_in, num_out = (count - count // 2 for count in (audit.num_in, 200 - audit.num_in))
    # On the half that is left, the median of splits takes half of 0.05, each rate half of that.
    least_true, most_false = 0.0125 ** (1 / num_in), 1 - 0.0125 ** (1 / num_out)
    assert audit.bounds[2].method == "rates"
    assert audit.bounds[2].epsilon == pytest.approx(math.log(least_true / most_false), abs=1e-4)


def test_scores_that_say_nothing_bound_nothing():
    planted = planted_gradients(200)
    audit = planted.audit(np.zeros(200), PLAN, attack="none")
    assert [bound.epsilon for bound in audit.bounds] == [0, 0, 0]
    worst = planted.audit(-told_apart(planted), PLAN, attack="wrong way")
    assert [bound.epsilon for bound in worst.bounds] == [0, 0, 0]


@pytest.mark.slow
def test_bounds_of_a_gaussian_mechanism_stay_below_its_epsilon_and_are_not_trivial():
    plan = dp.PrivacyPlan(sampling_prob=1.0, steps=1, noise_multiplier=1.0, delta=1e-5)
    found = []
    for seed in range(10):
        planted = planted_gradients(2_000, seed=seed)
        noise = np.random.default_rng(seed).normal(size=2_000)
        found.append(planted.audit(planted.is_in + noise, plan, attack="sum"))
    bounds = np.array([[bound.epsilon for bound in audit.bounds] for audit in found])
    assert np.all(bounds < plan.epsilon())
    assert np.all(np.median(bounds, axis=0) > 0.7)
    # The trade-off curve is Gaussian here, and to know that helps.
    assert np.median(bounds[:, 1]) > np.median(bounds[:, 0]) + 0.5


def test_only_the_bound_that_assumes_nothing_accuses_a_plan():
    bounds = [
        canaries.CanaryBound(method, epsilon, "")
        for method, epsilon in (("one run", 0.9), ("one run, Gaussian", 2.0), ("rates", 2.0))
    ]
    audit = canaries.CanaryAudit("a", 100, 50, 0.95, 1e-5, 1.0, tuple(bounds))
    assert not audit.exceeds_plan
    assert audit._replace(bounds=(bounds[0]._replace(epsilon=1.1), *bounds[1:])).exceeds_plan


# Real runs.


def score(noise_of, seed):
    """Trains with less noise than the plan says, and audits that run."""
    plan = dp.PrivacyPlan.calibrate(epsilon=3.0, delta=1e-5, sampling_prob=0.25, steps=12)
    used = dp.PrivacyPlan(0.25, 12, noise_of * plan.noise_multiplier, 1e-5)
    planted = planted_gradients(2_000, seed=seed)
    step = dp.make_step(
        *(planted.loss(mlp_loss), optax.sgd(1.0), used),
        num_examples=planted.num_examples,
        seed=seed,
        l2_clip_norm=1.0,
    )
    trainer = dp.Trainer(step, planted.data, progress=False)
    trained = trainer.run(planted.model(CASE.model)).model
    return planted.audit(planted.scores(trained), plan, attack="gradient")


@pytest.mark.slow
def test_an_honest_run_is_not_accused():
    audit = score(1.0, seed=1)
    assert 0.3 < audit.lower < 2
    assert not audit.exceeds_plan


@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_a_run_with_too_little_noise_is_found(noise):
    audit = score(noise, seed=3)
    assert audit.lower > audit.upper
    assert audit.exceeds_plan


@pytest.mark.slow
def test_the_code_in_the_docstring_runs():
    (code,) = re.findall(r"```python\n(.*?)```", canaries.__doc__, re.DOTALL)
    xs, ys = DATA
    names = {"dp": dp, "optax": optax, "xs": xs, "ys": ys, "loss": mlp_loss, "model": CASE.model}
    plan = dp.PrivacyPlan(sampling_prob=0.1, steps=2, noise_multiplier=3.0, delta=1e-5)
    exec(code, names | {"plan": plan, "seed": 1, "coins": 2})


# What is shown and written.


def an_audit(**changed):
    planted = planted_gradients(200)
    audit = planted.audit(told_apart(planted), PLAN, attack="gradient")
    return audit._replace(**changed)


def test_the_table_says_who_found_what():
    head, counts, _, *table = str(an_audit(upper=1.0, num_in=99)).splitlines()
    assert head == "attack by gradient: MORE than the plan allows"
    assert counts == "200 canaries, 99 in; delta 1e-09; each bound holds with probability 0.95"
    assert [line.split("  ")[0] for line in table] == [
        *("bound", "plan", "one run", "one run, Gaussian", "rates")
    ]
    assert "<= 1.00" in table[1]
    assert str(an_audit(upper=100.0)).startswith("attack by gradient: no more than")


def test_json_holds_everything_and_infinity_as_null():
    audit = an_audit(upper=math.inf)
    found = json.loads(audit.to_json())
    assert found["upper"] is None
    assert found["lower"] == audit.lower
    assert found["exceeds_plan"] is False
    assert [bound["method"] for bound in found["bounds"]] == [
        *("one run", "one run, Gaussian", "rates")
    ]
    assert json.loads(an_audit().to_json())["upper"] == PLAN.epsilon()


def test_a_file_keeps_what_else_is_in_it(tmp_path):
    path = tmp_path / "audit.json"
    path.write_text('{"neighbours": {"ok": true}, "canaries": {"loss": 1, "gradient": 2}}')
    audit = an_audit()
    audit.save(path)
    found = json.loads(path.read_text())
    assert found["neighbours"] == {"ok": True}
    assert found["canaries"] == {"loss": 1, "gradient": json.loads(audit.to_json())}
    audit.save(tmp_path / "new.json")
    assert list(json.loads((tmp_path / "new.json").read_text())) == ["canaries"]


@pytest.mark.parametrize("text", ["{", "[]", '{"canaries": []}'])
def test_a_file_that_holds_something_else_is_left_as_it_is(tmp_path, text):
    path = tmp_path / "audit.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="Name another file"):
        an_audit().save(path)
    assert path.read_text() == text


# What is refused.


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros(99), r"scores must be 100 numbers.* shape \(99,\)"),
        (np.zeros((100, 1)), r"shape \(100, 1\)"),
        (np.array(["a"] * 100), "scores must be 100 numbers"),
        (np.array([np.nan] * 2 + [0.0] * 98), "found NaN for 2 of 100 canaries"),
    ],
)
def test_scores_that_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        planted_gradients().audit(scores, PLAN, attack="a")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"confidence": 0.5}, "confidence must be above 0.5 and below 1; found 0.5"),
        ({"confidence": 1.0}, "confidence must be above 0.5"),
        ({"guesses": []}, "guesses must be above 0"),
        ({"guesses": [0.1, 0.0]}, "guesses must be above 0"),
        ({"guesses": [1.1]}, "guesses must be above 0"),
    ],
)
def test_arguments_of_an_audit_that_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        planted_gradients().audit(np.zeros(100), PLAN, attack="a", **changed)


X, Y = np.zeros((30, 6), np.float32), np.zeros(30, np.int32)


@pytest.mark.parametrize(
    ("data", "images", "message"),
    [
        ((X, Y), (X[:19], Y[:19]), "number of canaries must be at least 20; found 19"),
        ((X, Y), (X, Y[:29]), r"canaries must hold arrays of one length; found \[29, 30\]"),
        ((X[:29], Y), (X, Y), "data must hold arrays of one length"),
        ((X, Y), (X, Y, Y), "canaries must have the structure of data"),
        ((X, Y), (X[:, :5], Y), r"float32 of shape \(6,\); found float32 of shape \(5,\)"),
        ((X, Y), (X, X[:, 0]), r"int32 of shape \(\); found float32"),
        ((X, 3), (X, Y), r"data\.1 must be an array .*; found 3"),
        ((), (X, Y), "data must hold arrays of one length"),
    ],
)
def test_sources_that_are_refused(data, images, message):
    with pytest.raises(ValueError, match=message):
        canaries.plant(data, images, seed=0)


@pytest.mark.usefixtures("unchecked")
def test_sources_are_a_tuple():
    with pytest.raises(ValueError, match="data must be a tuple of sources; found an array"):
        canaries.plant_gradients(X, 20, norm=1.0, seed=0)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, math.nan])
def test_norms_that_are_refused(norm):
    with pytest.raises(ValueError, match="norm must be above 0 and finite"):
        planted_gradients(norm=norm)


def test_few_gradients_are_refused():
    with pytest.raises(ValueError, match="number must be at least 20; found 19"):
        planted_gradients(19)


def test_without_jax_privacy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_privacy.auditing", None)
    with pytest.raises(MissingExtra, match=r"jax_privacy is not installed.*eqx-dp\[audit\]"):
        planted_gradients().audit(np.zeros(100), PLAN, attack="a")
