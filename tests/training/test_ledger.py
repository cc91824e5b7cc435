"""The ledger counts every step that may have been released, whatever happens to a directory."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.report import page_of
from eqx_dp.report.run import read_run
from eqx_dp.training import CheckpointWarning
from tests.tiers import curated
from tests.training import runs, store
from tests.training.runs import Recording, make, plan_of, released, saved, small_model, stated

STEP = make()  # compiled once for this file
PLAN = STEP.plan


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A directory whose two starts took 4 and 2 steps, with checkpoints of 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("begun")
    for steps in (4, 6):
        runs.trainer(directory, STEP).run(small_model(), steps=steps)
    return directory


@pytest.fixture
def copy(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "copy")


@pytest.fixture
def recording(tmp_path):
    return Recording(tmp_path / "recording")


def goes_on(directory, step=STEP, steps=None, **options):
    """How many steps the next start takes."""
    seen = []
    callbacks = [lambda event: seen.append(event.step)]
    runs.trainer(directory, step, callbacks=callbacks, **options).run(small_model(), steps)
    return len(seen)


# A start never uses old randomness.


CHANGES = {
    "microbatch": lambda: {"microbatch_size": 4},
    "loss and bound": lambda: {"loss": lambda m, x, y: 0.0 * m(x)[0] * y, "l2_clip_norm": 0.5},
    "optimizer": lambda: {"optimizer": optax.chain(optax.trace(decay=0.0), optax.adam(0.3))},
    "storage": lambda: {"policy": dp.load_policy("bfloat16")},
    "average": lambda: {"ema": 0.9},
    "eight devices": lambda: {"sharding": runs.rules_of("Auto")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_program_may_change_between_starts_without_a_flag(name, tmp_path, recording, recwarn):
    """And changes back, and has fresh noise and samples each time."""
    one, other = recording.step(), recording.step(**CHANGES[name]())
    for step, steps in ((one, 3), (other, 6), (one, 8), (other, None)):
        recording.trainer(tmp_path / "run", step).run(small_model(), steps)
    recording.assert_fresh()
    assert recording.taken == released(tmp_path / "run") == PLAN.steps
    warned = [w for w in recwarn if w.category is CheckpointWarning]
    assert len(warned) == 3 * (name in ("optimizer", "average"))


@pytest.mark.parametrize(
    ("plan", "num_examples", "message"),
    [
        (dp.PrivacyPlan(0.5, 10, 20.0, 1e-5), 64, "another plan"),
        pytest.param(plan_of(11), 64, "another plan", marks=pytest.mark.slow),
        (PLAN, 65, "another num_examples"),
    ],
)
def test_plan_and_number_of_examples_stay(plan, num_examples, message, copy):
    data = (np.zeros((num_examples, 4), np.float32), np.zeros(num_examples, np.float32))
    with pytest.raises(ValueError, match=f"has {message}.* there, .* here"):
        runs.trainer(copy, make(plan, num_examples=num_examples), data).run(small_model())
    assert released(copy) == 6
    assert goes_on(copy) == 4


@pytest.mark.slow
def test_seeded_runs_repeat_start_by_start(tmp_path):
    """Keys follow from the seed and the number of the start, and the statement says so."""
    recordings, states = [Recording(tmp_path / name) for name in ("one", "other")], []
    for recording in recordings:
        step, run = recording.step(seed=runs.SEED), recording.folder / "run"
        for steps in (4, 10):
            state = recording.trainer(run, step).run(small_model(), steps)
        states.append(state)
        recording.assert_fresh()  # also the second start beside the first
        statement = stated(run)
        assert statement["randomness"] == "seeded"
        assert "so does the seed" in statement["covers"]
        assert any("same seed" in text for text in statement["does_not_cover"])
    assert recordings[0].noises == recordings[1].noises
    runs.assert_same(*states)


def test_one_seeded_start_seeds_the_statement(copy):
    assert stated(copy)["randomness"] == "fresh"
    goes_on(copy, runs.seeded(), steps=7)
    goes_on(copy)
    assert stated(copy)["randomness"] == "seeded"


# What is released is counted.


@pytest.mark.parametrize("ends", curated(["all", "callback", "error", "data"], ["all", "error"]))
def test_an_orderly_end_counts_exactly(ends, tmp_path):
    """In the middle of a block that was announced, before its first step."""
    run = tmp_path / "run"

    def listen(event):
        (entry,) = runs.entries(run)
        assert (entry["steps"], entry["ended"]) == (3 if ends == "all" else 5, False)
        if event.step == 3 and ends == "error":
            raise KeyError
        return event.step == 3 and ends == "callback"

    class Source(Recording):
        def __getitem__(self, indices):
            if ends == "data" and len(self._noted("samples", 0)) == 3:
                raise OSError("gone")
            return super().__getitem__(indices)

    options = {"callbacks": [listen], "save_every": 5}
    trainer = runs.trainer(run, STEP, Source(tmp_path / "data"), **options)
    raised = {"error": pytest.raises(KeyError), "data": pytest.raises(dp.DataError)}
    with raised.get(ends, contextlib.nullcontext()):
        trainer.run(small_model(), steps=3 if ends == "all" else None)
    (entry,) = runs.entries(run)
    assert (entry["steps"], entry["ended"]) == (3, True)
    assert released(run) == 3
    assert goes_on(run) == 7


def test_an_error_in_evaluate_costs_no_step(copy):
    with pytest.raises(ZeroDivisionError):
        runs.trainer(copy, STEP, evaluate=lambda model: 1 / 0).run(small_model())
    assert goes_on(copy) == 4


def test_a_run_without_steps_left_returns_what_was_saved(copy, capsys):
    """And says that it does not use the model and the data that it gets."""
    with pytest.warns(CheckpointWarning, match="finished: 6 of 6 steps"):
        goes_on(copy, steps=6)
    goes_on(copy)
    saved = dp.load_model(copy, like=small_model())
    for data in ((runs.XS, runs.YS), (-runs.XS, runs.YS)):
        zeros = jax.tree.map(lambda x: 0 * x, small_model())
        finished = "is finished: 10 of 10 steps.*model, the loss and the data.* are not used"
        with pytest.warns(CheckpointWarning, match=finished):
            state = runs.trainer(copy, STEP, data).run(zeros)
        assert "is finished: 10 of 10 steps" in capsys.readouterr().out
        runs.assert_same(saved, state.model)
    assert len(runs.entries(copy)) == 3  # a start that takes no step writes no file
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(dp.CheckpointError, match="all 10 steps may have been released"):
        goes_on(copy)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text("{"),
        lambda file: edited(steps_released=3, epsilon=0.1)(file),  # as a killed process leaves it
    ],
    ids=["cut", "old"],
)
def test_a_statement_is_of_plan_and_ledger(damage, copy):
    """It follows from them, and is written anew."""
    statement = stated(copy)
    assert statement["plan"] == json.loads(PLAN.to_json())
    assert (statement["steps_released"], statement["num_examples"]) == (6, 64)
    assert statement["epsilon"] == PLAN.epsilon(6) < PLAN.epsilon()
    assert statement["covers"].startswith("The models of all 6 steps that may have been released")
    assert goes_on(copy) == 4
    damage(copy / "privacy.json")
    goes_on(copy)
    assert released(copy) == 10


def test_no_secret_is_in_the_directory(tmp_path, monkeypatch):
    """Nor what follows from it: keys of noise, of the loss, of samples."""
    drawn, draw = [], secrets.token_bytes

    def noted(number):
        found = draw(number)
        drawn.extend([found] * (number == 32))  # the names of files are public
        return found

    monkeypatch.setattr("secrets.token_bytes", noted)
    step = make()
    state = runs.trainer(tmp_path, step).run(small_model(), steps=4)
    keys = (state.opt_state.key, state.opt_state.noise.stream.key)
    words = [jax.random.key_data(key).tolist() for key in keys]
    needles = {str(word).encode() for pair in words for word in pair}
    needles |= {np.uint32(word).tobytes() for pair in words for word in pair}
    needles |= {form for one in drawn for form in (one, one.hex().encode())}
    assert drawn
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 20
    for file in files:
        assert not [needle for needle in needles if needle in file.read_bytes()], file
    arrays = pytest.importorskip("orbax.checkpoint").PyTreeCheckpointer()
    for array in jax.tree.leaves(arrays.restore(tmp_path / "checkpoints" / "4" / "state")):
        bits = set(np.asarray(array).view(np.uint32).ravel().tolist())
        assert not bits & {word for pair in words for word in pair}


# Several starts at once.


class Hooked(store.Bucket):
    """Calls a function before the n-th write of the ledger, or after it."""

    def __init__(self, root, count, after, hook):
        super().__init__(root)
        self.count, self.after, self.hook = count, after, hook

    @contextlib.contextmanager
    def written(self, path, mode):
        self.count -= "/ledger/" in str(path)
        is_due = self.count == 0 and "/ledger/" in str(path)
        if is_due and not self.after:
            self.hook()
        with super().written(path, mode) as stream:
            yield stream
        if is_due and self.after:
            self.hook()


@pytest.mark.parametrize("after", curated([False, True], [True]))
@pytest.mark.parametrize("count", curated([1, 2, 3], [2]))
def test_two_starts_at_the_same_moment(count, after, tmp_path, monkeypatch, recording):
    """The second one runs just before a write of the first one's ledger, or just after it."""
    url, step = "gs://bucket/run", recording.step(plan_of(4))
    ended = []

    def start():
        try:
            recording.trainer(url, step).run(small_model())
        except dp.CheckpointError as error:
            ended.append(str(error))

    bucket = store.opened(Hooked(tmp_path / "store", count, after, start), monkeypatch)
    start()
    recording.assert_fresh()
    assert recording.taken <= 4
    assert recording.taken <= released(bucket.at(url)) <= 4
    assert all(re.search(r"\d of 4 steps are left|holds no checkpoint", x) for x in ended)
    if saved(bucket.at(url)):
        recording.trainer(url, step).run(small_model())
        assert recording.taken == released(bucket.at(url)) == 4


