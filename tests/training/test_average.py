"""The moving average of parameters: what it is, that it changes nothing else, that it is saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.training.runs import (
    XS,
    YS,
    assert_same,
    leaves,
    make,
    plan_of,
    rules_of,
    small_model,
    trainer,
)


def models_of(step, count):
    """The states after each step."""
    state, sampler = step.init(small_model()), step.sampler(small_model(), XS, YS)
    for t in range(count):
        indices, mask = sampler.batch(t)
        batch = step.place((XS[indices], YS[indices], mask))
        state = step(state, *batch[:2], is_padding_example=batch[2])
        yield jax.tree.map(np.asarray, (state.model, state.averaged))


@pytest.mark.parametrize("ema", [0.0, 0.5, 0.999])
def test_it_is_the_weighted_mean_of_the_models_so_far(ema):
    models = []
    for model, averaged in models_of(make(ema=ema), 5):
        models.append(leaves(model))
        weights = np.array([ema**i for i in range(len(models))][::-1], np.float64)
        for i, found in enumerate(leaves(averaged)):
            past = np.stack([its[i] for its in models]).astype(np.float64)
            expected = np.tensordot(weights / weights.sum(), past, 1)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_steps_and_noise_are_those_without_it():
    (one, _), (other, _) = (
        (step(state, XS, YS, is_padding_example=np.zeros(len(XS), bool)).model, None)
        for step in (make(), make(ema=0.9))
        for state in [step.init(small_model())]
    )
    assert_same(one, other)


def test_narrow_storage_has_a_wide_average():
    step = make(ema=0.9, policy=dp.load_policy("bfloat16"))
    state = step.init(small_model())
    assert {x.dtype for x in jax.tree.leaves(state.average)} == {jnp.dtype(jnp.float32)}
    assert state.averaged.weight.dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_with_the_same_average(tmp_path):
    seen = []

    def evaluate(model):
        seen.append(leaves(model))
        return {"weight": float(jnp.sum(model.weight))}

    whole = trainer(tmp_path / "whole", make(ema=0.9), evaluate=evaluate, evaluate_every=10)
    state = whole.run(small_model())
    np.testing.assert_array_equal(seen[-1][0], state.averaged.weight)  # what is evaluated
    for steps in (4, 10):
        parts = trainer(tmp_path / "parts", make(ema=0.9)).run(small_model(), steps=steps)
    assert_same(parts.average, state.average)
    for found in (
        dp.load_model(tmp_path / "whole", like=small_model(), averaged=True),
        state.averaged,
    ):
        assert_same(found, state.averaged)
    assert not np.array_equal(state.averaged.weight, state.model.weight)
    assert_same(dp.load_model(tmp_path / "whole", like=small_model()), state.model)


@pytest.mark.slow
def test_on_a_mesh_it_lives_where_gradients_do():
    rules = rules_of("Explicit")
    step = make(ema=0.9, sharding=rules)
    *_, (_, averaged) = models_of(step, 2)
    *_, (_, alone) = models_of(make(ema=0.9), 2)
    for one, other in zip(leaves(averaged), leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_another_decay_is_another_run_unless_asked_for(tmp_path):
    trainer(tmp_path / "run", make(ema=0.9)).run(small_model(), steps=4)
    for ema in (0.99, None):
        with pytest.raises(ValueError, match="ema"):
            trainer(tmp_path / "run", make(ema=ema)).run(small_model())
    other = trainer(tmp_path / "run", make(ema=0.99), allow_changed=("ema",))
    assert other.run(small_model()).step == plan_of().steps


@pytest.mark.parametrize("ema", [1, 1.5, -0.1, float("nan"), True])
def test_a_decay_is_below_one(ema, unchecked):
    with pytest.raises(ValueError, match="ema must be"):
        make(ema=ema)


def test_without_one_there_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"make_step\(\.\.\., ema=0\.999\)"):
        _ = make().init(small_model()).averaged
    trainer(tmp_path / "run").run(small_model())
    with pytest.raises(dp.CheckpointError, match="without `ema`"):
        dp.load_model(tmp_path / "run", like=small_model(), averaged=True)
