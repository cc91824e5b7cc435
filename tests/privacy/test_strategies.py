"""Correlated noise against dense matrices: strategies, draws, plans, starts."""

import itertools
import json
import math
import re
import warnings

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting.pld import PLDAccountant

import eqx_dp as dp
from eqx_dp.privacy import gaussian
from eqx_dp.privacy.finite_precision import entries_covered
from eqx_dp.privacy.strategies import Banded
from tests.tiers import curated

STRATEGIES = {
    "lambda": Banded.lambda_cgd(0.7),
    "bisr": Banded.bisr(4),
    "bisr, kept": Banded.bisr(4, keep=True),
    "two": Banded((1.0, -0.4, -0.2)),
    "kept": Banded(strategy=(1.0, 0.5, 0.3)),
    "both": Banded((1.0, -0.2), (1.0, 0.3)),
    "independent": Banded(),
}


def dense(strategy, steps):
    """C^-1."""

    def toeplitz(column):
        return sum(x * np.eye(steps, k=-lag) for lag, x in enumerate(column))

    return np.linalg.inv(toeplitz(strategy.strategy)) @ toeplitz(strategy.noising)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("steps", "apart"), [(1, 1), (6, 2), (7, 3), (8, 20)])
def test_sensitivity_and_error_are_those_of_matrices(name, steps, apart):
    strategy, inverse = STRATEGIES[name], dense(STRATEGIES[name], steps)
    c = np.linalg.inv(inverse)
    np.testing.assert_allclose(strategy.column(steps), c[:, 0], atol=1e-12)
    patterns = (
        np.array(pattern)
        for pattern in itertools.product((0, 1), repeat=steps)
        if all(b - a >= apart for a, b in itertools.pairwise(np.flatnonzero(pattern)))
    )
    worst = max(float(np.linalg.norm(c @ pattern)) for pattern in patterns)
    assert strategy.sensitivity(steps, apart) == pytest.approx(worst, rel=1e-12)
    error = np.linalg.norm(np.tril(np.ones((steps, steps))) @ inverse) / math.sqrt(steps)
    assert strategy.error(steps) == pytest.approx(error, rel=1e-12)
    replaced = {"sampling": dp.sampling.CyclicPoisson(0.2, 6), "neighboring_relation": RELATIONS[1]}
    for noise in (strategy, None)[: 1 + (name == "independent")]:  # the sum moves by two clip norms
        plan = plan_of(noise=noise, **replaced)
        assert plan.error(steps) == pytest.approx(2 * 1.2 * error, rel=1e-12)


@pytest.mark.slow
def test_a_searched_strategy_has_less_error():
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    banded = Banded.band_mf(8, 500)
    wanted = math.sqrt(toeplitz.loss(toeplitz.optimize_banded_toeplitz(500, 8), 500))
    found = banded.error(500) * banded.sensitivity(500, 500)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert found < Banded().error(500) / 2