def test_two_seeded_starts_at_once_are_refused(tmp_path, monkeypatch, recording):
    """Both have read that they are the first start: the second announcement is taken back."""
    url, step = "gs://bucket/run", recording.step(plan_of(4), seed=1)

    def another():
        recording.trainer(url, step).run(small_model(), steps=1)

    bucket = store.opened(Hooked(tmp_path / "store", 1, False, another), monkeypatch)
    with pytest.raises(dp.CheckpointError, match="both have one seed"):
        recording.trainer(url, step).run(small_model())
    assert len(recording.noises) == recording.taken == released(bucket.at(url)) == 1


def test_events_count_the_steps_of_a_start_beside_this_one(tmp_path):
    """Epsilon in an event, and in its line of metrics, is never below that of all steps so far."""
    seen = []

    def listen(event):
        seen.append((event.step, event.epsilon))
        if event.step == 2:
            assert goes_on(tmp_path) == 6  # all that this start has not announced

    options = {"evaluate": lambda model: {"one": 1.0}, "evaluate_every": 1, "save_every": 4}
    runs.trainer(tmp_path, STEP, callbacks=[listen], **options).run(small_model(), steps=4)
    assert seen == [(step, PLAN.epsilon(step)) for step in (1, 2, 9, 10)]
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [(line["step"], line["epsilon"]) for line in lines] == seen


