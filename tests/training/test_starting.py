"""A first state is made where it is to live, and a run holds no more than it needs."""

import inspect
import re
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import eqx_dp as dp
from eqx_dp.training import first_state
from tests.training import runs
from tests.training.runs import assert_same, seeded, small_model

KINDS = [None, "Auto", "Explicit"]
ONE_FAST = [
    "Auto",
    *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in (None, "Explicit")),
]


def rules_of(kind):
    return None if kind is None else runs.rules_of(kind)


class Net(eqx.Module):
    """Arrays that are trained and that are not, and leaves that are no arrays."""

    weight: jax.Array
    frozen: jax.Array
    key: jax.Array
    activation: object
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return self.activation(self.weight @ x) * self.frozen[0]


def net(scale=1):
    """The same values whether it is compiled or not."""
    return Net(
        np.arange(8, dtype=np.float32).reshape(2, 4) / 8,
        jnp.asarray([2, 3]) * scale,
        jax.random.key(3),
        jax.nn.tanh,
        "net",
    )


def placed(state):
    return [x.sharding for x in jax.tree.leaves(eqx.filter(state, eqx.is_array))]


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    # New arrays, sums over rows, a copy of the parameters.
    "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=1),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2),
    # Its `init` cannot be traced.
    "reads": optax.GradientTransformation(
        lambda params: optax.adam(1e-2).init(params) if jnp.sum(params.weight) > 0 else None,
        optax.adam(1e-2).update,
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_is_made_is_the_one_of_a_model(kind, name):
    options = {"policy": dp.load_policy("mixed_bfloat16"), "ema": 0.9}
    step = seeded(optimizer=OPTIMIZERS[name], sharding=rules_of(kind), **options)
    if name == "reads":
        with pytest.raises(ValueError, match="optimizer's init reads the values of parameters"):
            step.init(init_model=net)
        return
    given = step.init(net())
    made = step.init(init_model=net)
    assert_same(made, given)
    assert placed(made) == placed(given)
    assert (made.model.activation, made.model.name) == (jax.nn.tanh, "net")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_no_device_makes_a_whole_array(kind, monkeypatch):
    """Random numbers for 4 MiB: a device holds its eighth of them, and what threefry needs."""
    programs = []

    def lowered(function, *, out_shardings):
        jitted = jit(function, out_shardings=out_shardings)

        def call(*args):
            programs.append(jitted.lower(*args))
            return jitted(*args)

        return call

    def large():
        return eqx.tree_at(
            lambda m: m.weight, small_model(), jax.random.normal(jax.random.key(0), (1024, 1024))
        )

    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    rules = dp.ShardingRules(mesh, params=(("weight", jax.P(None, "data")),))
    step, jit = seeded(sharding=rules), jax.jit
    monkeypatch.setattr(first_state.jax, "jit", lowered)
    state = step.init(init_model=large)
    monkeypatch.undo()
    whole = state.model.weight.nbytes
    of_model, beside = [x.compile().memory_analysis() for x in programs]
    for memory, arrays in ((of_model, 1), (beside, 2)):
        part = memory.output_size_in_bytes
        assert arrays * whole / 8 <= part <= 1.01 * arrays * whole / 8
    assert of_model.temp_size_in_bytes < whole / 2
    assert beside.temp_size_in_bytes < whole / 64
    # The key of the noise is in neither.
    words = jax.random.key_data(state.opt_state[0].key)
    text = "".join(x.as_text() for x in programs)
    assert not any(re.search(rf"\b{int(word)}\b", text) for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_FAST)
def test_a_run_of_a_function_is_that_of_its_model(kind, tmp_path, monkeypatch):
    """Also when it is resumed, for which no first state is made."""
    sharding = rules_of(kind)

    def keyless():
        return eqx.tree_at(lambda one: one.key, net(), None)

    whole = runs.trainer(None, seeded(sharding=sharding)).run(keyless(), steps=4)
    made = runs.trainer(tmp_path, seeded(sharding=sharding)).run(init_model=keyless, steps=4)
    assert_same(made, whole)

    def fails(self, first):
        raise AssertionError("a first state was made")

    monkeypatch.setattr(first_state.Recipe, "made", fails)
    resumed = runs.trainer(tmp_path, seeded(sharding=sharding)).run(init_model=keyless, steps=6)
    assert int(resumed.step) == 6


def test_the_caller_s_model_is_let_go(tmp_path):
    seen = []

    def after_a_step(event):
        seen.append(alive() is None)

    # Checks of annotations, around the function, would hold its arguments.
    run = inspect.unwrap(dp.Trainer.run)
    for steps in (1, 2):  # the second is resumed
        models = [small_model()]
        alive = weakref.ref(models[0].weight)
        trainer = runs.trainer(tmp_path, seeded(), callbacks=[after_a_step])
        run(trainer, models.pop(), steps)
    assert seen == [True, True]


def reads():
    model = small_model()
    return model if float(model.weight[0, 0]) > 10 else None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "Give the starting model, .* Found neither"),
        ({"model": net(), "init_model": net}, "Found both"),
        ({"init_model": 3}, r"init_model must be a function, init_model\(\)"),
        ({"init_model": reads}, "init_model cannot be compiled: it reads the value of an array"),
        ({"init_model": lambda: (3, jnp.arange(3))}, "Nothing is trainable"),
    ],
)
def test_what_is_refused(arguments, said, unchecked):
    with pytest.raises(ValueError, match=said):
        runs.trainer(None).run(**arguments)
    model = arguments.pop("model", None)
    with pytest.raises(ValueError, match=said):
        seeded().init(model, **arguments)


def test_rules_that_do_not_fit_are_named():
    rules = runs.rules_of("Auto", params=(("wieght", jax.P("model")),))
    with pytest.raises(ValueError, match="'wieght': no array of the model"):
        seeded(sharding=rules).init(init_model=net)


def test_a_model_that_cannot_be_trained_leaves_no_run(tmp_path):
    paired = dp.apply_policy(small_model(), dp.load_policy("mixed_bfloat16"))
    for given in ({"model": paired}, {"init_model": lambda: paired}):
        with pytest.raises(ValueError, match="The model is paired with a policy"):
            runs.trainer(tmp_path / "run", seeded()).run(**given)
    assert not (tmp_path / "run").exists()