BAD = {
    "no first 1": ((0.5, -0.1), "noising must be 1"),
    "above 0": ((1.0, -0.1, 0.1), "noising must be 1"),
    "falls below": ((1.0,), "strategy must be 1"),
    "not a number": ((1.0, "x"), r"noising\[1\]"),
    "NaN": ((1.0, math.nan), r"noising\[1\]"),
    "none": ((), "noising must be 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_strategy_is_refused(name):
    noising, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Banded(noising, (1.0, -0.1) if name == "falls below" else (1.0,))


def test_a_strategy_that_rises_is_refused():
    with pytest.raises(ValueError, match="negative or rise"):
        Banded((1.0, -0.1, -0.9)).column(10)


# Draws.

SHAPES = {"w": (300,), "more": (7, 11), "large": (2**16 + 1,), "twin": (2**16 + 1,)}
ZEROS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def noise_of(strategy, steps, stddev=32.0):
    """The noise of some steps, in multiples of a grid of 1."""
    privatizer = dp.gaussian_privatizer(stddev=stddev, key=b"k" * 32, correlation=strategy)
    state, found = privatizer.init(ZEROS), []
    for _ in range(steps):
        noise, state = privatizer.update(ZEROS, state)
        assert len(state.past) == (0 if strategy is None else strategy.kept)
        found.append(jax.tree.map(np.asarray, noise))
    return found


DRAWN = ["lambda", "bisr", "bisr, kept", "kept", "both"]


@pytest.mark.parametrize("name", curated(DRAWN, ["both"]))
def test_noise_is_the_matrix_times_independent_noise(name):
    strategy, kept = STRATEGIES[name], {"bisr, kept": 3, "kept": 2, "both": 1}
    assert strategy.kept == kept.get(name, 0)
    fresh, found = noise_of(None, 6), noise_of(strategy, 6)
    for t, leaf in itertools.product(range(6), SHAPES):
        weights = strategy.weights(t + 1)
        wanted = sum(weight * fresh[t - lag][leaf] for lag, weight in enumerate(weights))
        # Both are rounded to the grid, and so is each fresh draw.
        assert np.abs(found[t][leaf] - wanted).max() <= 0.5 * (1 + np.abs(weights).sum())
    covariance = np.cov([noise["large"] / 32 for noise in found])
    np.testing.assert_allclose(covariance, (d := dense(strategy, 6)) @ d.T, atol=0.03)


def test_draws_are_kept_bit_for_bit():
    with jax.enable_x64(True):
        draws = jnp.array([2**60 // 3, -(2**60), -1, 0], jnp.int64)
        words = gaussian._words_of(draws)
        assert [word.dtype for word in words] == ["uint32", "uint32"]
        np.testing.assert_array_equal(gaussian._number_of(*words), draws)


@pytest.mark.parametrize("other", [{"w": ZEROS["w"]}, ZEROS | {"w": jnp.zeros(301)}])
def test_noise_that_is_kept_is_for_one_tree(other):
    privatizer = dp.gaussian_privatizer(stddev=1.0, correlation=STRATEGIES["kept"])
    state = privatizer.init(ZEROS)
    with pytest.raises(ValueError, match="another tree than the params that init was given"):
        privatizer.update(other, state)


# Plans.


def plan_of(**changed):
    fields = {"steps": 60, "noise_multiplier": 1.2, "delta": 1e-5}
    return dp.PrivacyPlan(**(fields | changed))


def test_no_steps_and_the_most_noise_have_an_event_and_an_epsilon():
    kinds = dp.sampling.CyclicPoisson(0.2, cycle=2), dp.sampling.Poisson(0.2)
    of_noise = Banded.bisr(3), None  # 3 bands in cycles of 2
    for sampling, noise in zip(kinds, of_noise, strict=True):
        plan = plan_of(sampling=sampling, noise=noise, noise_multiplier=1e150)
        assert plan.event(0) == dp_accounting.NoOpDpEvent()
        assert plan.epsilon(0) == 0 < plan.epsilon() < 1e-4


RELATIONS = list(dp.NeighboringRelation)


def by_matrices(plan, noise=STRATEGIES["independent"]):
    """The event of a plan of `CyclicPoisson` or Poisson: examples of one group are alike."""
    probability, cycle = plan.sampling.sampling_prob, getattr(plan.sampling, "cycle", 1)
    columns = np.linalg.inv(dense(noise, plan.steps))[:, ::cycle]
    if np.any(np.sum(columns > 1e-12, axis=1) > 1):  # a participation meets the one before
        probability, columns = 1.0, columns.sum(axis=1, keepdims=True)
    noise_multiplier = plan.noise_multiplier / np.linalg.norm(columns, axis=0).max()
    twice = 1 + (plan.neighboring_relation is dp.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(twice * noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(probability, gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, columns.shape[1])


def epsilon_by(*events, relation, delta, steps):
    """Epsilon by the library, with what finite precision and overflow of each event cost."""
    left = delta - sum(1e-3 * 5e-6 + count * 1e-12 for count in steps)
    accountant = PLDAccountant(relation).compose(dp_accounting.ComposedDpEvent([*events]))
    return accountant.get_epsilon(left) + 5e-5 * len(events)


@pytest.mark.parametrize("relation", curated(RELATIONS, RELATIONS[:1]))
def test_plans_are_accounted_for_as_the_library_does_by_matrices(relation):
    cyclic, plans = dp.sampling.CyclicPoisson(0.2, cycle=6), []
    for name in ("independent", "kept", "bisr"):
        noise = STRATEGIES[name]
        fields = {"delta": 5e-6, "neighboring_relation": relation, "noise_multiplier": 4.0}
        plans.append(plan_of(sampling=cyclic, noise=noise, **fields))
        of_plan = {"relation": relation, "delta": 5e-6, "steps": [60]}
        wanted = epsilon_by(by_matrices(plans[-1], noise), **of_plan)
        assert plans[-1].epsilon() == pytest.approx(wanted, rel=1e-5 if name != "bisr" else 3e-3)
    assert plans[0].epsilon(7) == pytest.approx(plans[0].epsilon(12), rel=1e-6)  # a begun cycle
    events = by_matrices(plans[0]), by_matrices(plans[1], STRATEGIES["kept"])
    wanted = epsilon_by(*events, relation=relation, delta=1e-5, steps=[60, 60])
    assert dp.compose(*plans[:2]).epsilon() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", ["two", "bisr"])
def test_entries_are_paid_for_as_matrices_say(name):
    noise, inverse = STRATEGIES[name], dense(STRATEGIES[name], 60)
    growth = np.abs(inverse[:, 0]).sum() * (1 + np.linalg.norm(np.linalg.inv(inverse)[:, 0]) / 16)
    # Weights are rounded, and a draw is divided by the denominator before.
    weights = *noise.noising, *noise.strategy
    growth *= sum(noise.strategy) * (1 + (len(weights) - 2) / 8)
    most = int(entries_covered(1e-5) / 60 / growth**2)
    plan = plan_of(sampling=dp.sampling.CyclicPoisson(0.2, cycle=6), noise=noise)
    privatizer = plan.privatizer(dp.filter_clipped_grad(loss, l2_clip_norm=1.0))
    privatizer.init(jax.ShapeDtypeStruct((most - 1,), jnp.float32))
    with pytest.raises(ValueError, match="has paid for the finite precision of"):
        privatizer.init(jax.ShapeDtypeStruct((most + 1,), jnp.float32))


def test_a_calibrated_plan_keeps_to_its_budget_and_is_read_back():
    sampling, noise = dp.sampling.CyclicPoisson(1.0, cycle=6), Banded.bisr(3, keep=True)
    options = {"steps": 60, "sampling": sampling, "noise": noise}
    plan = dp.PrivacyPlan.calibrate(epsilon=2.0, delta=1e-5, **options)
    assert 1.99 < plan.epsilon() <= 2.0
    again = dp.PrivacyPlan.from_json(plan.to_json())
    assert (again, again.noise.keep) == (plan, True)
    assert plan != plan_of(sampling=sampling, noise_multiplier=plan.noise_multiplier)
    assert plan.sampler(600, seed=b"s" * 32).kind == sampling


REFUSED = {
    "poisson": ({"sampling_prob": 0.1, "noise": Banded.bisr(2)}, "nothing accounts"),
    "half a cycle": ({"sampling": dp.sampling.CyclicPoisson(0.1, 7)}, "multiple of the cycle"),
    "two probabilities": ({"sampling_prob": 1, "sampling": dp.sampling.Poisson(0.2)}, "disagree"),
    "bands": ({"sampling": dp.sampling.RandomAllocation(6), "noise": Banded.bisr(3)}, "60 bands"),
    "none": ({}, "sampling_prob must be"),
    "not a kind": ({"sampling": "poisson"}, "one of dp.sampling"),
    "not a strategy": ({"sampling_prob": 0.1, "noise": (1.0, -0.5)}, "a dp.Banded"),
    "fixed size": ({"sampling": dp.sampling.FixedSize(10, 100)}, "REPLACE_ONE alone"),
    "bins and replacement": (
        {"sampling": dp.sampling.BallsInBins(6), "neighboring_relation": RELATIONS[1]},
        "no REPLACE_ONE",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_that_nothing_accounts_for_are_refused(name):
    fields, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        plan_of(**fields)


@pytest.mark.parametrize("parts", [(6, 54), (12, 24, 24), (6,) * 10])
def test_several_starts_cost_at_most_one_run(parts):
    strategy = Banded.bisr(8)
    squares = sum(strategy.sensitivity(steps, 6) ** 2 for steps in parts)
    assert squares <= strategy.sensitivity(60, 6) ** 2 * (1 + 1e-12)


# Composition.


@pytest.mark.slow
def test_plans_compose_to_one_epsilon():
    half = dp.PrivacyPlan(0.05, 500, 1.0, 5e-6)
    both, whole = dp.compose(half, half), dp.PrivacyPlan(0.05, 1000, 1.0, 1e-5)
    assert both.delta == 1e-5
    assert both.epsilon() == pytest.approx(whole.epsilon(), rel=1e-3)
    alone = dp.PrivacyPlan(1.0, 1, 40.0, 1e-6)
    assert half.epsilon() < dp.compose(half, alone, delta=5e-6).epsilon() < 1.1 * half.epsilon()
    assert dp.compose(half, dp.PrivacyPlan(1.0, 1, 0.0, 1e-6)).epsilon() == math.inf
    for plans, delta, message in (
        ((half, dp.PrivacyPlan(0.1, 1, 1.0, 1e-6, RELATIONS[1])), None, "one neighboring_relation"),
        ((half, plan_of(sampling_prob=0.1, unit=USERS)), None, "of rows, .*users"),
        ((), 1e-5, "no plan"),
        ((half,), 1e-9, "delta must exceed"),
    ):
        with pytest.raises(ValueError, match=message):
            dp.compose(*plans, delta=delta)


@pytest.mark.slow
def test_phases_of_a_run_cost_what_is_composed(tmp_path):
    """The plans of both statements, one phase after the other, are those of the composition."""
    early, late = (dp.PrivacyPlan(q, 3, noise, 5e-6) for q, noise in ((0.1, 2.0), (0.2, 1.0)))
    phases, model, plans = dp.compose(early, late).within(3.0), jnp.zeros(3), []
    xs = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    for number, plan in enumerate(phases.plans):
        step = dp.make_step(loss, optax.sgd(0.1), plan, num_examples=60, l2_clip_norm=1.0)
        folder = tmp_path / str(number)
        model = dp.Trainer(step, xs, directory=folder, progress=False).run(model).model
        statement = json.loads((folder / "privacy.json").read_text())
        assert statement["steps_released"] == 3
        plans.append(dp.PrivacyPlan.from_json(json.dumps(statement["plan"])))
    events = [(by_matrices(plan), plan.steps) for plan in plans]
    options = {"relation": RELATIONS[0], "delta": 1e-5, "steps": [steps for _, steps in events]}
    wanted = epsilon_by(*(event for event, _ in events), **options)
    assert phases.epsilon() == pytest.approx(wanted, rel=1e-6) == dp.compose(*plans).epsilon()


def test_finished_releases_and_phases():
    assert dp.compose((1.0, 1e-6), (2.0, 0.0)).epsilon() == pytest.approx(3.0, abs=1e-3)
    assert dp.compose((1.0, 1e-6), (2.0, 1e-6), delta=1e-6).epsilon() == math.inf
    phases = [dp.PrivacyPlan(0.1, 20, 2.0, 5e-6), dp.PrivacyPlan(0.2, 20, 1.0, 5e-6)]
    together = dp.compose(*phases, (0.5, 0.0)).within(3.0)
    assert 2.99 < together.epsilon() <= 3.0
    first, second = (plan.noise_multiplier for plan in together.plans)
    assert first == 2 * second
    for release in ((1.0,), (-1.0, 0.1), (1.0, 1.0), 3.0):
        with pytest.raises(ValueError, match=r"releases|epsilon|delta"):
            dp.compose(release)


@pytest.mark.parametrize(("cycle", "prob", "warns"), [(6, 0.2, 1), (6, 1.0, 0), (60, 0.2, 0)])
def test_bands_above_the_cycle_warn_where_sampling_buys_nothing(cycle, prob, warns):
    plan = plan_of(sampling=dp.sampling.CyclicPoisson(prob, cycle), noise=STRATEGIES["bisr"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.sampler(10**6, seed=b"s" * 32)
    assert sum("60 bands, more than the cycle" in str(one.message) for one in caught) == warns


# The check of a traced step.


def loss(model, x):
    return jnp.sum(model * x)


USERS, BINS = dp.Users(np.arange(60), 1), dp.sampling.BallsInBins(6)
CYCLIC = plan_of(sampling=dp.sampling.CyclicPoisson(1.0, 6), noise=Banded.bisr(3), unit=USERS)


@pytest.mark.parametrize(
    ("noise", "times", "sampler", "message"),
    [
        (CYCLIC.noise, 1.0, CYCLIC.sampler(60), None),
        (Banded.bisr(3, keep=True), 1.0, CYCLIC.sampler(60), None),
        (CYCLIC.noise, 0.9, CYCLIC.sampler(60), "noise multiplier is 1.08"),
        (Banded.lambda_cgd(0.5), 1.0, None, r"correlated by Banded\(noising=\(1.0, -0.5\)"),
        (None, 1.0, None, r"correlated by Banded\(noising=\(1.0,\)"),
        (CYCLIC.noise, 1.0, dp.PoissonSampler(60, 1 / 6), "batches are drawn by Poisson"),
        (CYCLIC.noise, 1.0, plan_of(sampling=CYCLIC.sampling, steps=66).sampler(60), "steps=66"),
        (CYCLIC.noise, 1.0, plan_of(sampling=CYCLIC.sampling).sampler(90), "num_examples=90"),
    ],
)
def test_check_privacy_knows_the_strategy_and_the_sampler(noise, times, sampler, message):
    grad_fn = dp.filter_clipped_grad(USERS.loss(loss), l2_clip_norm=1.0)
    privatizer = dp.gaussian_privatizer(stddev=1.2 * times, correlation=noise)
    optimizer = optax.chain(privatizer, optax.sgd(0.1))

    def step(model, state, x, rows, mask):
        grads = grad_fn(model, x, rows, is_padding_example=mask)
        updates, state = optimizer.update(grads, state)
        return model + updates, state

    model, x = jnp.zeros(3), (jnp.ones((12, 1, 3)), jnp.zeros((12, 1), bool))
    args = (model, optimizer.init(model), *x, jnp.zeros(12, bool))
    report = dp.check_privacy(step, *args, private=(2, 3, 4), plan=CYCLIC, sampler=sampler)
    assert report.ok is (message is None), report
    assert message is None or any(re.search(message, one.found) for one in report.violations)
