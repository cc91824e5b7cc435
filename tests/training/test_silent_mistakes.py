"""What newcomers stumbled over in silence: each is refused, told, or safe by itself."""

import json
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
from eqx_dp.training import CheckpointWarning
from tests.training import runs
from tests.training.runs import XS, YS, make, small_model, trainer

GRAD_FN = dp.filter_clipped_grad(runs.loss, l2_clip_norm=1.0)
MASK = np.zeros(runs.NUM_EXAMPLES, bool)


def noise_of(step=None):
    """What holds a secret, and the numbers that nothing may show."""
    step = make() if step is None else step
    state, sampler = step.init(small_model()), step.sampler()
    words = [jax.random.key_data(k) for k in (state.opt_state.key, state.opt_state.noise.key)]
    numbers = [int(word) for word in np.concatenate(words)]
    return (step, sampler, state, state.opt_state, state.opt_state.noise), numbers, sampler.seed


def test_no_printed_form_and_no_pickle_shows_a_secret():
    holders, numbers, seed = noise_of()
    for one in holders:
        for printed in (repr(one), str(one), eqx.tree_pformat(one, short_arrays=False)):
            assert not any(str(number) in printed for number in numbers)
            assert repr(seed)[2:10] not in printed
            assert "key<" not in printed
        with pytest.raises(TypeError, match="holds a secret"):
            pickle.dumps(one)


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
        (optax.inject_hyperparams(optax.adamw)(1e-3), None),
        (optax.contrib.schedule_free_adamw(1e-3), None),
        (optax.MultiSteps(optax.lamb(1e-3), 2), None),
    ],
)
def test_clipping_that_was_left_in_the_chain_is_told(optimizer, clips):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(optimizer=optimizer)
    told = [str(w.message) for w in caught]
    assert [f"mostly noise: {clips}." in text for text in told] == [True] * (clips is not None)


GIVEN = {
    "step": lambda seed: make(seed=seed),
    "sampler": lambda seed: runs.plan_of().sampler(64, seed=seed),
    "privatizer": lambda seed: runs.plan_of().privatizer(GRAD_FN, key=seed),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_small_seed_is_told(name):
    for seed in (0, 1234, 2**32 - 1, b"\x07"):
        with pytest.warns(UserWarning, match="is small, and can be guessed") as caught:
            GIVEN[name](seed)
        assert "1234" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GIVEN[name](secrets.token_bytes(32))
        GIVEN[name](secrets.randbits(128) | 2**64)
        GIVEN[name](None)


def test_a_batch_size_is_not_taken_for_a_seed():
    for draw in (runs.plan_of().sampler, lambda n, x: dp.PoissonSampler(n, 0.1, x)):
        with pytest.raises(TypeError, match="positional argument"):
            draw(64, 64)


def test_arguments_that_are_missing_are_named(tmp_path):
    missing = r"loss was given a model and 1 arguments \(missing a required argument: 'y'\)"
    with pytest.raises(ValueError, match=missing):
        trainer(tmp_path, data=XS).run(small_model())
    step = make()
    with pytest.raises(ValueError, match=missing):
        step(step.init(small_model()), XS, is_padding_example=MASK)
    for run in (trainer(None).run, step.init):
        with pytest.raises(ValueError, match=r"Give the starting model, .*\. Found neither"):
            run()


def test_a_finished_run_says_so_and_that_the_arguments_are_not_used(tmp_path, capsys):
    done = trainer(tmp_path).run(small_model())
    for data in ((XS, YS), (-XS, YS)):
        capsys.readouterr()
        with pytest.warns(
            CheckpointWarning, match="this run is finished: 10 of 10 steps"
        ) as caught:
            again = trainer(tmp_path, data=data).run(jax.tree.map(jnp.zeros_like, small_model()))
        assert "the model, the loss and the data that are given now are not used" in str(
            caught[-1].message
        )
        assert "this run is finished: 10 of 10 steps" in capsys.readouterr().out
        runs.assert_same(again.model, done.model)
    with pytest.warns(CheckpointWarning, match="finished: 7 of 7 steps"):
        trainer(tmp_path).run(small_model(), steps=7)


@pytest.mark.parametrize("by", ["evaluate", "callback"])
def test_the_statement_of_a_best_model_counts_every_step_that_was_released(by, tmp_path):
    """It is saved while the run goes on: it never says fewer steps than its own."""
    counted = {}

    def save(step, model):
        file = tmp_path / f"{step}.safetensors"
        dp.save_model(file, model, privacy=tmp_path / "run")
        with pytest.importorskip("safetensors").safe_open(file, "numpy") as found:
            counted[step] = json.loads(found.metadata()["privacy"])

    def evaluate(model):
        save(1 + len(counted), model)
        return {"accuracy": 0.5}

    def callback(event):
        save(event.step, event.state.model)

    options = {"evaluate": evaluate} if by == "evaluate" else {"callbacks": [callback]}
    trainer(tmp_path / "run", evaluate_every=1, save_every=4, **options).run(small_model())
    assert [x["steps_released"] for x in counted.values()] == [4, 4, 4, 4, 8, 8, 8, 8, 10, 10]
    plan = runs.plan_of()
    for step, statement in counted.items():
        assert statement["steps_released"] >= step
        assert statement["epsilon"] == plan.epsilon(statement["steps_released"])


def test_a_loop_of_ones_own_goes_on_with_fresh_noise(tmp_path):
    """Model and optimizer are saved without the privatizer's state, which cannot be."""
    plan, file = runs.plan_of(), tmp_path / "state.eqx"
    optimizer = optax.chain(plan.privatizer(GRAD_FN), optax.trace(0.0), optax.sgd(0.1))

    def step(model, opt_state):
        updates, opt_state = optimizer.update(jax.tree.map(jnp.zeros_like, model), opt_state)
        return eqx.apply_updates(model, updates), opt_state

    model = small_model()
    model, opt_state = step(model, optimizer.init(model))
    with pytest.raises(RuntimeError, match="name='key'"):
        eqx.tree_serialise_leaves(tmp_path / "whole.eqx", (model, opt_state))
    eqx.tree_serialise_leaves(file, (model, opt_state[1:]))
    noises = []
    for _ in range(2):  # two starts, from one file
        fresh = optimizer.init(model)
        again, restored = eqx.tree_deserialise_leaves(file, (model, fresh[1:]))
        runs.assert_same((again, restored), (model, opt_state[1:]))
        _, after = step(again, (fresh[0], *restored))
        noises.append(after[1].trace.weight)
    noises.append(opt_state[1].trace.weight)
    assert len({noise.tobytes() for noise in map(np.asarray, noises)}) == 3
