"""Runs with one seed that differ in what they are have noise and samples of their own."""

import functools
import json
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from tests.training import runs
from tests.training.runs import SEED, XS, YS, assert_same, make, plan_of, small_model

pytestmark = pytest.mark.sampled(6)

WIDTH = 64


class Model(eqx.Module):
    linear: eqx.nn.Linear
    depth: int = eqx.field(static=True)

    def __call__(self, x):
        for _ in range(self.depth):
            x = jnp.tanh(self.linear(x))
        return x


def model_of(depth=1):
    return Model(eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)), depth)


def recording(optimizer):
    """Keeps the gradients that the optimizer is given: of padding alone, they are noise."""

    def record(grads, state, params=None):
        del state, params
        return grads, grads

    recorder = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), record
    )
    return optax.chain(recorder, optimizer)


def step_of(optimizer=None, plan=None, loss=runs.loss, **options):
    return make(plan, recording(optimizer or optax.sgd(1e-2)), loss, **options)


XS_WIDE, YS_WIDE = np.zeros((8, WIDTH), np.float32), np.zeros(8, np.float32)


def noise_of(step, model=None, steps=1, state=None):
    """The noise of the last of some steps, as one vector, and the state after it."""
    state = step.init(model_of() if model is None else model) if state is None else state
    for _ in range(steps):
        mask = np.ones(len(XS_WIDE), bool)
        state = step(state, XS_WIDE, YS_WIDE, is_padding_example=mask)
    noise = jax.tree.leaves(state.opt_state[1][0])
    return np.concatenate([np.ravel(leaf) for leaf in noise]).astype(np.float64), state


@functools.cache
def usual_noise():
    return noise_of(step_of())[0]


def correlation(one, other):
    return float(np.corrcoef(one, other)[0, 1])


def scaled(factor):
    return lambda model, x, y: factor * runs.loss(model, x, y)


def beside(table):
    return lambda model, x, y: runs.loss(model, x, y) + jnp.sum(table * x[:2])


def with_rule(factor):
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, cotangent: (factor * cotangent,))
    return lambda model, x, y: runs.loss(model, same(x), y)


def decayed(decay):
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(1e-2))


def scheduled(end):
    return optax.sgd(optax.linear_schedule(1e-2, end, 10))


def injected(rate):
    return optax.inject_hyperparams(optax.sgd)(rate)


# In one thing other than the usual options, or than those that stand before.
DIFFERENCES = {
    "learning rate": lambda: [{"optimizer": optax.sgd(2e-2)}],
    "schedule": lambda: [{"optimizer": scheduled(end)} for end in (1e-3, 1e-4)],
    "injected learning rate": lambda: [{"optimizer": injected(rate)} for rate in (1e-2, 2e-2)],
    "weight decay": lambda: [{"optimizer": decayed(decay)} for decay in (1e-3, 1e-4)],
    "optimizer": lambda: [{"optimizer": optax.adagrad(1e-2)}],
    "factor of the loss": lambda: [{"loss": scaled(1.5)}],
    "constant of the loss": lambda: [
        {"loss": beside(jnp.array([1.0, number]))} for number in (2.0, 3.0)
    ],
    "numpy constant": lambda: [{"loss": beside(np.array([1.0, number]))} for number in (2.0, 3.0)],
    "derivative rule": lambda: [{"loss": with_rule(factor)} for factor in (1.0, 2.0)],
    "clip norm": lambda: [{"l2_clip_norm": 1.5}],
    "method": lambda: [{"method": "ghost"}],
    "data-set size": lambda: [{"num_examples": 65}],
    "steps of the plan": lambda: [{"plan": plan_of(11)}],
    "policy": lambda: [{"policy": dp.load_policy("float32")}],
    "rescaling": lambda: [{"rescale_to_unit_norm": True}],
    "seed": lambda: [{"seed": SEED + 1}],
    "kind of seed": lambda: [{"seed": seed} for seed in (5, b"\5")],
    "end of a long seed": lambda: [{"seed": 2**200 + end} for end in (0, 1)],
}


def pair_of(name):
    """Two steps that differ in one thing."""
    return [step_of(**options) for options in ([{}, *DIFFERENCES[name]()])[-2:]]


# The noise of all follows from one text, and so do the samples: those are compared for each name.
NOISE = ("schedule", "constant of the loss", "derivative rule", "clip norm", "method", "seed")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in NOISE else pytest.mark.exhaustive)
        for name in DIFFERENCES
    ],
)
def test_what_differs_in_one_thing_has_noise_of_its_own(name):
    one, other = pair_of(name)
    is_usual = len(DIFFERENCES[name]()) == 1
    noise = usual_noise() if is_usual else noise_of(one)[0]
    assert abs(correlation(noise, noise_of(other)[0])) < 0.1


