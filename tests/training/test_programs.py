"""A run that goes on as another program has fresh noise, and pays for every step it released."""

import json
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from tests.training import runs
from tests.training.runs import assert_agrees, assert_same, make, small_model

RATES = {"A": 0.5, "B": 0.25}


def nothing(model, x, y):
    """A loss without a gradient: what moves the model is noise alone."""
    del y
    return jnp.sum(jnp.where(True, 0.0, model(x)))


def only_bias(leaf):
    return eqx.is_inexact_array(leaf) and leaf.ndim == 1


STEPS = {name: make(optimizer=optax.sgd(rate), loss=nothing) for name, rate in RATES.items()}
PLAN = STEPS["A"].plan  # ten steps


@pytest.fixture(autouse=True)
def untrained():
    STEPS["A"].unrecorded.steps = 0


class Killed(BaseException):
    """As good as SIGKILL, for what is on the disk."""


def run(directory, name="A", *, killed_after=None, steps=None, step=None, **options):
    """Runs a program; returns the noise of each step that it released, by number.

    Noise in units of the gradient: a step moves the model by learning rate times noise.
    """
    noise, before = {}, [small_model()]

    def note(event):
        model = eqx.tree_at(lambda m: m.weight, before[0], jnp.copy(event.state.model.weight))
        noise[event.step] = np.asarray(model.weight - before[0].weight) / RATES[name]
        before[0] = model
        if event.step == killed_after:
            raise Killed

    step = STEPS[name] if step is None else step
    options = {"save_every": 4, "callbacks": [note]} | options
    try:
        runs.trainer(directory, step, **options).run(small_model(), steps=steps)
    except Killed:
        assert killed_after is not None
    return noise


def changed(directory, name="B", allow=("optimizer",), **options):
    """The same, as another program; returns the warning as well."""
    with pytest.warns(dp.CheckpointWarning, match="as another program") as caught:
        noise = run(directory, name, allow_changed=allow, **options)
    assert len(caught) == 1
    return noise, str(caught[0].message)


def released_at_most(directory):
    (file,) = directory.glob("released_at_most.*")
    return int(file.suffix[1:])


def assert_all_differ(*noises):
    """No two steps drew the same noise, whatever their numbers are.

    The seed of "anew" comes from the system, so single entries may agree by chance (one in about
    2,000); half of a row's eight entries do not (less than once in 10^11 pairs).
    """
    rows = [value.ravel() for noise in noises for value in noise.values()]
    for i, one in enumerate(rows):
        for other in rows[:i]:
            assert np.sum(np.isclose(one, other, rtol=1e-3, atol=0)) < one.size / 2


def test_a_second_run_without_a_directory_is_refused():
    trainer = runs.trainer(None, STEPS["A"])
    trainer.run(small_model(), steps=4)
    with pytest.raises(ValueError, match=r"step has taken steps 1 to 4.*a directory"):
        trainer.run(small_model())


def test_another_trainer_of_the_step_is_refused_as_well():
    runs.trainer(None, STEPS["A"]).run(small_model(), steps=2)
    again = STEPS["A"].with_microbatch_size(2)
    with pytest.raises(ValueError, match="step has taken steps 1 to 2"):
        runs.trainer(None, again).run(small_model())


def broken(model, x, y):
    return nothing(model, x, y) * jax.lax.psum(x[0], "nowhere")


def test_a_loss_that_cannot_be_traced_leaves_no_record(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        runs.trainer(tmp_path, make(loss=broken)).run(small_model())
    assert sorted(run(tmp_path, steps=4)) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_change_that_is_refused_leaves_the_record_as_it_was(tmp_path):
    run(tmp_path, steps=4)
    before = (tmp_path / "run.json").read_text()
    frozen = make(optimizer=optax.sgd(0.5), loss=nothing, filter_spec=only_bias)
    other = eqx.tree_at(lambda m: m.weight, small_model(), replace_fn=lambda w: w + 1)
    trainer = runs.trainer(tmp_path, frozen, allow_changed=("loss", "optimizer"))
    with pytest.raises(ValueError, match="not trained"):
        trainer.run(other)
    assert (tmp_path / "run.json").read_text() == before
    assert sorted(run(tmp_path, steps=6)) == [5, 6]


def test_a_run_without_a_directory_may_be_looked_at_first():
    trainer = runs.trainer(None, STEPS["A"])
    assert int(trainer.run(small_model(), steps=0).step) == 0
    assert int(trainer.run(small_model(), steps=2).step) == 2


def evaluate(model):
    return {"norm": float(jnp.linalg.norm(model.weight))}


MEASURED = {"evaluate": evaluate, "evaluate_every": 1}


def lines_of(directory):
    found = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in found]