# A directory that changes while a start runs.

MOVES = {
    "moved": lambda run: run.rename(run.with_name("moved")),
    "replaced by a copy": lambda run: shutil.copytree(run.rename(run.with_name("moved")), run),
    "ledger moved": lambda run: os.renames(run / "ledger", run.with_name("moved") / "ledger"),
    "own file gone": lambda run: of_start(run, 2).unlink(),
    "another file gone": lambda run: of_start(run, 1).unlink(),
}


@pytest.mark.parametrize(
    ("name", "when"),  # before an event with epsilon, before a checkpoint
    curated(itertools.product(MOVES, [7, 8]), [("moved", 8), *((name, 7) for name in MOVES)]),
)
def test_a_start_ends_when_its_directory_is_another(name, when, begun, copy):
    """It takes no step that its own ledger does not count, and makes no folder again."""

    def move(event):
        if event.step == when:
            MOVES[name](copy)

    with pytest.raises(dp.CheckpointError, match=r"moved, removed or replaced|json is missing"):
        runs.trainer(copy, STEP, callbacks=[move]).run(small_model())
    assert (copy / ("ledger" * (name != "moved"))).exists() == ("moved" not in name)
    folder = copy.with_name("moved") if copy.with_name("moved").exists() else copy
    shutil.copytree(begun / "ledger", folder / "ledger", dirs_exist_ok=True)  # a backup
    assert goes_on(folder) == 2  # the other two were announced, and taken
    assert released(folder) == 10


