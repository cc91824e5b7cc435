"""A first state is made where it is to live, and a run holds no more than it needs."""

import inspect
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import eqx_dp as dp
from tests.training import runs
from tests.training.runs import assert_same, seeded, small_model


class Net(eqx.Module):
    """Arrays that are trained and that are not, and leaves that are no arrays."""

    weight: jax.Array
    frozen: jax.Array
    key: jax.Array
    activation: object = jax.nn.tanh
    name: str = eqx.field(static=True, default="net")

    def __call__(self, x):
        return self.activation(self.weight @ x) * self.frozen[0]


def net():
    """The same values whether it is compiled or not."""
    weight = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    return Net(weight, jnp.asarray([2, 3]), jax.random.key(3))


def placed(state):
    return [x.sharding for x in jax.tree.leaves(eqx.filter(state, eqx.is_array))]


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    # New arrays, sums over rows, a copy of the parameters.
    "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=1),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(None, "factored"), ("Auto", "adam"), ("Explicit", "schedule free")]
)
def test_a_state_that_is_made_is_the_one_of_a_model(kind, name):
    options = {"policy": dp.load_policy("mixed_bfloat16"), "ema": 0.9}
    rules = kind and runs.rules_of(kind)
    step = seeded(optimizer=OPTIMIZERS[name], sharding=rules, **options)
    given, made = step.init(net()), step.init(init_model=net)
    assert_same(made, given)
    assert placed(made) == placed(given)
    assert (made.model.activation, made.model.name) == (jax.nn.tanh, "net")


def test_no_device_makes_a_whole_array(monkeypatch):
    """Random numbers for 4 MiB: a device holds its eighth of them, and what threefry needs."""
    jit, programs = jax.jit, []

    def noted(function, **options):
        def call(*args):
            programs.append(jit(function, **options).lower(*args).compile())
            return programs[-1](*args)

        return call if "out_shardings" in options else jit(function, **options)

    def large():
        weight = jax.random.normal(jax.random.key(0), (1024, 1024))
        return eqx.tree_at(lambda m: m.weight, small_model(), weight)

    mesh = jax.make_mesh((8,), ("data",))
    step = seeded(sharding=dp.ShardingRules(mesh, params=(("weight", jax.P(None, "data")),)))
    monkeypatch.setattr(jax, "jit", noted)
    whole = step.init(init_model=large).model.weight.nbytes
    monkeypatch.undo()
    of_model, beside = [x.memory_analysis() for x in programs]
    assert of_model.output_size_in_bytes <= 1.01 * whole / 8
    assert beside.output_size_in_bytes <= 2.02 * whole / 8  # two moments
    assert of_model.temp_size_in_bytes < whole / 2
    assert beside.temp_size_in_bytes < whole / 64


def test_the_caller_s_model_is_let_go(tmp_path):
    run = inspect.unwrap(dp.Trainer.run)  # a check of annotations would hold its arguments
    for steps in (1, 2):  # the second is resumed
        models, seen = [small_model()], []
        alive = weakref.ref(models[0].weight)
        callbacks = [lambda event, alive=alive, seen=seen: seen.append(alive())]
        run(runs.trainer(tmp_path, seeded(), callbacks=callbacks), models.pop(), steps)
        assert seen == [None]


def reads():
    model = small_model()
    return model if float(model.weight[0, 0]) > 10 else None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": net(), "init_model": net}, "Give the starting model, .* Found both"),
        ({"init_model": reads}, "init_model cannot be compiled: it reads the value of an array"),
        ({"init_model": lambda: (3, jnp.arange(3))}, "Nothing is trainable"),
    ],
)
def test_what_is_refused(arguments, message):
    for call in (runs.trainer(None).run, seeded().init):
        with pytest.raises(ValueError, match=message):
            call(**arguments)