def test_a_run_is_recorded_before_its_first_step(tmp_path):
    """Killed long before its first save: another program may not take its place, nor its lines."""
    run(tmp_path, killed_after=5, save_every=100, **MEASURED)
    other = make(optimizer=optax.sgd(RATES["B"]), loss=nothing, l2_clip_norm=2.0)
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        run(tmp_path, "B", step=other, **MEASURED)
    assert "l2_clip_norm: 1.0 in the checkpoint, 2.0 in this run" in str(caught.value)
    assert "optimizer: the checkpoint was made with another optimizer" in str(caught.value)
    assert lines_of(tmp_path) == [1, 2, 3, 4, 5]
    assert released_at_most(tmp_path) == 10
    assert json.loads((tmp_path / "privacy.json").read_text())["steps_done"] == 0


def test_a_run_that_was_killed_early_repeats_itself(tmp_path):
    """Even where the program that is started again makes another model to begin with."""
    whole = run(tmp_path / "whole")
    first = run(tmp_path / "killed", killed_after=3, save_every=100, **MEASURED)
    again = runs.trainer(tmp_path / "killed", STEPS["A"], **MEASURED)
    state = again.run(eqx.tree_at(lambda m: m.weight, small_model(), jnp.ones((2, 4))))
    expected = runs.trainer(tmp_path / "whole", STEPS["A"]).run(small_model())
    assert_same(state, expected)
    assert_same(first, {t: whole[t] for t in first})
    assert lines_of(tmp_path / "killed") == list(range(1, 11))


def test_a_bound_is_on_the_disk_before_a_step_is_taken(tmp_path):
    seen = []
    callbacks = [lambda event: seen.append((event.step, released_at_most(tmp_path)))]
    runs.trainer(tmp_path, STEPS["A"], save_every=4, callbacks=callbacks).run(small_model(), 9)
    assert seen == [(t, 4) for t in range(1, 5)] + [(t, 8) for t in range(5, 9)] + [(9, 9)]


