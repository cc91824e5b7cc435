"""A trained model without its run: read from a directory, and from one file."""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import eqx_dp as dp
from eqx_dp.training import CheckpointWarning
from tests.training import runs
from tests.training.runs import assert_same, plan_of, rules_of, small_model, trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    state = trainer(directory).run(small_model())
    return directory, state.model


def shapes():
    return eqx.filter_eval_shape(small_model)


def test_a_run_s_model_is_read_without_the_run(run):
    directory, trained = run
    for like in (small_model(), shapes()):
        found = dp.load_model(directory, like=like)
        assert_same(found, trained)
        assert found.use_bias is True
    assert not np.array_equal(trained.weight, small_model().weight)


def test_a_model_in_a_file_comes_back_with_its_statement(run, tmp_path):
    directory, trained = run
    file, policy = tmp_path / "model.safetensors", dp.load_policy("mixed_bfloat16")
    dp.save_model(file, trained, privacy=directory, policy=policy)
    assert_same(dp.load_model(file, like=shapes()), trained)
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
        assert set(opened.keys()) == {"weight", "bias"}
    statement = json.loads((directory / "privacy.json").read_text())
    assert json.loads(metadata["privacy"]) == statement
    assert statement["epsilon"] == plan_of().epsilon()
    assert metadata["policy"] == str(policy)
    assert list(tmp_path.iterdir()) == [file]
    assert not [x for x in (str(directory), "opt_state") if x.encode() in file.read_bytes()]


class Nested(eqx.Module):
    parts: dict
    many: list
    name: str = "nested"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.bool_])
def test_every_dtype_and_place_comes_back(dtype, tmp_path):
    model = Nested({"a b": jnp.ones((2, 0), dtype), "c": None}, [jnp.zeros((), dtype), "text"])
    file = tmp_path / "model.safetensors"
    dp.save_model(file, model)
    found = dp.load_model(file, like=model)
    assert_same(found, model)
    assert found.many[1] == "text"


def test_arrays_are_read_to_where_those_of_like_live(run):
    directory, trained = run
    rules = rules_of("Auto")
    with jax.set_mesh(rules.mesh):
        like = rules.shard(small_model())
        found = dp.load_model(directory, like=like)
    assert found.weight.sharding == like.weight.sharding
    assert_same(found, trained)


def test_a_checkpoint_that_is_damaged_is_not_read(run, tmp_path):
    directory = shutil.copytree(run[0], tmp_path / "run")
    latest = directory / "checkpoints" / str(runs.saved(directory)[-1])
    (latest / "state" / "_METADATA").write_text("{")
    with pytest.warns(CheckpointWarning, match="the one before it is tried"):
        found = dp.load_model(directory, like=shapes())
    assert not np.array_equal(found.weight, run[1].weight)
    assert latest.exists()  # reading changes nothing


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (lambda: small_model(width=3), r"weight: \(2, 4\) there, \(3, 4\) here"),
        (lambda: small_model(use_bias=False), r"bias: \(2,\) there, nothing here"),
        (lambda: (small_model(), jnp.ones(1)), r"nothing there, \(1,\) here"),
    ],
)
def test_another_structure_is_refused(run, tmp_path, like, message):
    file = tmp_path / "model.safetensors"
    dp.save_model(file, run[1])
    for source in (run[0], file):
        with pytest.raises(ValueError, match=message):
            dp.load_model(source, like=like())


@pytest.mark.parametrize("name", ["", "damaged.safetensors", "nowhere.safetensors"])
def test_what_is_no_model_is_not_read(name, tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(b"no")
    message = "cannot be read" if name else "holds no checkpoint"
    with pytest.raises(dp.CheckpointError, match=message):
        dp.load_model(tmp_path / name, like=small_model())


KEY = jax.random.key(3)
REFUSED = {
    "no statement": (dp.CheckpointError, {"privacy": Path()}, "holds no ledger of a run"),
    "a key": (ValueError, {"model": [KEY]}, "0.? is a key of random numbers"),
    "words of a key": (
        ValueError,
        {"model": {"w": jnp.ones(2), "key": jax.random.key_data(KEY)}},
        r"model\.key is a key of random numbers, or looks like one",
    ),
    "words of ChaCha": (ValueError, {"model": [jnp.arange(8, dtype=jnp.uint32)]}, "looks like one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_written(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error, options, message = REFUSED[name]
    options = {"file": "model.safetensors", "model": small_model()} | options
    with pytest.raises(error, match=message):
        dp.save_model(options.pop("file"), options.pop("model"), **options)
    assert not list(tmp_path.iterdir())
