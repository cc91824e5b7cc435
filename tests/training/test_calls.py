"""Several steps in one call: the same run, whose every step is paid for before the call begins."""

import json
import os
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.training import trainer as trainer_module
from eqx_dp.training.calls import calls
from eqx_dp.training.data import Batches
from tests.training import runs
from tests.training.runs import XS, YS, assert_agrees, assert_same, leaves, make, small_model
from tests.training.test_programs import Killed, lines_of, released_at_most


def noisy_loss(model, x, y, key):
    """It takes a key of its own, so that keys show."""
    return jnp.sum((model(x) - y) ** 2) * jax.random.uniform(key)


def everything():
    """A schedule, moments, an average, figures, keys of the loss: all that goes from step to step.

    Parameters are rounded at random, so that those bits show as well.
    """
    rate = optax.cosine_decay_schedule(0.5, 10)
    policy = dp.parse_policy("p=bf16,c=f32,o=f32,a=f32,n=f32,optimizer=f32,rounding=stochastic")
    return make(
        optimizer=optax.adam(rate),
        loss=noisy_loss,
        policy=policy,
        ema=0.8,
        disclose=("loss", "num_examples"),
    )


STEP = everything()  # compiled once for this file, one step a call and four
PLAN = STEP.plan  # ten steps


@pytest.fixture(autouse=True)
def untrained():
    STEP.unrecorded.steps = 0


def run(directory, steps_per_call=4, *, steps=None, step=STEP, **options):
    options = {"save_every": 5} | options
    trainer = runs.trainer(directory, step, steps_per_call=steps_per_call, **options)
    return trainer.run(small_model(), steps=steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of single steps: its directory and its last state."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(directory, 1)


def assert_alike(one, other):
    """Up to rounding: the entries of bfloat16 are mostly the same bits, rounded with the same."""
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-2, atol=1e-5)
        assert np.mean(np.isclose(a.astype(float), b.astype(float), rtol=1e-5)) >= 0.75


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 10, 1, ()), [1] * 10),
        ((0, 10, 4, ()), [4, 4, 1, 1]),
        ((0, 10, 4, (5,)), [4, 1, 4, 1]),
        ((5, 10, 4, (5,)), [4, 1]),
        ((3, 14, 3, (5, 3)), [1, 1, 1, 3, 1, 1, 1, 1, 1]),
        ((0, 8, 4, (4, 8)), [4, 4]),
        ((8, 9, 4, ()), [1]),
        ((3, 3, 4, ()), []),
    ],
)
def test_no_call_goes_beyond_where_the_state_is_needed(arguments, expected):
    start, stop, _, ends = arguments
    found = list(calls(*arguments))
    assert [len(call) for call in found] == expected
    assert [step for call in found for step in call] == list(range(start, stop))
    for end in ends:
        assert not any(step % end == 0 for call in found for step in call[1:])


def test_it_is_the_run_of_single_steps(tmp_path, whole):
    """Its state, checkpoints, lines, and the statement; saves are due in the middle of calls."""
    directory, state = whole
    seen = []
    found = run(tmp_path, callbacks=[lambda event: seen.append((event.step, event.has_state))])
    assert int(found.step) == 10
    assert_alike(found, state)
    assert seen == [(t, t in (4, 5, 9, 10)) for t in range(1, 11)]
    for folder in (directory, tmp_path):
        assert assert_agrees(folder, PLAN) == 10
        assert {"00000000", "00000005", "00000010"} <= {x.name for x in folder.iterdir()}
    one, other = (
        [json.loads(line) for line in (x / "metrics.jsonl").read_text().splitlines()]
        for x in (directory, tmp_path)
    )
    assert len(one) == 10
    for a, b in zip(one, other, strict=True):
        assert (a["step"], a["num_examples"], a["epsilon"]) == (
            *(b["step"], b["num_examples"], b["epsilon"]),
        )
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-2)
    assert len({line["num_examples"] for line in other}) > 3


