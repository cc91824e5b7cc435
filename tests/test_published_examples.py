"""The examples that stand beside published results, on small stand-ins for their data."""

import gzip
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.test_examples import MIXED, PLAN, assert_private, load, statement

# MNIST.


def bars(count, seed):
    """Images with a bar whose height is the label."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    images = np.zeros((count, 28, 28), np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[4 + 2 * label : 6 + 2 * label, 6:22] = rng.integers(100, 255)
    return images, labels


@pytest.fixture
def folder(tmp_path):
    """The four files, as MNIST's are written: a word with the number of axes, sizes, bytes."""
    arrays = [*bars(256, 0), *bars(100, 1)]
    for name, array in zip(load("mnist_data").FILES, arrays, strict=True):
        sizes = np.array(array.shape, ">i4").tobytes()
        raw = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
        (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(raw))
    return tmp_path


def test_scattering_of_a_constant_is_the_constant():
    scattering = load("scattering")
    found = scattering.scatter(jnp.ones((1, 28, 28)))
    assert found.shape == (1, scattering.CHANNELS, 7, 7)
    constant = np.eye(1, scattering.CHANNELS)[:, :, None, None]
    np.testing.assert_allclose(found, np.broadcast_to(constant, found.shape), atol=1e-4)


@pytest.mark.slow
def test_recipes_of_mnist_learn_from_files(folder, capsys, monkeypatch):
    mnist, data = load("mnist"), load("mnist_data")
    digits, mixing = data.drawn_digits(1)[::12], np.random.default_rng(2).normal(size=(784, 324))
    monkeypatch.setattr(data, "drawn_digits", lambda copies: digits)
    monkeypatch.setattr(data, "scattered", lambda x: np.abs(x.reshape(len(x), -1) @ mixing))
    monkeypatch.setattr(data, "KEPT", 64)
    monkeypatch.setattr(mnist, "HELD_OUT", 64)
    # Accounting at such an epsilon takes seconds, and a test of the accounting is below.
    little = lambda epsilon, **plan: dp.PrivacyPlan(noise_multiplier=0.5, **plan)  # noqa: E731
    monkeypatch.setattr(dp.PrivacyPlan, "calibrate", little)
    for name, views in (("scatter", 1), ("ours", 1)):
        recipe = mnist.RECIPES[name]
        recipe = recipe._replace(batch=64, epochs=5, looks=min(recipe.looks, 100))
        monkeypatch.setitem(mnist.RECIPES, name, recipe)
        assert recipe.views(bars(4, 0)[0]).shape[:2] == (4, views)
        mnist.main(["--recipe", name, "--epsilon", "80", "--data", str(folder), "--choose"])
        run = json.loads(capsys.readouterr().out.splitlines()[1])
        assert (run["recipe"], run["images"]) == (name, 256 - 64)
        assert run["accuracy"] > 0.5