# More steps than the plan has.


def stated_by_readers(directory):
    """Steps and epsilon, by `save_model` and by the report."""
    file, found = directory / "m.safetensors", read_run(directory)
    dp.save_model(file, small_model(), privacy=directory)
    said = runs.stated_in(file)
    assert (said["steps_released"], float(said["epsilon"])) == (found.released, found.epsilon)
    assert "no promise" in page_of(directory) or f"of {found.released} steps" in page_of(directory)
    return found.released, found.epsilon


def test_copies_put_together_state_epsilon_of_all_their_steps(copy, tmp_path):
    other = shutil.copytree(copy, tmp_path / "other")
    assert goes_on(copy) == goes_on(other) == 4
    shutil.copytree(other / "ledger", copy / "ledger", dirs_exist_ok=True)
    with pytest.warns(CheckpointWarning, match="finished: 14 of 10 steps"):
        assert goes_on(copy) == 0
    found, truth = stated_by_readers(copy), dataclasses.replace(PLAN, steps=14).epsilon()
    assert found == (14, stated(copy)["epsilon"])
    # More than what finite precision adds to epsilon: delta is charged as well.
    assert PLAN.epsilon() < truth < found[1] - 5.2e-5 <= 1.01 * truth


SUMS = [
    (dp.sampling.CyclicPoisson(0.5, 4), 8, 16),
    (dp.sampling.BallsInBins(4), 8, 16),
    (dp.sampling.BallsInBins(3), 2, None),  # no whole cycles: it accounts for one start alone
    (dp.sampling.Poisson(0.5), 2**60, None),
]


@pytest.mark.parametrize(("kind", "steps", "longer"), curated(SUMS, SUMS[1:]))
def test_a_sum_is_accounted_for_or_has_no_promise(kind, steps, longer, copy):
    plan = dp.PrivacyPlan(steps=8, noise_multiplier=2.0, delta=0.01, sampling=kind)
    for start in (0, 1):
        rewritten(of_start(copy, start), plan=json.loads(plan.to_json()), steps=steps)
    truth = dataclasses.replace(plan, steps=longer).epsilon() if longer else np.inf
    found = stated_by_readers(copy)
    assert found[0] == 2 * steps
    assert truth <= found[1] <= 1.02 * truth


# Damage.


def rewritten(file, without=None, **fields):
    entry = json.loads(file.read_text()) | fields
    entry.pop(without, None)
    file.write_text(json.dumps(entry))


def edited(**fields):
    return lambda file: rewritten(file, **fields)


def of_start(directory, number):
    """The ledger's file of a start."""
    files = (directory / "ledger").iterdir()
    return next(file for file in files if json.loads(file.read_text())["start"] == number)


