"""The moving average of parameters: what it is, that it changes nothing else, that it is saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.tiers import curated
from tests.training import runs
from tests.training.runs import assert_same, leaves, rules_of, seeded, small_model, trainer


@pytest.mark.parametrize(("ema", "kind"), curated([(0.9, None), (0.0, "Explicit")], [(0.9, None)]))
def test_it_is_the_weighted_mean_of_the_models_so_far(ema, kind):
    models, rules = [], kind and rules_of(kind)
    for state in runs.states_of(seeded(ema=ema, sharding=rules), small_model(), 5):
        models.append(leaves(state.model))
        weights = np.array([ema**i for i in range(len(models))][::-1], np.float64)
        for i, found in enumerate(leaves(state.averaged)):
            past = np.stack([its[i] for its in models]).astype(np.float64)
            expected = np.tensordot(weights / weights.sum(), past, 1)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_steps_and_noise_are_those_without_it():
    steps = seeded(), seeded(ema=0.9)
    one, other = (trainer(None, step).run(small_model(), steps=2).model for step in steps)
    assert_same(one, other)


def test_narrow_storage_has_a_wide_average():
    step = seeded(ema=0.9, policy=dp.load_policy("bfloat16"))
    state = step.init(small_model())
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.average)} == {jnp.dtype(jnp.float32)}
    assert state.averaged.weight.dtype == jnp.bfloat16


def test_it_is_what_is_evaluated_and_saved(tmp_path):
    seen = []

    def evaluate(model):
        seen.append(leaves(model))
        return {"weight": float(jnp.sum(model.weight))}

    directory, step = tmp_path / "run", seeded(ema=0.9)
    options = {"evaluate": evaluate, "evaluate_every": 10}
    for steps in (4, 10):
        state = trainer(directory, step, **options).run(small_model(), steps=steps)
    np.testing.assert_array_equal(seen[-1][0], state.averaged.weight)
    assert_same(dp.load_model(directory, like=small_model(), averaged=True), state.averaged)
    assert_same(dp.load_model(directory, like=small_model()), state.model)
    assert not np.array_equal(state.averaged.weight, state.model.weight)