def test_models_of_another_architecture_have_noise_of_their_own():
    deeper = noise_of(step_of(), model_of(depth=2))[0]
    assert abs(correlation(usual_noise(), deeper)) < 0.1


@pytest.mark.parametrize(
    "options", [{}, {"microbatch_size": 3}, {"loss": eqx.filter_jit(runs.loss)}]
)
def test_equal_runs_have_equal_noise(options):
    np.testing.assert_array_equal(usual_noise(), noise_of(step_of(**options))[0])


def test_a_run_that_is_resumed_has_the_noise_that_it_would_have_had():
    noise, _ = noise_of(step_of(), steps=3)
    _, state = noise_of(step_of(), steps=2)
    resumed, _ = noise_of(step_of(), state=state)
    np.testing.assert_array_equal(noise, resumed)
    assert abs(correlation(noise, usual_noise())) < 0.1


def test_a_run_may_be_told_apart_by_a_text():
    step = step_of()
    named = [noise_of(step.for_run(text))[0] for text in ("one", "other")]
    assert abs(correlation(*named)) < 0.1
    assert abs(correlation(named[0], usual_noise())) < 0.1
    np.testing.assert_array_equal(noise_of(step.for_run("one").for_run(""))[0], usual_noise())
    assert step.for_run("one").with_microbatch_size(2).run == "one"
    samples = [s.sampler().batch(0)[0] for s in (step, step.for_run("one"), step.for_run("other"))]
    assert len({sample.tobytes() for sample in samples}) == 3


def keys_of_the_loss(loss_factor, rate):
    """What the loss drew with the key that each example of two steps was given."""

    def loss(model, x, key):
        return model.bias[0] * jax.random.normal(key) + loss_factor * jnp.sum(0 * x)

    step = make(dp.PrivacyPlan(0.25, 3, 0.0, 1e-5), optax.sgd(rate), loss, l2_clip_norm=np.inf)
    state, seen = step.init(small_model()), []
    for _ in range(2):
        before = float(state.model.bias[0])
        state = step(state, XS[:1], is_padding_example=np.zeros(1, bool))
        seen.append(round((before - float(state.model.bias[0])) / rate, 4))
    return seen


def test_keys_of_the_loss_differ_as_the_noise_does():
    drawn = [keys_of_the_loss(*of) for of in ((1.0, 0.5), (2.0, 0.5), (1.0, 0.25))]
    assert len({number for numbers in drawn for number in numbers}) == 6
    assert drawn[0] == keys_of_the_loss(1.0, 0.5)


def samples_of(sampler):
    return b"".join(sampler.batch(t)[0].tobytes() for t in range(3))


# What a step does not know before there is a model.
OF_LOSS = {"factor of the loss", "constant of the loss", "numpy constant", "derivative rule"}


@pytest.mark.parametrize("name", sorted(DIFFERENCES))
def test_what_differs_in_one_thing_has_a_sample_of_its_own(name):
    steps = [*pair_of(name), pair_of(name)[0]]
    a, b, again = (samples_of(step.sampler(model_of(), XS_WIDE, YS_WIDE)) for step in steps)
    assert a != b
    assert a == again
    a, b, again = (samples_of(step.sampler()) for step in steps)
    assert (a == b) == (name in OF_LOSS)
    assert a == again


def test_an_optimizer_for_one_model_alone_leaves_the_sampler_without_it():
    by_name = optax.masked(
        optax.sgd(1e-2), lambda params: jax.tree.map(lambda _: True, params.linear)
    )
    assert samples_of(make(optimizer=by_name).sampler()) == samples_of(
        make(optimizer=by_name).sampler()
    )


def identity_of(step, model=None, batch=(XS, YS)):
    return step.identity(small_model() if model is None else model, *batch)


def noisy_loss(model, x, y, key):
    """Some of all: rules, loops, branches, constants, random numbers, numbers cast."""
    h = jax.nn.gelu(jax.nn.relu(model(x))) + jnp.asarray(XS[0, :2])
    h = jnp.clip(h, 0, 6) * jax.random.bernoulli(key, 0.9, h.shape)
    h, _ = jax.lax.scan(lambda carry, _: (jax.nn.silu(carry), None), h, None, length=3)
    h = jax.lax.cond(jnp.sum(h) > 0, jnp.sin, lambda h: 2 * h, h)
    return jnp.sum((h - y) ** 2) + jax.nn.logsumexp(h) + jax.random.normal(key)