def test_the_identity_is_the_same():
    several = STEP.with_steps_per_call(4)
    assert several.identity(small_model(), XS, YS) == STEP.identity(small_model(), XS, YS)
    assert several.settings == STEP.settings
    one, other = (x.sampler(small_model(), XS, YS) for x in (several, STEP))
    assert one.run == other.run
    assert several.with_steps_per_call(4) is several
    assert "steps_per_call=4" in repr(several)
    assert "steps_per_call" not in repr(STEP)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(1, 4, marks=pytest.mark.slow),
        pytest.param(4, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_run_goes_on_with_any_number(before, after, tmp_path, whole):
    """Killed in the middle of a call: what it took of that is taken again."""

    def kills(event):
        if event.step == 7:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path, before, callbacks=[kills])
    assert assert_agrees(tmp_path, PLAN) == 5
    assert released_at_most(tmp_path) == 10
    found = run(tmp_path, after)
    assert_alike(found, whole[1])
    if before == after:  # bit for bit, whatever a compiler makes of a loop
        assert_same(found, run(None, 4, evaluate=lambda model: {}, evaluate_every=5))
    assert lines_of(tmp_path) == list(range(1, 11))


class Scaled(eqx.Module):
    """Its scale and its offset, which is not trained, are of weak types, as `jnp.asarray(1.0)`."""

    weight: jax.Array
    scale: jax.Array
    offset: jax.Array

    def __call__(self, x):
        return self.weight @ x * self.scale + self.offset


