"""The examples run as a reader would run them, and the steps that they train with are private."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_dp as dp
from tests.tiers import curated

EXAMPLES = Path(__file__).parents[1] / "examples"
PNG = b"\x89PNG"


def run(name, *arguments):
    """What an example prints, in a process of its own."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(name, folder=EXAMPLES):
    """The module of an example, or of another folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return importlib.import_module(name)


class Flat(eqx.Module):
    """In place of the network of the digits: compiled soon."""

    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(64, 10, key=key)

    def __call__(self, image):
        return self.linear(image.ravel())


def rows_of(output):
    """The cells of the tables that are printed, by the first cell of a row."""
    lines = [line.split("│")[1:-1] for line in output.splitlines() if "│" in line]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


# The digits. Short runs of digits.py, mnist_small.py and names.py are those of their notebooks.


@pytest.mark.slow
def test_digits_reach_their_accuracy(tmp_path):
    picture = tmp_path / "new folder" / "digits.png"
    *_, last = run("digits.py", "--seed", 0, "--out", picture).splitlines()
    accuracy = re.fullmatch(r"accuracy=(\d\.\d\d) epsilon=3\.00 delta=1e-05", last)[1]
    assert float(accuracy) >= 0.90
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", [pytest.param("mnist_small", marks=pytest.mark.slow), "names"])
def test_held_out_examples_are_not_trained_on(name):
    example = load(name)
    private, labels, held_out, held_out_labels = getattr(
        example, {"mnist_small": "load_images", "names": "load_names"}[name]
    )()
    counts = np.bincount(labels), np.bincount(held_out_labels)
    assert len(counts[0]) == len(counts[1]) == {"mnist_small": 10, "names": 12}[name]
    assert len(private) >= 4_000
    assert min(counts[1]) > 50
    if name == "mnist_small":
        assert not {image.tobytes() for image in private} & {x.tobytes() for x in held_out}


@pytest.mark.slow
def test_runs_with_too_little_noise_are_found(tmp_path, monkeypatch, capsys):
    audit = load("audit")
    monkeypatch.setattr(audit.digits, "Digits", Flat)
    claims = {"epsilon 3": False, "says 3, noise / 4": True, "says 3, no noise": True}
    monkeypatch.setattr(audit, "CASES", [case for case in audit.CASES if case.name in claims])
    picture = tmp_path / "audit.png"
    few = ("--steps", 40, "--images", 50, "--seed", 1, "--out", picture)
    monkeypatch.setattr(sys, "argv", ["audit.py", *map(str, few)])
    audit.main()
    output = capsys.readouterr().out
    for name, is_faulty in claims.items():
        upper, _, lower, by, _ = rows_of(output)[name]
        assert 2.99 < float(upper) <= 3
        assert (float(lower) > 3) == ("gradient" in by) == is_faulty
    last = output.splitlines()[-1]
    assert last == "give away more than they say: says 3, noise / 4; says 3, no noise"
    assert picture.read_bytes().startswith(PNG)


# Mixed precision.


@pytest.mark.slow
def test_mixed_precision_trains_and_draws(tmp_path):
    output = run(
        *("mixed_precision.py", "--out", tmp_path, "--only", "cost", "--only", "sums"),
        *("--only", "accuracy", "--policy", "float32", "--epsilon", 1, "--steps", 1, "--seeds", 1),
    )
    pictures = [path.name for path in tmp_path.iterdir()]
    assert sorted(pictures) == ["accuracy.png", "cost.png", "sums.png"]
    assert "Held-out accuracy at epsilon 1.00" in output
    lowest, mean, highest = map(float, rows_of(output)["float32"])
    assert 0 < lowest == mean == highest < 1


@pytest.mark.slow
def test_mixed_precision_compares_formats_and_layers(monkeypatch):
    formats = load("mixed_precision").narrow_formats
    task = formats.digits_task()
    task = task._replace(
        model=Flat,
        plan=lambda epsilon, steps: dp.PrivacyPlan(0.05, steps, 1.0 / epsilon, 1e-5),
        private=tuple(x[:64] for x in task.private),
        ends=("linear",),
        layers=("linear",),
    )
    monkeypatch.setattr(formats, "TASKS", (lambda: task,))
    (by_format,) = formats.measure_formats(3.0, 2, 1).values()
    dtypes = [runs[0].model.linear.weight.dtype for runs in by_format.values()]
    assert dtypes == ["float32"] * 4 + ["bfloat16"] * 2
    (layers,) = formats.measure_layers(3.0, 2).values()
    assert 0 < layers.error <= 0.05


@pytest.mark.slow
def test_correlated_noise_reaches_a_lower_loss(tmp_path):
    example, picture = load("correlated_noise"), tmp_path / "a.png"
    epsilon = [plan.epsilon() for plan in example.plans(4.0, 64, 2).values()]
    assert epsilon == pytest.approx([4.0, 4.0], rel=1e-3)
    independent, banded = example.main(["--seeds", "1", "--out", str(picture)]).values()
    assert banded.shape == independent.shape == (1, 64 // example.EVERY)
    assert banded[0, -1] < independent[0, -1] - 0.05
    assert picture.read_bytes().startswith(PNG)


# Language models: the text is cut, so that a run takes seconds.

TINY = ["--steps", "4", "--width", "16", "--depth", "1", "--length", "8", "--batch", "128"]


@pytest.fixture
def little_text(monkeypatch):
    gpt, lora = load("gpt"), load("lora")
    for name in ("documents_of_topics", "documents_of_sources"):
        beginnings = [text[:100] for text in getattr(gpt, name)()[::4]]
        for module in (gpt, lora):
            monkeypatch.setattr(module, name, lambda found=beginnings: found)
    return gpt, lora


def statement(directory):
    found = json.loads((directory / "privacy.json").read_text())
    return found["steps_released"], found["epsilon"]


@pytest.mark.slow
def test_gpt_trains_on_all_devices(little_text, tmp_path, capsys):
    gpt, _ = little_text
    words = [*TINY, "--epsilon", "1", "--out", str(tmp_path)]
    state = gpt.main(words)
    released, epsilon = statement(tmp_path / "gpt")
    assert released == int(state.step) == 4
    assert 0.99 < epsilon <= 1
    assert len(state.model.blocks.attend.weight.sharding.device_set) == 8
    gpt.main([*words, "--non-private"])
    assert statement(tmp_path / "gpt-non-private") == (4, "inf")
    assert "epsilon=inf" in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "gpt.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_lora_trains_adapters_alone(little_text, tmp_path):
    _, lora = little_text
    words = [*TINY, "--epsilon", "1", "--base-steps", "3", "--rank", "2", "--out", str(tmp_path)]
    base, model = lora.main(words)
    layers = lora.linears(model)
    assert eqx.tree_equal(eqx.tree_at(lora.linears, model, [x.base for x in layers]), base)
    assert all(np.all(layer.up != 0) for layer in layers)  # zero before training
    released, epsilon = statement(tmp_path / "adapted")
    assert released == 4
    assert 0.99 < epsilon <= 1


# The steps are private, as `check_privacy` reads them.

PLAN = dp.PrivacyPlan(sampling_prob=0.05, steps=100, noise_multiplier=2.0, delta=1e-5)
MIXED = dp.load_policy("mixed_bfloat16")


class FirstCall(Exception):
    """Is raised when an example takes its first step."""


def first_call(train):
    """The step that an example jits by hand, and what the example calls it with first."""
    real, found = eqx.filter_jit, []

    def filter_jit(function):
        def step(*arguments):
            found.extend((real(function), arguments))
            raise FirstCall

        return step if function.__name__ == "step" else real(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eqx, "filter_jit", filter_jit)
        with pytest.raises(FirstCall):
            train()
    return found


@pytest.mark.parametrize("preset", curated(["mixed_bfloat16", "mixed_float8"], ["mixed_float8"]))
def test_the_step_of_digits_is_private(preset):
    train = lambda: list(load("digits").train(PLAN, dp.load_policy(preset), 0))  # noqa: E731
    step, arguments = first_call(train)
    report = dp.check_privacy(step, *arguments, private=(2, 3, 4), plan=PLAN)
    report.raise_if_violated()
    assert report.noise_multiplier == pytest.approx(PLAN.noise_multiplier, rel=1e-3)


@pytest.mark.parametrize("name", ["train_privately", "train_privately_by_shard_map"])
def test_the_steps_of_data_parallel_are_private(name):
    tour = load("data_parallel")
    step, arguments = first_call(lambda: getattr(tour, name)(tour.rules_on(8)))
    report = dp.check_privacy(step, *arguments, private=(2,), plan=tour.PLAN)
    assert report.ok == (name == "train_privately")  # a shard_map by hand is undecided
    assert not report.violations


def text_step(adapters):
    gpt, lora = load("gpt"), load("lora")
    model = gpt.GPT(32, 48, 2, jax.random.key(0))
    if not adapters:
        step = gpt.make_step(PLAN, MIXED, 2000, 1e-2)
        return step, model, step.shard_batch((np.zeros((128, 32), np.uint8),))
    model = lora.adapted(model, 4, jax.random.key(1))
    step = lora.make_step(PLAN, 2000, lora.only_adapters(model), policy=MIXED, rate=1e-2)
    return step, model, (np.zeros((64, 32), np.uint8),)


def data_step(name, model, example, dtype):
    module = load(name)
    model = getattr(module, model)(jax.random.key(0))
    batch = np.zeros((64, *example), dtype), np.zeros(64, np.int32)
    return module.make_step(PLAN, MIXED, 2000, 0), model, batch


def assert_private(step, model, batch):
    (mask,) = step.shard_batch((np.zeros(len(batch[0]), bool),))
    report = dp.check_privacy(step, step.init(model), *batch, is_padding_example=mask)
    report.raise_if_violated()


STEPS = {
    "gpt": lambda: text_step(adapters=False),
    "lora": lambda: text_step(adapters=True),
    "mnist_small": lambda: data_step("mnist_small", "Convolutional", (1, 28, 28), np.float32),
    "names": lambda: data_step("names", "Recurrent", (load("names").LENGTH,), np.uint8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_step_of_an_example_is_private(name):
    assert_private(*STEPS[name]())
