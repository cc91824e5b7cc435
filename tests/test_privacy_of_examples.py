"""The steps of the examples are private, as `check_privacy` reads them."""

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_dp as dp
from tests.test_sharding_examples import tour
from tests.test_training_examples import load


class Called(Exception):
    """Is raised when an example takes its first step."""


def first_call(monkeypatch, run):
    """The step of an example that jits it by hand, and what the example calls it with."""
    real, found = eqx.filter_jit, {}

    def filter_jit(function):
        jitted = real(function)

        def step(*args):
            found.update(fn=jitted, args=args)
            raise Called

        return step if function.__name__ == "step" else jitted

    monkeypatch.setattr(eqx, "filter_jit", filter_jit)
    with pytest.raises(Called):
        run()
    monkeypatch.undo()
    return found["fn"], found["args"]


def plan_of(epsilon):
    return dp.PrivacyPlan.calibrate(epsilon=epsilon, delta=1e-5, sampling_prob=0.05, steps=100)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("preset", sorted({*dp.available_policies()} - {"float64"}))
def test_digits_by_every_preset(monkeypatch, preset):
    digits, plan = load("digits"), plan_of(3)
    train = lambda: list(digits.train(plan, dp.load_policy(preset), 0))  # noqa: E731
    step, args = first_call(monkeypatch, train)
    report = dp.check_privacy(step, *args, private=(2, 3, 4), plan=plan)
    report.raise_if_violated()
    assert report.noise_multiplier == pytest.approx(plan.noise_multiplier, rel=1e-3)


@pytest.mark.parametrize("way", ["train_privately", "train_privately_by_shard_map"])
def test_data_parallel(monkeypatch, way):
    step, args = first_call(monkeypatch, lambda: getattr(tour, way)(tour.rules_on(8)))
    dp.check_privacy(step, *args, private=(2,), plan=tour.PLAN).raise_if_violated()


@pytest.mark.slow
def test_gpt():
    gpt = load("gpt")
    step = gpt.make_step(plan_of(8), dp.load_policy("mixed_bfloat16"), 2000, 1e-2)
    state = step.init(gpt.GPT(32, 96, 3, jax.random.key(0)))
    text, mask = step.shard_batch((np.zeros((128, 32), np.uint8), np.zeros(128, bool)))
    dp.check_privacy(step, state, text, is_padding_example=mask).raise_if_violated()


@pytest.mark.parametrize("only_adapters", [True, False])
@pytest.mark.slow
def test_lora(only_adapters):
    gpt, lora = load("gpt"), load("lora")
    model, spec = gpt.GPT(32, 48, 2, jax.random.key(0)), eqx.is_inexact_array
    if only_adapters:
        model = lora.adapted(model, 4, jax.random.key(1))
        spec = lora.only_adapters(model)
    policy = dp.load_policy("mixed_bfloat16")
    step = lora.make_step(plan_of(3), 2000, spec, policy=policy, rate=1e-2)
    args = step.init(model), np.zeros((64, 32), np.uint8)
    dp.check_privacy(step, *args, is_padding_example=np.zeros(64, bool)).raise_if_violated()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mnist", "names"])
def test_data_of_packages(name):
    example, plan = load(name), plan_of(3)
    step = example.make_step(plan, dp.load_policy("mixed_bfloat16"), 2000, 0)
    model, one = {
        "mnist": lambda: (example.Convolutional, np.zeros((1, 28, 28), np.float32)),
        "names": lambda: (example.Recurrent, np.zeros(example.LENGTH, np.uint8)),
    }[name]()
    batch = np.stack([one] * 64), np.zeros(64, np.int32)
    state, mask = step.init(model(jax.random.key(0))), np.zeros(64, bool)
    dp.check_privacy(step, state, *batch, is_padding_example=mask).raise_if_violated()