@pytest.mark.parametrize("before", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_weak_types_make_no_other_program(before, tmp_path):
    """They are lost by an update, a scan and a checkpoint; with other noise, steps would be taken
    twice."""

    def model():
        return Scaled(jnp.ones((2, 4)), jnp.asarray(1.0), jnp.asarray(1.0))

    def goes_on(directory, number, callbacks=()):
        options = {"callbacks": callbacks, "save_every": 4, "steps_per_call": number}
        return runs.trainer(directory, step, **options).run(model(), steps=8)

    def kills(event):
        if event.step == 6:
            raise Killed

    step = make(filter_spec=Scaled(True, True, False))
    with pytest.raises(Killed):
        goes_on(tmp_path, before, [kills])
    found, whole = goes_on(tmp_path, 5 - before), goes_on(None, before)
    for one, other in zip(leaves(found.model), leaves(whole.model), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    others = [x for x in jax.tree.leaves(step.init(model())) if getattr(x, "weak_type", False)]
    assert not others


def watch_calls(monkeypatch, notes):
    """Notes how many steps a call takes, before it begins; no call that is only traced."""
    following = dp.Step.next

    def noted(self, flat, *args):
        if not isinstance(flat.step, jax.core.Tracer):
            notes(self.steps_per_call)
        return following(self, flat, *args)

    monkeypatch.setattr(dp.Step, "next", noted)


def test_all_steps_of_a_call_count_before_it_begins(tmp_path, monkeypatch):
    """On the disk, or, without a directory, in what refuses a second run."""
    seen, done = [], []

    def noted(number):
        done.append(sum(done[-1:]) + number)
        bound = released_at_most(tmp_path) if directory else STEP.unrecorded.steps
        seen.append((done[-1], bound))

    watch_calls(monkeypatch, noted)
    for directory in (tmp_path, None):
        done.clear()
        run(directory, steps=9)
    assert seen == [(4, 5), (5, 5), (9, 9), (4, 4), (8, 8), (9, 9)]
    with pytest.raises(ValueError, match="has taken steps 1 to 9"):
        run(None)


def test_asked_to_stop_it_finishes_the_call(tmp_path, whole):
    """And the call alone: it is saved, nothing after it was released, and the run goes on."""

    def asks(event):
        if event.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        run(tmp_path, callbacks=[asks])
    assert caught.value.code == 0
    assert assert_agrees(tmp_path, PLAN) == released_at_most(tmp_path) == 9
    assert_alike(run(tmp_path), whole[1])


def test_a_callback_ends_a_run_with_the_call(tmp_path):
    seen = []

    def ends(event):
        seen.append(event.step)
        return event.step == 2

    assert int(run(tmp_path, callbacks=[ends]).step) == 4
    assert seen == [1, 2, 3, 4]
    assert assert_agrees(tmp_path, PLAN) == released_at_most(tmp_path) == 4


def test_an_evaluation_ends_a_call(whole):
    models = []

    def evaluate(model):
        models.append(np.asarray(model.weight, float))
        return {"norm": np.linalg.norm(models[-1])}

    events = []
    state = run(None, evaluate=evaluate, evaluate_every=5, callbacks=[events.append])
    assert len(models) == 2
    np.testing.assert_array_equal(models[-1], np.asarray(state.averaged.weight, float))
    assert [e.step for e in events if "norm" in e.metrics] == [5, 10]
    # Epsilon is told beside what is measured: here after evaluations.
    assert [e.step for e in events if e.epsilon is not None] == [5, 10]


def test_a_number_above_what_is_due_is_as_good_as_that(tmp_path, monkeypatch):
    """Calls end with saves, and with the plan: no longer ones are traced."""
    taken = []
    watch_calls(monkeypatch, taken.append)
    run(tmp_path, 1000, save_every=4)
    assert taken == [4, 4, 1, 1]


def test_the_program_of_a_call_is_checked(tmp_path):
    """It is the one that runs: so many releases, each with its own noise and batch."""
    run(tmp_path, steps=0)
    found = json.loads((tmp_path / "checks.json").read_text())
    assert found["precision"]["ok"] is True
    assert found["privacy"]["ok"] is True
    assert found["privacy"]["steps"] == 4
    assert found["privacy"]["noise_multiplier"] == pytest.approx(PLAN.noise_multiplier)


def stacked(number=4):
    batches = [STEP.sampler().take(t, XS, YS) for t in range(number)]
    return jax.tree.map(lambda *parts: np.stack(parts), *batches)


def test_a_check_finds_noise_that_is_not_new(monkeypatch):
    """Planted: every step of a call has the noise of the first."""
    next_of, first = dp.Step._next, jnp.zeros((), jnp.int32)

    def repeated(self, state, given):
        noise = state.opt_state[0]._replace(step=first)
        state = eqx.tree_at(lambda s: s.opt_state[0], state, noise)
        return next_of(self, state, given)

    examples, mask = stacked()
    found = []
    for _ in range(2):
        step = make().with_steps_per_call(4)
        state = step.init(small_model())
        found.append(dp.check_privacy(step, state, *examples, is_padding_example=mask))
        monkeypatch.setattr(dp.Step, "_next", repeated)
    assert found[0].ok
    assert found[0].steps == 4
    assert "fresh noise" in {finding.rule for finding in found[1].violations}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.exhaustive)])
