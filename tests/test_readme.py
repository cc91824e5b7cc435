"""What README.md says, done."""

import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import eqx_dp as dp

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block_after(marker: str) -> str:
    match = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert match, marker
    return match[1]


def test_the_training_step_runs_as_it_stands_and_learns(monkeypatch):
    monkeypatch.setattr("secrets.randbits", lambda bits: 2**bits - 1)  # the same run every time
    x = jax.random.normal(jax.random.key(3), (2_000, 4))
    names = {
        "model": eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0)),
        "xs": x,
        "ys": jnp.tanh(x[:, :1]),
    }
    untrained = jax.vmap(names["model"])(x)
    exec(block_after("readme: training step"), names)
    trained = jax.vmap(names["model"])(x)
    error = jnp.mean((trained - names["ys"]) ** 2) / jnp.mean((untrained - names["ys"]) ** 2)
    assert error < 0.2
    assert 2.9 < names["plan"].epsilon() <= 3.0
    assert names["opt_state"][0].step == names["plan"].steps


def test_the_presets_it_lists_are_the_presets():
    from eqx_dp import available_policies

    assert repr(available_policies()) in README


def test_the_sharded_training_step_runs_as_it_stands():
    x = jax.random.normal(jax.random.key(3), (2_000, 4))
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    names = {
        "dp": dp,
        "eqx": eqx,
        "jax": jax,
        "optax": optax,
        "model": model,
        "xs": x,
        "ys": jnp.tanh(x[:, :2]),
        "plan": dp.PrivacyPlan(sampling_prob=0.01, steps=3, noise_multiplier=1.0, delta=1e-5),
        "loss": lambda model, x, y: jnp.sum((model(x) - y) ** 2),
        "secret": 5,
    }
    exec(block_after("readme: sharded training step"), names)
    trained, (_, (adam, *_)) = names["model"], names["opt_state"]
    assert not jnp.allclose(trained.layers[0].weight, model.layers[0].weight)
    assert trained.layers[0].weight.sharding.spec == PartitionSpec("model", None)
    assert adam.mu.layers[0].weight.sharding.spec == PartitionSpec("model", "data")


def test_the_trainer_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = jax.random.normal(jax.random.key(3), (200, 4))
    names = {
        "dp": dp,
        "optax": optax,
        "model": eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)),
        "xs": np.asarray(x),
        "ys": np.tanh(x[:, :2]),
        "plan": dp.PrivacyPlan(sampling_prob=0.1, steps=3, noise_multiplier=1.0, delta=1e-5),
        "loss": lambda model, x, y: jnp.sum((model(x) - y) ** 2),
        "policy": dp.load_policy("mixed_bfloat16"),
        "seed": 5,
        "evaluate": lambda model: {"bias": jnp.sum(model.layers[0].bias)},
    }
    exec(block_after("readme: trainer"), names)
    assert names["state"].step == 3
    run = tmp_path / "run"
    assert json.loads((run / "privacy.json").read_text())["steps_done"] == 3
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