LEDGERS = {
    "missing": (Path.unlink, "is missing"),
    "all missing": (lambda file: shutil.rmtree(file.parent), "is missing"),
    "nested": (lambda file: file.write_text('{"a":' * 500 + "1" + "}" * 500), "100 deep"),
    "empty": (lambda file: file.write_text(""), "cannot be used"),
    "fewer steps": (edited(steps=3), "says 3 steps, and 4 steps of that start are known"),
    "negative": (edited(steps=-4), "'steps' is missing, or wrong"),
    "a truth": (edited(steps=True), "'steps' is missing, or wrong"),
    "no plan": (lambda file: rewritten(file, without="plan"), "'plan' is missing"),
    "another plan": (edited(plan=json.loads(plan_of(99).to_json())), "disagree about the plan"),
    "another size": (edited(num_examples=65), "disagree about the num_examples"),
    "another version": (edited(version=2), "not of format eqx_dp.ledger, version 1"),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_a_ledger_that_is_damaged_is_refused_by_name(name, copy):
    damage, message = LEDGERS[name]
    file = of_start(copy, 0)
    damage(file)
    with pytest.raises(dp.CheckpointError, match=message) as caught:
        goes_on(copy)
    file = file.parent if "disagree" in message or name == "all missing" else file
    assert str(file) in str(caught.value)
    if name not in ("missing", "all missing", "fewer steps"):  # which a checkpoint alone can tell
        with pytest.raises(dp.CheckpointError, match=re.escape(str(file))):
            dp.save_model(copy / "m.safetensors", small_model(), privacy=copy)


def test_a_ledger_that_says_more_counts(copy):
    rewritten(of_start(copy, 0), steps=6)
    assert goes_on(copy) == 2
    assert released(copy) == 10


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def emptied(file):
    file.write_text("{}")


@pytest.mark.parametrize("part", [pytest.param("state", marks=pytest.mark.slow), "record"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, flipped, emptied])
def test_damage_to_a_checkpoint_costs_no_privacy(damage, part, begun, tmp_path):
    """The checkpoint before is used; or the damage does not matter, and none is seen."""
    folder = Path("checkpoints", "6", part)
    names = [x.relative_to(begun) for x in (begun / folder).rglob("*") if x.is_file()]
    seen = 0
    for number, name in enumerate(names):
        copy = shutil.copytree(begun, tmp_path / str(number))
        damage(copy / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            state = runs.trainer(copy, STEP).run(small_model(), steps=7)
        warned = [str(w.message) for w in caught if w.category is CheckpointWarning]
        seen += bool(warned)
        assert int(state.step) == (5 if warned else 7)
        assert all("checkpoints/6 cannot be read, and the one before" in text for text in warned)
        assert released(copy) == 7
        assert [entry["steps"] for entry in runs.entries(copy)] == [4, 2, 1]
    assert seen


def test_when_no_checkpoint_can_be_read_it_says_so(copy):
    for number in (2, 4, 6):
        shutil.rmtree(copy / "checkpoints" / str(number) / "state")
    message = r"(?s)None of the checkpoints .*6 \(\w+\), 4 .*2 .*that were released still count"
    with pytest.warns(CheckpointWarning), pytest.raises(dp.CheckpointError, match=message):
        goes_on(copy)
    shutil.rmtree(copy / "checkpoints")
    with pytest.warns(CheckpointWarning, match="6 of 10 steps may have been released"):
        assert goes_on(copy) == 4
    assert released(copy) == 10


def test_a_start_of_another_size_that_took_no_step_does_not_count(copy):
    entry = json.loads(of_start(copy, 1).read_text())
    entry |= {"num_examples": 65, "steps": 0, "start": 2}
    (copy / "ledger" / "0123456789abcdef.json").write_text(json.dumps(entry))
    assert goes_on(copy) == 4


def test_a_statement_names_the_policy_of_the_newest_start(tmp_path):
    for steps, policy in ((2, None), (4, None), (6, dp.load_policy("mixed_bfloat16"))):
        runs.trainer(tmp_path, make(policy=policy)).run(small_model(), steps=steps)
    dp.save_model(tmp_path / "m.safetensors", small_model(), privacy=tmp_path)
    found = runs.stated_in(tmp_path / "m.safetensors")
    assert "bfloat16" in found["policy"]
    assert found["policy"] == stated(tmp_path)["policy"]


@pytest.mark.parametrize(
    ("kind", "may_start_again"),
    curated([(dp.sampling.BallsInBins(3), False), (dp.sampling.BallsInBins(4), True)], []),
    ids=str,
)
def test_a_run_of_another_kind_of_sampling(tmp_path, kind, may_start_again):
    plan = dp.PrivacyPlan(steps=8, noise_multiplier=2.0, delta=0.01, sampling=kind)
    step = runs.seeded(plan)

    def run(where, **options):
        return runs.trainer(where, step).run(small_model(), **options)

    run(tmp_path / "whole")
    assert run(tmp_path / "whole").step == 8  # finished: the last checkpoint
    run(tmp_path / "part", steps=3)
    found = json.loads((tmp_path / "part" / "privacy.json").read_text())
    assert found["steps_released"] == (4 if may_start_again else 3)  # whole cycles
    if may_start_again:
        assert run(tmp_path / "part").step == 7
    else:
        with pytest.raises(dp.CheckpointError, match="one start alone"):
            run(tmp_path / "part")
