"""A state comes back bit for bit, on any number of devices, with fresh keys."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.training import CheckpointWarning
from tests.tiers import curated
from tests.training import runs
from tests.training.runs import assert_same, make, small_model


def body(state):
    """What of a state is saved."""
    return state.model, state.opt_state[1], state.opt_state.average, state.step


def taken_up(directory, step, model):
    """The state with which the next start begins, before it takes a step."""
    ended = int(runs.released(directory))
    return runs.trainer(directory, step).run(model, steps=ended)


class Mixed(eqx.Module):
    weight: jax.Array
    numbers: np.ndarray
    name: str = "mixed"


def mixed():
    return Mixed(jnp.arange(3.0), np.arange(2, dtype=np.int8))


NARROW = "p=bf16,c=bf16,o=f32,rounding=stochastic,optimizer=bf16,narrow_optimizer=true"
CASES = {
    "average": ({"ema": 0.9}, small_model),
    "factored": ({"optimizer": optax.scale_by_factored_rms(min_dim_size_to_factor=1)}, small_model),
    "narrow": ({"policy": dp.parse_policy(NARROW)}, small_model),
    "integers": ({"loss": lambda model, x, y: jnp.sum(model.weight * x[:3]) - y}, mixed),
}


@pytest.mark.parametrize("name", curated(CASES, ["narrow"]))
def test_a_state_comes_back_bit_for_bit(name, tmp_path, recwarn):
    options, model = CASES[name]
    step = make(**options)
    state = runs.trainer(tmp_path, step).run(model(), steps=3)
    found = taken_up(tmp_path, step, model())
    assert_same(body(found), body(state))
    (warned,) = [str(w.message) for w in recwarn if w.category is CheckpointWarning]
    assert warned.startswith("this run is finished: 3 of 3 steps, in /")
    for key in (lambda x: x.opt_state.key, lambda x: x.opt_state.noise.stream.key):
        one, other = (jax.random.key_data(key(x)) for x in (found, state))
        assert not np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_other_numbers_of_devices(kind, tmp_path):
    many = make(sharding=runs.rules_of(kind), ema=0.9)
    state = runs.trainer(tmp_path, many).run(small_model(), steps=4)
    assert len(state.model.weight.sharding.device_set) == 8
    for devices in (4, 1):
        fewer = make(sharding=runs.rules_of(kind, devices), ema=0.9)
        found = taken_up(tmp_path, fewer, small_model())
        assert_same(body(found), body(state))
        expected = fewer.init(small_model())
        arrays = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (found, expected))
        assert all(one.sharding == other.sharding for one, other in zip(*arrays, strict=True))
    assert_same(body(taken_up(tmp_path, make(ema=0.9), small_model())), body(state))
    assert int(runs.trainer(tmp_path, many).run(small_model()).step) == 10


@pytest.mark.slow
def test_what_changed_beside_the_model_is_made_anew(tmp_path):
    """Another optimizer; an average that begins, one that is not kept any more; another dtype."""
    state = runs.trainer(tmp_path, make()).run(small_model(), steps=2)
    with pytest.warns(CheckpointWarning, match="optimizer's state in checkpoint 2"):
        other = taken_up(tmp_path, make(optimizer=optax.sgd(0.1)), small_model())
    assert_same((other.model, other.step), (state.model, state.step))
    begun = taken_up(tmp_path, make(ema=0.9), small_model())
    assert_same(begun.averaged, state.model)
    narrow = taken_up(tmp_path, make(policy=dp.load_policy("bfloat16")), small_model())
    assert_same(narrow.model.weight, state.model.weight.astype(jnp.bfloat16))
    runs.trainer(tmp_path, make(ema=0.9)).run(small_model(), steps=4)
    dropped = taken_up(tmp_path, make(), small_model())
    assert dropped.opt_state.average is None


def test_what_is_no_place_for_checkpoints(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/proc/self/task")):  # which not even root can write to
        with pytest.raises(dp.CheckpointError, match=str(place)):
            runs.trainer(place, make()).run(small_model())


@pytest.mark.slow
def test_a_save_does_not_see_the_next_step(tmp_path):
    """The buffers of a state are used up while it is still being written."""
    model = eqx.nn.Linear(1024, 1024, key=jax.random.key(1))  # 4 MiB take a while to write
    data, seen = (np.zeros((64, 1024), np.float32), np.zeros(64, np.float32)), {}

    def note(event):
        seen[event.step] = np.array(event.state.model.weight)

    step = make(optimizer=optax.sgd(1.0), loss=lambda model, x, y: 0.0 * jnp.sum(model(x)))
    trainer = runs.trainer(tmp_path, step, data, callbacks=[note], save_every=1, keep=10)
    trainer.run(model, steps=4)
    checkpoints = pytest.importorskip("orbax.checkpoint").PyTreeCheckpointer()
    for number, expected in seen.items():
        found = checkpoints.restore(tmp_path / "checkpoints" / str(number) / "state")
        np.testing.assert_array_equal(found["model.weight"], expected)


def test_a_model_with_a_key_is_refused(tmp_path):
    model = (small_model(), jax.random.key(5))
    step = make(loss=lambda model, x, y: runs.loss(model[0], x, y))
    with pytest.raises(ValueError, match=r"model\.1 is a key of random numbers"):
        runs.trainer(tmp_path, step).run(model)
    assert not runs.entries(tmp_path)  # before a step is released
    assert int(runs.trainer(None, step).run(model, steps=1).step) == 1