OTHERS = {
    "loss": lambda: make(optimizer=optax.sgd(0.5), loss=lambda m, x, y: 2 * nothing(m, x, y)),
    "optimizer": lambda: STEPS["B"],
    "method": lambda: make(optimizer=optax.sgd(0.5), loss=nothing, method="ghost"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", OTHERS)
def test_another_program_is_refused_and_named(part, tmp_path):
    run(tmp_path, steps=4)
    before = sorted(x.name for x in tmp_path.iterdir())
    with pytest.raises(ValueError, match=rf"belongs to another run:\n  {part}: ") as caught:
        run(tmp_path, step=OTHERS[part]())
    assert "allow_changed" in str(caught.value)
    assert sorted(x.name for x in tmp_path.iterdir()) == before
    (others,) = {tuple(p for p in OTHERS if p != part)}
    with pytest.raises(ValueError, match=rf"\n  {part}: "):
        run(tmp_path, step=OTHERS[part](), allow_changed=others)


@pytest.mark.slow
def test_after_an_orderly_end_no_step_is_lost(tmp_path):
    first = run(tmp_path, steps=5)
    assert released_at_most(tmp_path) == 5
    then, said = changed(tmp_path)
    assert list(then) == [6, 7, 8, 9, 10]
    assert "from its checkpoint of step 5" in said
    assert "optimizer: the checkpoint was made with another optimizer" in said
    assert "may have been released" not in said
    assert_all_differ(first, then)
    assert assert_agrees(tmp_path, PLAN) == 10
    undisturbed = run(tmp_path / "undisturbed")
    assert_all_differ(undisturbed, then)


def test_what_a_killed_process_may_have_released_counts(tmp_path):
    """Saved after step 4, killed after 6: up to the next save, it may have released step 8."""
    epsilons = []
    first = run(tmp_path, killed_after=6, **MEASURED)
    with pytest.warns(dp.CheckpointWarning, match=r"Steps 5 to 8 may have been released, and cou"):
        runs.trainer(
            tmp_path,
            STEPS["B"],
            allow_changed=["optimizer"],
            callbacks=[lambda event: epsilons.append((event.step, event.epsilon))],
            **MEASURED,
        ).run(small_model())
    assert epsilons == [(9, PLAN.epsilon(9)), (10, PLAN.epsilon(10))]
    assert len(first) + len(epsilons) <= PLAN.steps
    assert assert_agrees(tmp_path, PLAN) == 10
    assert lines_of(tmp_path) == [1, 2, 3, 4, 5, 6, 9, 10]


@pytest.mark.slow
def test_a_program_that_comes_back_does_not_repeat_its_noise(tmp_path):
    whole = run(tmp_path / "whole")
    first = run(tmp_path / "run", steps=2)
    second, _ = changed(tmp_path / "run", "B", steps=4)
    third, _ = changed(tmp_path / "run", "A", steps=6)
    fourth, _ = changed(tmp_path / "run", "B")
    assert [list(x) for x in (first, second, third, fourth)] == [
        [1, 2],
        [3, 4],
        [5, 6],
        [7, 8, 9, 10],
    ]
    assert_all_differ(first, second, third, fourth)
    assert_all_differ(whole, second, third, fourth)


@pytest.mark.slow
def test_another_program_that_is_killed_goes_on_bit_for_bit(tmp_path):
    """Before its first checkpoint as well; and no further step is lost."""
    noises = []
    for folder in ("whole", "killed"):
        run(tmp_path / folder, killed_after=3, save_every=2)
        killed_after = 5 if folder == "killed" else None
        noises.append(changed(tmp_path / folder, killed_after=killed_after, save_every=3)[0])
    whole, first = noises
    assert list(first) == [5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = run(tmp_path / "killed", "B", save_every=3)
    assert list(again) == list(whole) == [5, 6, 7, 8, 9, 10]
    for noise in (first, again):
        assert_same(noise, {t: whole[t] for t in noise})


def test_where_no_steps_are_left_it_says_so(tmp_path):
    run(tmp_path, killed_after=5, save_every=100)
    with pytest.raises(ValueError, match="10 of the plan's 10 steps may have been released"):
        run(tmp_path, "B", allow_changed=("optimizer",))
    assert list(run(tmp_path))[-1] == 10  # but the same program goes on


@pytest.mark.slow
def test_an_optimizer_with_another_state_begins_with_a_new_one(tmp_path):
    run(tmp_path, steps=4)
    step = make(loss=nothing)  # Adam
    with pytest.raises(
        ValueError, match=re.escape(".0.mu.weight: nothing in the checkpoint, floa")
    ):
        runs.trainer(tmp_path, step).run(small_model())
    with pytest.warns(dp.CheckpointWarning, match="as another program"):
        state = runs.trainer(tmp_path, step, allow_changed=("optimizer",)).run(small_model())
    assert state.step == 10
    assert state.opt_state[1][0].count == 6


@pytest.mark.slow
def test_a_checkpoint_older_than_the_change_is_no_state_of_the_program(tmp_path):
    """Where the change is gone, so is the right to its noise: it counts as another change."""
    run(tmp_path, steps=4, save_every=2)
    first, _ = changed(tmp_path, steps=6, save_every=2)
    for number in (4, 6):
        (tmp_path / f"{number:08d}" / "run.json").write_text("{}")
    with pytest.warns(dp.CheckpointWarning) as caught:
        again = run(tmp_path, "B", save_every=2)
    assert "goes on from its checkpoint of step 2, anew" in str(caught[-1].message)
    assert list(again) == [7, 8, 9, 10]
    assert_all_differ(first, again)


@pytest.mark.slow
def test_what_an_earlier_program_disclosed_is_said_of_all(tmp_path):
    disclosing = make(optimizer=optax.sgd(0.5), loss=nothing, disclose=("num_examples",))
    run(tmp_path, step=disclosing, steps=4)
    changed(tmp_path, "A", allow=("disclose",))
    statement = json.loads((tmp_path / "privacy.json").read_text())
    assert any("num_examples of each batch" in text for text in statement["does_not_cover"])


@pytest.mark.parametrize("names", ["optimizer", ("learning rate",), ("plan",), ("seed",)])
def test_what_may_not_change(names, tmp_path):
    said = r"allow_changed must be a tuple of names.*loss, optimizer, method, policy, l2_clip_norm"
    with pytest.raises(ValueError, match=said):
        run(tmp_path, allow_changed=names)


def test_another_seed_is_another_run(tmp_path):
    run(tmp_path, steps=2)
    other = make(optimizer=optax.sgd(0.5), loss=nothing, seed=1)
    with pytest.raises(ValueError, match="\n  seed: the checkpoint was made with another seed\n"):
        run(tmp_path, step=other, allow_changed=("loss", "optimizer", "method"))