@pytest.mark.slow
def test_all_steps_of_a_recipe_together_spend_its_epsilon(folder, monkeypatch):
    mnist, taken = load("mnist"), []
    real = dp.Trainer.run

    def run(trainer, model):
        taken.append(trainer._step.plan)
        return real(trainer, model)

    monkeypatch.setattr(dp.Trainer, "run", run)
    images, labels, test, test_labels = mnist.load_images(folder)
    views = lambda x: x.reshape(len(x), 1, -1)[:, :, 200:216] / 256 + 0.01  # noqa: E731
    recipe = mnist.RECIPES["ours"]._replace(views=views, batch=64, epochs=2, looks=100)
    data = [recipe.views(images), labels, recipe.views(test), test_labels]
    mnist.train(recipe, data, 2.0, 0)
    looks, training = taken
    assert (looks.steps, training.steps) == (recipe.looks, 2 * 256 // 64)
    both = dp.PrivacyPlan(0.25, recipe.looks + 8, training.noise_multiplier, mnist.DELTA)
    assert looks.noise_multiplier == training.noise_multiplier
    assert 1.99 < both.epsilon() <= 2


# The table.


def test_the_table_of_the_pages_is_that_of_the_runs():
    published = load("published")
    runs = published.read_runs(published.RUNS)
    made = published.table(runs)
    assert {"scatter", "ours"} <= {run["recipe"] for run in runs} <= {"tanh", "scatter", "ours"}
    assert all(0.9 < run["accuracy"] < 1 and run["images"] == 60_000 for run in runs)
    for page in published.PAGES:
        text = page.read_text("utf-8")
        assert published.with_table(text, made) == text, "run: python examples/published.py"


# Text.


SCENE = "\nSCENE II. A wood.\n" + "Enter the king and all his men. " * 40
PLAY = "THE PLAY\n" + 3 * SCENE + "\nScene 4.\ntoo short\n"


def test_users_of_shakespeare_are_scenes():
    shakespeare = load("shakespeare")
    assert [len(part) > 1000 for part in shakespeare.scenes(PLAY)] == [True] * 3
    windows = shakespeare.examples_of([PLAY] * 2, 4, 8)
    assert windows.shape == (6, 4, 8)
    assert len(np.unique(windows.reshape(24, 8), axis=0)) == 4  # of each scene all its windows


@pytest.mark.slow
def test_scenes_of_shakespeare_train(monkeypatch, capsys):
    shakespeare = load("shakespeare")
    monkeypatch.setattr(shakespeare, "texts", lambda: (["Shall I compare thee " * 50], [PLAY] * 16))
    words = ["--steps", "10", "--windows", "2", "--length", "8", "--width", "16", "--epsilon", "3"]
    found = shakespeare.main(words)
    assert len(found) == 6
    assert found["all parameters", np.inf] < found["all parameters", 3.0]
    assert "42 private scenes of 2 windows, 6 held out" in capsys.readouterr().out


@pytest.mark.slow
def test_an_encoder_is_fine_tuned_and_saved_with_its_statement(tmp_path, monkeypatch):
    minilm, module, rng = load("minilm"), load("finetune_reviews"), np.random.default_rng(0)
    sizes = {"VOCABULARY": 50, "POSITIONS": 9, "WIDTH": 24, "INNER": 32, "DEPTH": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(minilm, name, size)
    encoder = dp.load_policy("bfloat16").cast_to_param(minilm.Encoder(jax.random.key(0)))
    labels = rng.integers(0, 2, 400).astype(np.int32)
    words = rng.integers(3, 26, (400, 6)) + 23 * labels[:, None]  # good reviews have other words
    replaced = {
        "WIDTH": 24,
        "HELD_OUT": 100,
        "DEPTH": 2,
        "pretrained": lambda dtype: encoder,
        "reviews": lambda: (["..."] * 400, labels),
        "tokens_of": lambda sentences, length: words.astype(np.int32),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(module, name, value)
    options = ["--blocks", "1", "--prob", "0.2", "--out", str(tmp_path), "--rate", "0.02"]
    assert module.main([*options, "--steps", "30", "--non-private"]) > 0.7
    module.main([*options, "--steps", "3"])
    released, epsilon = statement(tmp_path / "3")
    assert (released, round(epsilon, 1)) == (3, 3.0)
    model = module.Classifier(encoder.blocks[1:], jax.random.key(1))
    like = eqx.filter(model, module.trained(model))
    for inner, outer in module.factors(dp.load_model(tmp_path / "3.safetensors", like=like)):
        np.testing.assert_allclose(inner @ inner.T, np.eye(4), atol=1e-5)
        assert np.any(outer != 0)


# CIFAR-10.


def test_cifar10_is_read_from_the_binary_files(tmp_path):
    module = load("cifar10")
    rows = np.random.default_rng(0).integers(0, 10, (12, module.RECORD)).astype(np.uint8)
    for i, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        rows[2 * i : 2 * i + 2].tofile(tmp_path / name)
    images, labels, test, test_labels = module.load_images(tmp_path, 0)
    np.testing.assert_array_equal(labels, rows[:10, 0])
    np.testing.assert_array_equal(images.reshape(10, -1), rows[:10, 1:])
    np.testing.assert_array_equal(test[1].ravel(), rows[11, 1:])
    assert test_labels.dtype == np.int32
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(SystemExit, match=r"has no .*data_batch_3\.bin"):
        module.load_images(tmp_path, 0)


@pytest.mark.slow
def test_the_recipe_of_cifar10_runs_on_made_up_images(capsys):
    module = load("cifar10")
    words = ["--depth", "10", "--width", "1", "--views", "2", "--made-up", "16", "--batch", "8"]
    assert 0 <= module.main([*words, "--steps", "2"]) <= 1
    printed = capsys.readouterr().out
    assert "sum of parts" in printed
    assert "epsilon=8.00 delta=1e-05" in printed


@pytest.mark.slow
def test_a_linear_layer_learns_cifar10_and_bands_learn_mnist(folder, monkeypatch):
    module = load("cifar10_linear")
    monkeypatch.setattr(module, "CROPS", 40)
    assert module.main(["--epsilon", "80"])[80.0][0] > 30  # of ten classes
    found = load("mnist_correlated").main(["--epsilon", "80", "--data", str(folder)])
    assert [runs.min() > 90 for runs in found.values()] == [True, True]  # both kinds of noise


# Steps are private.


def mnist_step():
    mnist = load("mnist")
    options = {"num_examples": 2000, "l2_clip_norm": 0.3, "policy": MIXED}
    step = dp.make_step(mnist.loss, mnist.optax.sgd(1.0), PLAN, **options)
    return step, mnist.Linear(6), (np.zeros((64, 5, 6), np.float16), np.zeros(64, np.int32))


def moment_step():
    module = load("private_whitening")
    options = {"num_examples": 2000, "l2_clip_norm": 1.0}
    step = dp.make_step(module.moment_loss, module.optax.sgd(0.1), PLAN, **options)
    return step, module.Moment(jnp.zeros((6, 6))), (np.zeros((64, 6), np.float16),)


@pytest.mark.parametrize("made", [mnist_step, moment_step])
def test_the_steps_of_mnist_are_private(made):
    assert_private(*made())