def constrained_loss(kind):
    """Written for a batch, and with constraints in the terms of the mesh."""

    def loss(model, x, y):
        h, data = jax.vmap(model)(x), jax.sharding.PartitionSpec("data")
        if kind == "Auto":
            h = jax.lax.with_sharding_constraint(h, data)
        if kind == "Explicit":
            h = jax.sharding.reshard(h, data)
        return jnp.mean((jax.nn.relu(h) - y[:, None]) ** 2)

    return loss


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_run_is_the_same_on_any_mesh(kind, devices):
    rules = runs.rules_of(kind, devices)
    alone = identity_of(make(loss=noisy_loss))
    assert identity_of(make(loss=noisy_loss, sharding=rules)) == alone
    batched = {"keep_batch_dim": True}
    alone = identity_of(make(loss=constrained_loss(None), **batched))
    spread = make(loss=constrained_loss(kind), sharding=rules, **batched)
    assert identity_of(spread) == alone
    state = spread.init(small_model())
    placed = spread.place((XS, YS))
    with spread.mesh():
        assert identity_of(spread, state.model, placed) == alone


def test_only_shapes_matter_to_identity():
    step = make()
    expected = identity_of(step)
    assert expected["method"] == "auto"
    shapes = eqx.filter_eval_shape(small_model)
    batch = (jax.ShapeDtypeStruct((7, 4), np.float32), jax.ShapeDtypeStruct((7,), np.float32))
    assert identity_of(step, shapes, batch) == expected
    assert identity_of(step, batch=(XS[:1], YS[:1])) == expected
    assert identity_of(step.with_microbatch_size(3).for_run("another")) == expected
    assert identity_of(make(microbatch_size="auto")) == expected
    trained = runs.small_model()
    trained = eqx.tree_at(lambda m: m.bias, trained, trained.bias + 1)
    assert identity_of(step, trained) == expected


def test_identity_tells_nothing_to_those_who_lack_the_seed():
    one, other = identity_of(make()), identity_of(make(seed=SEED + 1))
    assert {name for name in one if one[name] != other[name]} == {"loss", "optimizer"}
    assert all(len(one[name]) == 32 for name in ("loss", "optimizer"))


def test_identity_names_what_differs():
    usual = identity_of(make())

    def differing(**options):
        found = identity_of(make(**options))
        return {name for name in usual if usual[name] != found[name]}

    assert differing(optimizer=optax.adam(2e-2)) == {"optimizer"}
    assert differing(loss=scaled(2.0)) == {"loss"}
    assert differing(method="ghost") == {"method"}
    spec = eqx.tree_at(lambda m: m.bias, jax.tree.map(lambda _: True, small_model()), False)
    assert differing(filter_spec=spec) == {"loss", "optimizer"}


_IN_A_PROCESS = """
import json
from tests.training import runs, test_identity
print(json.dumps(test_identity.identity_of(runs.make(loss=test_identity.noisy_loss))))
"""


@pytest.mark.slow
def test_a_run_is_the_same_in_another_process():
    """With other hashes of strings, and one device."""
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "JAX_NUM_CPU_DEVICES": "1"}
    found = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS], env=environment, capture_output=True, check=True
    )
    assert json.loads(found.stdout) == identity_of(make(loss=noisy_loss))


def test_a_program_that_is_another_at_every_trace_is_no_error():
    count = 0

    def counting(model, x, y):
        nonlocal count
        count += 1
        return runs.loss(model, x, y) + count

    step = step_of(loss=counting)
    assert np.std(noise_of(step)[0]) > 0
    assert identity_of(make(loss=counting)) != identity_of(make(loss=counting))


@pytest.mark.parametrize("kind", [None, "Auto", "Explicit"])
def test_an_optimizer_may_read_numbers_for_its_first_state(kind):
    def of_rate(rate):
        def init(params):
            return {"rate": jnp.asarray(rate + float(jnp.sum(jax.tree.leaves(params)[0])))}

        def update(grads, state, params=None):
            del params
            return jax.tree.map(lambda g: -state["rate"] * g, grads), state

        rules = None if kind is None else runs.rules_of(kind)
        return make(optimizer=optax.GradientTransformation(init, update), sharding=rules)

    step = of_rate(0.1)
    assert identity_of(step) == identity_of(of_rate(0.1)) != identity_of(of_rate(0.2))
    x, y, mask = step.place((XS[:8], YS[:8], np.zeros(8, bool)))
    step(step.init(small_model()), x, y, is_padding_example=mask)


def test_microbatches_do_not_change_the_noise():
    state = make().init(small_model())
    batch = {"is_padding_example": np.ones(4, bool)}
    expected = make()(make().init(small_model()), XS[:4], YS[:4], **batch)
    found = make().with_microbatch_size(2)(state, XS[:4], YS[:4], **batch)
    assert_same(found.model, expected.model)


def test_another_generator_of_noise_is_another_run():
    """Its numbers are others: a step that it repeated would be a second release."""
    usual = step_of().identity(model_of(), XS_WIDE, YS_WIDE)
    with jax.threefry_partitionable(False):
        assert step_of().identity(model_of(), XS_WIDE, YS_WIDE)["loss"] != usual["loss"]
