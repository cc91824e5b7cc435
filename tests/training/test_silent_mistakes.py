"""What newcomers stumbled over in silence: each is refused, told, or safe by itself."""

import pickle
import secrets
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from tests.training import runs
from tests.training.runs import XS, YS, make, small_model, trainer

GRAD_FN = dp.filter_clipped_grad(runs.loss, l2_clip_norm=1.0)
MASK = np.zeros(runs.NUM_EXAMPLES, bool)


@pytest.mark.parametrize("seed", [None, runs.SEED, 2**400 + 3, b"a secret of any length" * 5])
def test_no_printed_form_no_pickle_and_no_error_shows_a_secret(seed):
    step = make(seed=seed)
    state, sampler = step.init(small_model()), step.sampler()
    with pytest.raises(ValueError, match="examples") as error:
        step(state, XS[:4], YS[:3], is_padding_example=MASK[:4])
    keys = state.opt_state[0].stream.key, state.opt_state.key
    keys = np.concatenate([jax.random.key_data(key) for key in keys])
    secrets_of_it = [*map(str, keys.tolist()), repr(sampler.seed)[2:10], "key<"]
    secrets_of_it += [] if seed is None else [str(seed)[:10]]
    for one in (step, sampler, state, state.opt_state, state.opt_state.noise):
        for printed in (repr(one), str(one), eqx.tree_pformat(one, short_arrays=False)):
            assert not [x for x in secrets_of_it if x in printed]
        with pytest.raises(TypeError, match="holds a secret"):
            pickle.dumps(one)
    assert not [x for x in secrets_of_it if x in str(error.value)]


def chain(*parts):
    return optax.chain(*parts, optax.adam(1e-2))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: optax.masked(x, lambda _: True)])
def test_a_second_privatizer_is_refused(wrap):
    with pytest.raises(ValueError, match="gaussian_privatizer, and the step adds the plan's noise"):
        make(optimizer=chain(wrap(runs.plan_of().privatizer(GRAD_FN))))


@pytest.mark.parametrize(
    ("optimizer", "clips"),
    [
        (chain(optax.clip_by_global_norm(1.0)), "clip_by_global_norm"),
        (chain(optax.masked(optax.clip(1.0), lambda _: True)), "clip"),
        (optax.apply_if_finite(chain(optax.adaptive_grad_clip(1.0)), 3), "adaptive_grad_clip"),
        (optax.adafactor(1e-3), None),
        (optax.MultiSteps(optax.inject_hyperparams(optax.lamb)(1e-3), 2), None),
    ],
)
def test_clipping_that_was_left_in_the_chain_is_told(optimizer, clips, recwarn):
    make(optimizer=optimizer)
    warned = [str(w.message) for w in recwarn]
    assert [f"mostly noise: {clips}." in text for text in warned] == [True] * (clips is not None)


@pytest.mark.parametrize(
    "make_with",
    [
        lambda seed: make(seed=seed),
        lambda seed: runs.plan_of().sampler(64, seed=seed),
        lambda seed: runs.plan_of().privatizer(GRAD_FN, key=seed),
        lambda seed: dp.gaussian_privatizer(stddev=1.0, key=seed),
        dp.noise_stream,
    ],
    ids=["step", "sampler", "privatizer", "noise", "stream"],
)
def test_a_small_seed_is_told(make_with):
    for seed in (0, 1234, 2**32 - 1, b"\x07", b"\xff" * 4):
        with pytest.warns(UserWarning, match="is small, and can be guessed") as caught:
            make_with(seed)
        assert "1234" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in (2**32, 2**127, secrets.token_bytes(32), secrets.randbits(128) | 2**64, None):
            make_with(seed)


def test_the_released_count_has_noise_of_its_own():
    step = make(loss=lambda model, x, y: model * y, l2_clip_norm=dp.clipping.Quantile())
    state = step(step.init(jnp.ones(())), XS, YS, is_padding_example=MASK)
    assert int(state.opt_state.noise.stream.counter[0]) == 2


def test_arguments_that_are_missing_are_named():
    missing = r"loss was given a model and 1 arguments \(missing a required argument: 'y'\)"
    with pytest.raises(ValueError, match=missing):
        trainer(None, data=XS).run(small_model())
    step = make()
    with pytest.raises(ValueError, match=missing):
        step(step.init(small_model()), XS, is_padding_example=MASK)


def test_the_statement_of_a_model_saved_meanwhile_counts_every_step_that_was_released(tmp_path):
    """It never says fewer steps than the model's own: those of the announced block count."""
    counted = {"evaluate": [], "callback": []}

    def save(by, model):
        file = tmp_path / "model.safetensors"
        dp.save_model(file, model, privacy=tmp_path / "run")
        statement = runs.stated_in(file)
        counted[by].append(statement["steps_released"])
        assert statement["epsilon"] == runs.plan_of().epsilon(statement["steps_released"])
        return {"accuracy": 0.5}

    options = {"evaluate": lambda model: save("evaluate", model), "evaluate_every": 1}
    callbacks = [lambda event: save("callback", event.state.model)]
    run = trainer(tmp_path / "run", callbacks=callbacks, save_every=4, **options)
    run.run(small_model())
    assert counted["callback"] == [4] * 4 + [8] * 4 + [10] * 2
    assert counted["evaluate"] == [4, *counted["callback"]]  # once before the first step


def test_a_loop_of_ones_own_goes_on_with_fresh_noise(tmp_path):
    """Model and optimizer are saved without the privatizer's state, which cannot be."""
    file, model, noises = tmp_path / "state.eqx", small_model(), []
    optimizer = optax.chain(runs.plan_of().privatizer(GRAD_FN), optax.trace(0.0))
    _, opt_state = optimizer.update(jax.tree.map(jnp.zeros_like, model), optimizer.init(model))
    with pytest.raises(RuntimeError, match="name='key'"):
        eqx.tree_serialise_leaves(tmp_path / "whole.eqx", (model, opt_state))
    eqx.tree_serialise_leaves(file, (model, opt_state[1:]))
    for _ in range(2):  # two starts, from one file
        fresh = optimizer.init(model)
        again, restored = eqx.tree_deserialise_leaves(file, (model, fresh[1:]))
        runs.assert_same((again, restored), (model, opt_state[1:]))
        noise, _ = optimizer.update(jax.tree.map(jnp.zeros_like, model), (fresh[0], *restored))
        noises.append(noise.weight)
    noises.append(opt_state[1].trace.weight)
    assert len({noise.tobytes() for noise in map(np.asarray, noises)}) == 3
