"""The examples, run as a reader would run them."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: object, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_line(output: str) -> tuple[float, float, float]:
    line = output.splitlines()[-1]
    match = re.fullmatch(r"accuracy=(\d\.\d\d) epsilon=(\d+\.\d\d) delta=(\S+)", line)
    assert match, line
    accuracy, epsilon, delta = map(float, match.groups())
    return accuracy, epsilon, delta


@pytest.mark.exhaustive
def test_digits_reach_their_accuracy(tmp_path):
    picture = tmp_path / "new folder" / "digits.png"
    accuracy, epsilon, delta = last_line(run("digits.py", "--seed", 0, "--out", picture))
    assert accuracy >= 0.90
    assert (epsilon, delta) == (3.0, 1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_digits_take_their_options(tmp_path, fast):
    output = run(
        *("digits.py", "--policy", "mixed_float16", "--epsilon", 1, "--steps", 6, "--seed", 1),
        *("--out", tmp_path / "digits.png"),
        env=fast,
    )
    _, epsilon, _ = last_line(output)
    assert epsilon == 1.0
    assert "6/6" in output


@pytest.fixture(scope="module")
def mixed_precision():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("mixed_precision")


def columns(output: str, first: str) -> list[list[str]]:
    """What the tables that are printed say, in the rows that start with a name."""
    rows = [line.split("│")[1:-1] for line in output.splitlines() if "│" in line]
    return [[cell.strip() for cell in row[1:]] for row in rows if row[0].strip() == first]


@pytest.mark.slow
def test_mixed_precision_trains_and_draws(tmp_path, fast):
    folder = tmp_path / "new folder"
    output = run(
        *("mixed_precision.py", "--out", folder, "--only", "sums", "--only", "accuracy"),
        *("--policy", "float32", "--epsilon", 1, "--steps", 1, "--seeds", 1),
        env=fast,
    )
    assert sorted(path.name for path in folder.iterdir()) == ["accuracy.png", "sums.png"]
    for picture in folder.iterdir():
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"picture: {picture}" in output
    sums, accuracies = columns(output, "float32")
    assert all(float(error) < 2e-6 for error in sums)
    assert "Held-out accuracy at epsilon 1.00" in output
    lowest, mean, highest = accuracies
    assert 0 < float(lowest) == float(mean) == float(highest) < 1


@pytest.mark.slow
def test_mixed_precision_compares_formats_and_layers(mixed_precision, monkeypatch, tmp_path):
    formats = mixed_precision.narrow_formats
    monkeypatch.setattr(formats.digits, "Digits", Flat)
    task = formats.digits_task()._replace(
        plan=lambda epsilon, steps: dp.PrivacyPlan(0.05, steps, 1.0 / epsilon, 1e-5),
        private=tuple(x[:64] for x in formats.digits_task().private),
        ends=("linear",),
        layers=("linear",),
    )
    monkeypatch.setattr(formats, "TASKS", (lambda: task, lambda: task._replace(name="again")))
    six = formats.formats(task)
    monkeypatch.setattr(formats, "formats", lambda task: {name: six[name] for name in [*six][::5]})
    found = formats.measure_formats(3.0, 2, 2)
    assert [*found] == [task.name, "again"]
    for by_format in found.values():
        assert [*by_format] == ["float32", "bfloat16 storage, stochastic"]
        for runs in by_format.values():
            assert len(runs) == 2
            assert all(0 <= run.accuracy <= 1 and run.loss > 0 for run in runs)
        wide, narrow = (runs[0].model.linear.weight for runs in by_format.values())
        assert (str(wide.dtype), str(narrow.dtype)) == ("float32", "bfloat16")
    figure = formats.draw_formats(found, 3.0)
    picture = mixed_precision.save(figure, tmp_path / "formats.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert formats.tabulate_formats(found, 3.0).row_count == 2

    monkeypatch.setattr(formats, "TASKS", (lambda: task,))
    measured = dict.fromkeys((task.name, "again"), formats.measure_layers(3.0, 1)[task.name])
    for name, errors in measured[task.name].alone.items():
        assert 0 < errors["linear"] <= 1.5 * measured[task.name].everywhere[name] < 1
    picture = mixed_precision.save(formats.draw_layers(measured), tmp_path / "layers.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert formats.tabulate_layers(measured).row_count == 4


def test_layers_that_cost_most_are_kept_wide(mixed_precision):
    """Of a model in which one layer alone is sensitive, that layer."""
    module = importlib.import_module("precision_sensitivity")

    class Two(eqx.Module):
        fine: eqx.nn.Linear
        coarse: eqx.nn.Linear

        def __call__(self, x):
            return self.coarse(1e-3 * self.fine(x) + x)

    keys = jax.random.split(jax.random.key(0))
    model = Two(*(eqx.nn.Linear(16, 16, key=key) for key in keys))
    xs = np.random.default_rng(0).standard_normal((8, 16), np.float32)
    options = {"clip_norm": 1e6, "layers": ("fine", "coarse"), "policies": ("mixed_float8",)}
    found = module.sensitivity(
        lambda model, x: (model(x) ** 2).sum(), model, (xs,), tolerance=0.02, **options
    )
    alone, everywhere = found.alone["mixed_float8"], found.everywhere["mixed_float8"]
    assert alone["fine"] < alone["coarse"] <= everywhere
    assert found.kept_wide[0] == "coarse"
    assert found.error <= 0.02 < everywhere
    assert dp.parse_policy(str(found.recommended)) == found.recommended
    none = module.sensitivity(
        lambda model, x: (model(x) ** 2).sum(), model, (xs,), tolerance=1e-9, **options
    )
    assert none.recommended is None


def test_formats_of_the_comparison(mixed_precision):
    formats = mixed_precision.narrow_formats
    task = formats.gpt_task()
    policies = formats.formats(task)
    assert len(policies) == 6
    model = eqx.filter_eval_shape(task.model, jax.random.key(0))
    wide = policies["mixed_float8, first and last wide"]
    assert [(rule.match, rule.matmul) for rule in wide.modules] == [
        *(("blocks.attend", "wide"), ("head", "wide"))
    ]
    dp.apply_policy(model, wide)  # every rule has an effect
    stored = [policy for name, policy in policies.items() if "storage" in name]
    assert [policy.rounding for policy in stored] == ["nearest", "stochastic"]
    assert all(policy.param_dtype == policy.compute_dtype == "bfloat16" for policy in stored)


def test_mixed_precision_trains_each_policy_from_each_seed(mixed_precision, monkeypatch):
    plan = dp.PrivacyPlan(sampling_prob=0.3, steps=3, noise_multiplier=9.0, delta=1e-5)
    policies = {name: dp.load_policy(name) for name in ("float32", "mixed_float16")}

    def train(given, policy, seed):
        assert given is plan
        last = seed / 10 + (policy == policies["mixed_float16"]) / 100
        yield from ((1, 0.5, 0.1), (2, None, None), (3, last, 0.2))

    monkeypatch.setattr(mixed_precision.digits, "train", train)
    found = mixed_precision.measure_accuracy(policies, plan, 2)
    assert found == {"float32": [0.0, 0.1], "mixed_float16": [0.01, 0.11]}


class Flat(eqx.Module):
    """In place of the network of the digits: compiled soon."""

    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(64, 10, key=key)

    def __call__(self, image):
        return self.linear(image.ravel())


@pytest.mark.slow
def test_mixed_precision_times_and_weighs_a_step(mixed_precision, monkeypatch, tmp_path):
    monkeypatch.setattr(mixed_precision.digits, "Digits", Flat)
    costs = mixed_precision.measure_cost(
        {name: dp.load_policy(name) for name in ("float32", "mixed_bfloat16")}
    )
    assert list(costs) == ["float32", "mixed_bfloat16"]
    for cost in costs.values():
        assert len(cost.seconds) == mixed_precision.ROUNDS
        assert min(cost.seconds) > 0
        assert cost.temporary_bytes > 0
    ratios = mixed_precision.time_ratios(costs)
    np.testing.assert_array_equal(ratios["float32"], 1)
    assert np.all(np.diff(ratios["mixed_bfloat16"]) >= 0)
    picture = mixed_precision.save(mixed_precision.draw_cost(costs), tmp_path / "cost.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_running_sum_is_rounded_at_each_example(mixed_precision):
    vectors = mixed_precision.clipped_gradients(0.5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    for dtype in mixed_precision.DTYPES:
        narrow, total, sums = vectors.astype(jnp.dtype(dtype)), 0, {}
        for number, vector in enumerate(narrow, start=1):
            total = (total + vector).astype(narrow.dtype)
            sums[number] = total
        expected = np.float64([sums[size] for size in mixed_precision.SIZES])
        np.testing.assert_array_equal(mixed_precision.running_sums(vectors, dtype), expected)


def test_the_narrower_a_sum_the_larger_its_error(mixed_precision):
    for by_dtype in mixed_precision.measure_sums().values():
        bfloat16, float16, float32 = (np.array(by_dtype[dtype]) for dtype in by_dtype)
        assert np.all(bfloat16 > 4 * float16)
        assert np.all(float16 > 1000 * float32)
        assert np.all(float32 < 2e-6)
        for errors in (bfloat16, float16, float32):
            assert errors[-1] > 20 * errors[0]


@pytest.mark.slow
def test_narrow_noise_is_no_gaussian(mixed_precision, tmp_path):
    draws = mixed_precision.measure_noise()
    assert len(np.unique(draws["bfloat16"])) == 128
    assert np.max(np.abs(draws["bfloat16"])) < 2.9
    assert len(np.unique(draws["float16"])) == 1024
    assert np.max(np.abs(draws["float16"])) < 3.5
    assert len(np.unique(draws["float32"])) > 1e6
    bounds = np.array([1.0, 2.0, 3.0, 4.0])
    beyond = mixed_precision.tail(draws["float32"], bounds)
    exact = np.array([3.173e-1, 4.550e-2, 2.700e-3, 6.334e-5])  # a table's
    deviation = np.sqrt(exact / mixed_precision.DRAWS)
    assert np.all(np.abs(beyond - exact) < 4 * deviation + 1e-4 * exact)
    picture = mixed_precision.save(mixed_precision.draw_noise(draws), tmp_path / "noise.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_tail_of_few_draws_is_left_out(mixed_precision):
    values = np.append(np.full(5, -2.0), np.linspace(-1, 1, 21))
    beyond = mixed_precision.tail(values, np.array([0.45, 0.85, 1.0, 2.0]))
    np.testing.assert_array_equal(beyond, [17 / 26, np.nan, np.nan, 1e-12])


def test_policies_that_are_compared(mixed_precision):
    policies = mixed_precision.load_policies([])
    assert next(iter(policies)) == "float32"
    assert set(policies) - {mixed_precision.UNSAFE} == {*dp.available_policies()} - {"float64"}
    assert [name for name, policy in policies.items() if policy.unsafe] == [mixed_precision.UNSAFE]


def load(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "least"), [("mnist", 0.86), ("names", 0.62)])
def test_data_of_packages_is_learned(name, least, tmp_path):
    picture = tmp_path / f"{name}.png"
    accuracy, epsilon, delta = last_line(run(f"{name}.py", "--seed", 0, "--out", picture))
    assert accuracy >= least
    assert (epsilon, delta) == (3.0, 1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_images_of_mnist():
    images, labels, held_out, held_out_labels = load("mnist").load_images()
    assert images.shape == (4_000, 1, 28, 28)
    assert held_out.shape == (1_000, 1, 28, 28)
    assert (images.min(), images.max()) == (0, 1)
    assert np.bincount(labels).tolist() == [400] * 10
    assert np.bincount(held_out_labels).tolist() == [100] * 10
    assert not {image.tobytes() for image in images} & {image.tobytes() for image in held_out}


@pytest.mark.slow
def test_names_are_read_character_by_character():
    names = load("names")
    assert names.encoded("Åb-ç")[:4] == [3, 4, 5, 0]  # as "Abc"
    assert len(names.encoded("a" * 40)) == names.LENGTH
    model = names.Recurrent(jax.random.key(0))
    text = jnp.array(names.encoded("Meyer"), jnp.uint8)
    padded = jnp.concatenate([text, jnp.zeros(5, jnp.uint8)])
    np.testing.assert_array_equal(model(text), model(padded))
    assert np.any(model(text) != model(text.at[4].set(1)))


def test_surnames_belong_to_one_language():
    names = load("names")
    train, languages, held_out, held_out_languages = names.load_names()
    assert train.shape == (10_000, names.LENGTH)
    assert held_out.shape[0] > 2_000
    assert np.all(train[:, 0] > 0)
    counts = np.bincount(languages), np.bincount(held_out_languages)
    assert len(counts[0]) == len(counts[1]) == len(names.LANGUAGES)
    assert all(count.min() > 50 for count in counts)


@pytest.fixture(scope="module")
def few():
    """The two examples, on a few examples each and with networks that are compiled soon."""
    mnist, names = load("mnist"), load("names")
    rng = np.random.default_rng(0)
    images = rng.random((40, 1, 28, 28), np.float32), np.arange(40) % 10
    letters = rng.integers(1, 27, (40, names.LENGTH)).astype(np.uint8), np.arange(40) % 12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist, "load_images", lambda: [*images, *images])
        patch.setattr(
            mnist, "Convolutional", lambda key: eqx.nn.Sequential(_flat(28 * 28, 10, key))
        )
        patch.setattr(names, "load_names", lambda: [*letters, *letters])
        patch.setattr(
            names, "Recurrent", lambda key: eqx.nn.Sequential(_flat(names.LENGTH, 12, key))
        )
        yield mnist, names


def _flat(size, classes, key):
    return [eqx.nn.Lambda(lambda x: x.ravel() / 1.0), eqx.nn.Linear(size, classes, key=key)]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [0, 1])
def test_data_of_packages_takes_options(few, number, tmp_path, capsys):
    picture = tmp_path / "new folder" / "picture.png"
    few[number].main(
        [*("--epsilon", "1", "--steps", "4", "--policy", "float32"), *("--out", str(picture))]
    )
    assert last_line(capsys.readouterr().out)[1:] == (1.0, 1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_accuracy_is_measured_at_every_epsilon(monkeypatch, tmp_path, capsys):
    module = load("accuracy_by_epsilon")
    asked = []

    def train(plan, policy, seed):
        asked.append((round(plan.epsilon(), 2), plan.steps, seed))
        return [(1, 0.2, 0.1), (2, 0.5 + seed / 10, 0.2)]

    monkeypatch.setattr(module, "EPSILONS", (1.0, float("inf")))
    monkeypatch.setattr(module.names, "train", train)
    picture = tmp_path / "accuracy.png"
    module.main(["--only", "names", "--seeds", "2", "--steps", "3", "--out", str(picture)])
    assert asked == [(1.0, 3, 0), (1.0, 3, 1), (float("inf"), 3, 0), (float("inf"), 3, 1)]
    assert "names, epsilon inf: 0.550" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