def test_on_a_mesh_it_is_the_run_of_single_steps(kind, tmp_path, monkeypatch):
    """Examples lie along the second axis; parameters and moments stay where they are.

    And a signal that comes while a call is under way keeps the next from being made.
    """
    spread = {"params": (("weight", jax.P(None, "data")),), "accumulators": "params"}
    rules = runs.rules_of(kind, 4, **spread)
    step = make(sharding=rules, disclose=("num_examples",), ema=0.5)
    state = run(tmp_path / "whole", step=step)
    single = run(None, 1, step=make(disclose=("num_examples",), ema=0.5))
    for a, b in zip(leaves(state), leaves(single), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert {x.data.shape for x in state.model.weight.addressable_shards} == {(2, 2)}
    assert lines_of(tmp_path / "whole") == list(range(1, 11))
    places, left = dp.Step.place, [1, 1, 0]  # the step that is looked at first, and two calls

    def asks(self, batch):
        if not left.pop(0):
            os.kill(os.getpid(), signal.SIGTERM)
        return places(self, batch)

    monkeypatch.setattr(dp.Step, "place", asks)
    with pytest.raises(SystemExit):
        run(tmp_path / "asked", step=step)
    assert assert_agrees(tmp_path / "asked", PLAN) == released_at_most(tmp_path / "asked") == 4


def test_batches_of_a_call_are_stacked_and_read_ahead():
    """Each is read by itself, and those of the next call while one runs."""

    class Noted:
        asked = 0

        def __len__(self):
            return len(XS)

        def __getitem__(self, indices):
            self.asked += 1
            return XS[indices]

    source, sampler = Noted(), STEP.sampler()
    single = list(Batches(XS, sampler).from_step(1, 8))
    before = source.asked
    found = Batches(source, sampler).from_step(1, 8, calls(1, 8, 3, ()))
    first = next(found)
    assert first.examples[0].shape == (3, sampler.capacity, 4)
    assert first.is_padding_example.shape == (3, sampler.capacity)
    others = list(found)
    assert [len(x.examples[0]) for x in others] == [3, sampler.capacity]
    assert source.asked - before == 1 + 7
    joined = [*first.examples[0], *others[0].examples[0], others[1].examples[0]]
    np.testing.assert_array_equal(joined, [batch.examples[0] for batch in single])


@pytest.mark.slow
def test_the_memory_of_a_call_decides_the_microbatch(tmp_path, monkeypatch):
    sizes, largest = [], trainer_module.largest_size

    def noted(step, state, given, limit):
        sizes.append((step.steps_per_call, given[1].shape))
        return largest(step, state, given, limit)

    monkeypatch.setattr(trainer_module, "largest_size", noted)
    step = make(microbatch_size="auto")
    run(tmp_path, 2, step=step, steps=2, save_every=2, device_memory=2**30)
    assert sizes == [(2, (2, step.sampler().capacity))]


CHANGES = optax.GradientTransformation(
    lambda params: {"name": "first"}, lambda grads, state, params: (grads, {"name": "later"})
)


def trains(step=STEP, **options):
    return lambda: runs.trainer(None, step, **options).run(small_model())


def calls_step(step, batch, **options):
    def call():
        examples, mask = batch
        step(step.init(small_model()), *examples, is_padding_example=mask, **options)

    return call


def reads_the_state(event):
    return event.state.step == 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (trains(steps_per_call=0), "steps_per_call must be at least 1; found 0"),
        (trains(steps_per_call=2**17), "steps_per_call must be at most 65536"),
        (trains(steps_per_call=2.0), "steps_per_call must be a whole number; found 2.0"),
        (trains(steps_per_call=True), "steps_per_call must be a whole number; found True"),
        (
            trains(steps_per_call=2, extra=lambda done, model: {}),
            "steps_per_call is 2, and extra wants the model before every step",
        ),
        (trains(STEP.with_steps_per_call(2)), "step takes 2 steps a call. Give the trainer the"),
        (
            trains(steps_per_call=4, callbacks=[reads_the_state]),
            "The state after step 1 is not kept: it is in the middle of a call",
        ),
        (
            trains(make(optimizer=CHANGES), steps_per_call=2),
            "holds values that are no arrays, and a step changes them",
        ),
        (
            calls_step(STEP.with_steps_per_call(3), stacked(4)),
            r"batch\.0 has shape \(4, \d+, 4\), and a call takes 3 steps: stack 3 batches",
        ),
        (
            calls_step(make().with_steps_per_call(4), (stacked()[0], stacked()[1][0])),
            r"is_padding_example has shape \(\d+,\), and a call takes 4 steps",
        ),
        (
            calls_step(make().with_steps_per_call(4), stacked(), extra={"value": 1.0}),
            "extra holds 'value', and a call takes 4 steps",
        ),
        (
            lambda: dp.audit.neighbours(STEP.with_steps_per_call(4), small_model(), *stacked()[0]),
            "the step takes 4 batches a call",
        ),
    ],
)
def test_what_is_refused(function, said, unchecked):
    with pytest.raises(ValueError, match=said):
        function()
