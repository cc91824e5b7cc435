"""The ledger counts every step that may have been released, whatever happens to a directory."""

import json
import re
import secrets
import shutil
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from safetensors import safe_open

import eqx_dp as dp
from eqx_dp.training import CheckpointWarning
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


def left_by_a_kill(directory, left, at, checkpoint, step=STEP, data=(runs.XS, runs.YS), note=None):
    """Leaves in a folder what a process leaves that is killed after a step; a block has 5."""

    def snapshot(event):
        if note is not None:
            note(event)
        if event.step == at:
            end = time.monotonic() + 100
            while checkpoint and checkpoint not in saved(directory):
                assert time.monotonic() < end
                time.sleep(0.01)
            shutil.copytree(directory, left)
            raise RuntimeError("enough")

    options = {"callbacks": [snapshot], "save_every": 5}
    with pytest.raises(RuntimeError, match="enough"):
        runs.trainer(directory, step, data, **options).run(small_model())


# A start never uses old randomness.


def test_examples_in_another_order_meet_fresh_noise(tmp_path, recording):
    """Killed at 13, resumed from 10: what both release as step 11 has no noise in common."""
    step, run, left = recording.step(plan_of(20)), tmp_path / "run", tmp_path / "left"
    left_by_a_kill(run, left, 13, 10, step, recording, recording.note)
    assert (released(run), released(left)) == (13, 15)  # an orderly end; a killed process
    order = np.random.default_rng(1).permutation(runs.NUM_EXAMPLES)
    positions = []

    def note(event):
        recording.note(event)
        positions.append(int(event.state.step))

    shuffled = (runs.XS[order], runs.YS[order])
    runs.trainer(left, step, shuffled, callbacks=[note]).run(small_model())
    assert positions == [11, 12, 13, 14, 15]  # of the model; 16 to 20 of the ledger
    noises = np.array(recording.noises)
    assert noises.shape[0] == 18
    assert np.mean(noises[10:13] == noises[13:16]) < 0.1
    assert len(np.unique(noises, axis=0)) == len(noises)
    assert released(left) == 20


CHANGES = {
    "microbatch": lambda: {"microbatch_size": 4},
    "clip norm": lambda: {"l2_clip_norm": 0.5},
    "loss": lambda: {"loss": lambda model, x, y: 0.0 * model(x)[0] * y},
    "rate": lambda: {"optimizer": optax.chain(optax.trace(decay=0.0), optax.sgd(0.3))},
    "optimizer": lambda: {"optimizer": optax.chain(optax.trace(decay=0.0), optax.adam(0.3))},
    "policy": lambda: {"policy": dp.load_policy("mixed_bfloat16")},
    "storage": lambda: {"policy": dp.load_policy("bfloat16")},
    "average": lambda: {"ema": 0.9},
    "eight devices": lambda: {"sharding": runs.rules_of("Auto")},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_program_may_change_between_starts_without_a_flag(name, tmp_path, recording, recwarn):
    """And changes back, and has fresh noise and samples each time."""
    one, other = recording.step(), recording.step(**CHANGES[name]())
    for step, steps in ((one, 3), (other, 6), (one, 8), (other, None)):
        trainer = runs.trainer(tmp_path / "run", step, recording, callbacks=[recording.note])
        trainer.run(small_model(), steps)
    recording.assert_fresh()
    assert recording.taken == released(tmp_path / "run") == PLAN.steps
    told = [w for w in recwarn if w.category is CheckpointWarning]
    assert len(told) == 3 * (name in ("optimizer", "average"))


def test_plan_and_number_of_examples_stay(copy):
    changes = {
        "has another plan": (
            dp.PrivacyPlan(0.5, 10, 20.0, 1e-5),
            plan_of(11),
            dp.PrivacyPlan(0.25, 10, 21.0, 1e-5),
            dp.PrivacyPlan(0.25, 10, 20.0, 1e-6),
        ),
        "has another num_examples": (PLAN,),
    }
    for said, plans in changes.items():
        for plan in plans:
            length = 64 if plan != PLAN else 65
            data = (np.zeros((length, 4), np.float32), np.zeros(length, np.float32))
            with pytest.raises(ValueError, match=f"{said}.* there, .* here"):
                runs.trainer(copy, make(plan, num_examples=length), data).run(small_model())
    assert released(copy) == 6
    assert goes_on(copy) == 4


def test_two_directories_have_nothing_in_common(tmp_path, recording):
    step = recording.step()
    for name in ("one", "other", None, None):  # nor runs without a directory
        directory = name and tmp_path / name
        trainer = runs.trainer(directory, step, recording, callbacks=[recording.note])
        assert int(trainer.run(small_model(), steps=3).step) == 3
    recording.assert_fresh()
    assert recording.taken == 12


def test_seeded_runs_repeat_start_by_start(tmp_path):
    """Keys follow from the seed and the number of the start, and the statement says so."""
    recordings, states = [Recording(tmp_path / name) for name in ("one", "other")], []
    for recording in recordings:
        step, run = recording.step(seed=runs.SEED), recording.folder / "run"
        for steps in (4, 10):
            trainer = runs.trainer(run, step, recording, callbacks=[recording.note])
            state = trainer.run(small_model(), steps)
        states.append(state)
        recording.assert_fresh()  # also the second start beside the first
        statement = stated(run)
        assert statement["randomness"] == "seeded"
        assert "so does the seed" in statement["covers"]
        assert any("same seed" in text for text in statement["does_not_cover"])
    assert recordings[0].noises == recordings[1].noises
    runs.assert_same(*states)
    other = Recording(tmp_path / "another")
    step = other.step(seed=runs.SEED + 1)
    runs.trainer(None, step, other, callbacks=[other.note]).run(small_model())
    assert not set(other.noises) & set(recordings[0].noises)


def test_one_seeded_start_seeds_the_statement(copy):
    assert stated(copy)["randomness"] == "fresh"
    goes_on(copy, runs.seeded(), steps=7)
    goes_on(copy)
    assert stated(copy)["randomness"] == "seeded"


# What is released is counted.


def test_a_save_that_fails_is_told_and_counted(tmp_path, monkeypatch):
    manager = pytest.importorskip("orbax.checkpoint").CheckpointManager
    waits, failed = manager.wait_until_finished, []

    def fails(self):
        waits(self)
        if self.latest_step() == 6 and not failed:
            failed.append(6)
            raise RuntimeError("the disk is full")

    monkeypatch.setattr(manager, "wait_until_finished", fails)
    with pytest.warns(CheckpointWarning, match="could not be written.*the disk is full"):
        assert goes_on(tmp_path, steps=6) == 6
    assert released(tmp_path) == 6
    dp.save_model(tmp_path / "m.safetensors", small_model(), privacy=tmp_path)
    with safe_open(tmp_path / "m.safetensors", "numpy") as opened:
        assert json.loads(opened.metadata()["privacy"])["steps_released"] == 6


@pytest.mark.parametrize("ends", ["all", "callback", "error", "data"])
def test_an_orderly_end_counts_exactly(ends, tmp_path):
    """In the middle of a block that was announced."""

    def listen(event):
        if event.step == 3 and ends == "error":
            raise KeyError("a mistake of the user's")
        return event.step == 3 and ends == "callback"

    class Source(Recording):
        def __getitem__(self, indices):
            if ends == "data" and len(self._noted("samples", 0)) == 3:
                raise OSError("gone")
            return super().__getitem__(indices)

    trainer = runs.trainer(
        tmp_path / "run", STEP, Source(tmp_path / "data"), callbacks=[listen], save_every=5
    )
    if ends in ("error", "data"):
        with pytest.raises(KeyError if ends == "error" else dp.DataError):
            trainer.run(small_model())
    else:
        trainer.run(small_model(), steps=3 if ends == "all" else None)
    (entry,) = runs.entries(tmp_path / "run")
    assert (entry["steps"], entry["ended"]) == (3, True)
    assert released(tmp_path / "run") == 3
    assert goes_on(tmp_path / "run") == 7


def test_a_run_without_steps_left_returns_what_was_saved(copy, capsys):
    goes_on(copy)
    state = runs.trainer(copy, STEP).run(small_model())
    assert int(state.step) == 10
    runs.assert_same(dp.load_model(copy, like=small_model()), state.model)
    assert "is finished: 10 of 10 steps" in "".join(capsys.readouterr())
    assert len(runs.entries(copy)) == 3  # a start that takes no step writes no file
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(dp.CheckpointError, match="all 10 steps may have been released"):
        goes_on(copy)


def test_steps_of_killed_starts_count(tmp_path):
    """Twice killed in its first block: the model begins anew, and half of the plan is left."""
    left = tmp_path / "0"
    left_by_a_kill(tmp_path / "run", left, 2, None)
    assert (released(tmp_path / "run"), released(left)) == (2, 5)
    with pytest.warns(CheckpointWarning, match=r"no checkpoint.*5 of 10 steps may have been"):
        assert goes_on(left) == 5
    assert released(left) == 10


def test_a_statement_is_of_plan_and_ledger(copy):
    statement = stated(copy)
    assert statement["plan"] == json.loads(PLAN.to_json())
    assert (statement["steps_released"], statement["num_examples"]) == (6, 64)
    assert statement["epsilon"] == PLAN.epsilon(6) < PLAN.epsilon()
    assert statement["covers"].startswith("The models of all 6 steps that may have been released")
    (copy / "privacy.json").write_text("{")  # what follows from others is written anew
    assert goes_on(copy) == 4
    assert stated(copy)["steps_released"] == 10


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
    keys = (state.opt_state.key, state.opt_state.noise.key)
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
    found = jax.tree.leaves(arrays.restore(tmp_path / "checkpoints" / "4" / "state"))
    assert len(found) == len(runs.leaves(state)) - 3  # the two keys, and the noise's counter
    for array in found:
        bits = set(np.asarray(array).view(np.uint32).ravel().tolist())
        assert not bits & {word for pair in words for word in pair}


# Several starts at once.


@pytest.mark.filterwarnings("ignore::eqx_dp.training.CheckpointWarning")
@pytest.mark.parametrize(("at", "every"), [(1, 2), (2, 2), (3, 5), (1, 10), (9, 3)])
def test_two_starts_at_once_stay_within_the_plan(at, every, tmp_path, recording):
    """A second start runs to its end while the first is at some step; none of them locks."""
    step, run = recording.step(), tmp_path / "run"

    def begin_another(event):
        recording.note(event)
        if event.step == at:
            other = runs.trainer(run, step, recording, callbacks=[recording.note])
            try:
                other.run(small_model())
            except dp.CheckpointError as error:
                assert re.search("holds no checkpoint|steps are left", str(error))  # noqa: PT017
            assert recording.taken <= stated(run)["steps_released"] <= PLAN.steps

    first = runs.trainer(run, step, recording, callbacks=[begin_another], save_every=every)
    try:
        first.run(small_model())
    except dp.CheckpointError as error:
        assert "0 of 10 steps are left" in str(error)  # noqa: PT017
    recording.assert_fresh()
    assert recording.taken <= released(run) <= PLAN.steps


class Hooked(store.Bucket):
    """Calls a function before the n-th write of the ledger, or after it."""

    def __init__(self, root, count, after, hook):
        super().__init__(root)
        self.count, self.after, self.hook = count, after, hook

    def _written(self, path, mode):
        context = super()._written(path, mode)
        if "/ledger/" not in str(path):
            return context
        self.count -= 1
        return _around(context, self.hook, self.after) if self.count == 0 else context


class _around:
    def __init__(self, context, hook, after):
        self.context, self.hook, self.after = context, hook, after

    def __enter__(self):
        if not self.after:
            self.hook()
        return self.context.__enter__()

    def __exit__(self, *error):
        self.context.__exit__(*error)
        if self.after:
            self.hook()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_two_starts_at_the_same_moment(count, after, tmp_path, monkeypatch, recording):
    """The second one runs just before a write of the first one's ledger, or just after it."""
    url, step = "gs://bucket/run", recording.step(plan_of(4))
    options = {"step": step, "data": recording, "callbacks": [recording.note]}
    ended = []

    def another():
        try:
            runs.trainer(url, **options).run(small_model())
        except dp.CheckpointError as error:
            ended.append(str(error))

    bucket = store.opened(Hooked(tmp_path / "store", count, after, another), monkeypatch)
    try:
        runs.trainer(url, **options).run(small_model())
    except dp.CheckpointError as error:
        ended.append(str(error))
    recording.assert_fresh()
    assert recording.taken <= 4
    assert recording.taken <= released(bucket.at(url)) <= 4
    assert all(re.search(r"\d of 4 steps are left|holds no checkpoint", x) for x in ended)
    goes_on_again = runs.trainer(url, **options)
    if saved(bucket.at(url)):
        goes_on_again.run(small_model())
        assert recording.taken == released(bucket.at(url)) == 4


def test_two_seeded_starts_at_once_are_refused(tmp_path, recording):
    step = recording.step(seed=1)
    options = {"step": step, "data": recording}

    def begin_another(event):
        recording.note(event)
        if event.step == 1:
            runs.trainer(tmp_path / "run", callbacks=[recording.note], **options).run(small_model())

    with pytest.warns() as _, pytest.raises(dp.CheckpointError):
        runs.trainer(tmp_path / "run", callbacks=[begin_another], **options).run(small_model())
    recording.assert_fresh()
    assert recording.taken <= released(tmp_path / "run")


# Damage.


def edited(**fields):
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def lacking(name):
    def drop(file):
        entry = json.loads(file.read_text())
        del entry[name]
        file.write_text(json.dumps(entry))

    return drop


LEDGERS = {
    "missing": (Path.unlink, "is missing"),
    "empty": (lambda file: file.write_text(""), "cannot be used"),
    "truncated": (lambda file: file.write_text(file.read_text()[:-2]), "cannot be used"),
    "not UTF-8": (lambda file: file.write_bytes(b"\xff"), "cannot be used"),
    "a list": (lambda file: file.write_text("[]"), "holds no JSON object"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "cannot be used"),
    "fewer steps": (edited(steps=3), "says 3 steps, and a checkpoint knows of 4"),
    "negative": (edited(steps=-4), "'steps' is missing, or wrong"),
    "a fraction": (edited(steps=3.5), "'steps' is missing, or wrong"),
    "a truth": (edited(steps=True), "'steps' is missing, or wrong"),
    "no steps": (lacking("steps"), "'steps' is missing"),
    "no plan": (lacking("plan"), "'plan' is missing"),
    "another plan": (edited(plan=json.loads(plan_of(99).to_json())), "disagree about the plan"),
    "another size": (edited(num_examples=65), "disagree about the num_examples"),
    "another format": (edited(format="other"), "not of format eqx_dp.ledger"),
    "another version": (edited(version=2), "not of format eqx_dp.ledger, version 1"),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_a_ledger_that_is_damaged_is_refused_by_name(name, copy):
    damage, said = LEDGERS[name]
    (file,) = (x for x in (copy / "ledger").iterdir() if json.loads(x.read_text())["start"] == 0)
    damage(file)
    with pytest.raises(dp.CheckpointError, match=said) as caught:
        goes_on(copy)
    file = file.parent if "disagree" in said else file
    assert str(file) in str(caught.value)
    if name not in ("missing", "fewer steps"):  # which a checkpoint alone can tell
        with pytest.raises(dp.CheckpointError, match=re.escape(str(file))):
            dp.save_model(copy / "m.safetensors", small_model(), privacy=copy)


def test_a_ledger_that_is_gone_is_refused(copy):
    shutil.rmtree(copy / "ledger")
    with pytest.raises(dp.CheckpointError, match=r"\.json is missing, and a checkpoint knows of"):
        goes_on(copy)
    with pytest.raises(dp.CheckpointError, match="holds no ledger"):
        dp.save_model(copy / "m.safetensors", small_model(), privacy=copy)


def test_a_ledger_that_says_more_counts(copy):
    file = next(x for x in (copy / "ledger").iterdir() if '"start": 0' in x.read_text())
    edited(steps=6)(file)
    assert goes_on(copy) == 2
    assert released(copy) == 10


def gone(file):
    file.unlink()


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("damage", [gone, cut, flipped])
@pytest.mark.parametrize("number", range(18))
def test_damage_to_a_file_of_a_checkpoint_costs_no_privacy(damage, number, copy, recwarn):
    """The checkpoint before is used; or the damage does not matter, and none is seen."""
    newest = copy / "checkpoints" / "6"
    files = sorted(x for x in newest.rglob("*") if x.is_file() and x.stat().st_size)
    file = files[number % len(files)]
    damage(file)
    state = runs.trainer(copy, STEP).run(small_model(), steps=7)
    told = [str(w.message) for w in recwarn if w.category is CheckpointWarning]
    assert int(state.step) in ((5,) if told else (7,))
    assert all("checkpoints/6 cannot be read, and the one before" in text for text in told)
    assert released(copy) == 7
    assert [entry["steps"] for entry in runs.entries(copy)] == [4, 2, 1]


def test_when_no_checkpoint_can_be_read_it_says_so(copy):
    for number in (2, 4, 6):
        shutil.rmtree(copy / "checkpoints" / str(number) / "state")
    with pytest.warns(CheckpointWarning), pytest.raises(dp.CheckpointError) as caught:
        goes_on(copy)
    assert re.search(r"None of the checkpoints .*6 \(\w+\), 4 .*2 ", str(caught.value))
    assert "the steps that were released still count" in str(caught.value)
    shutil.rmtree(copy / "checkpoints")
    with pytest.warns(CheckpointWarning, match="6 of 10 steps may have been released"):
        assert goes_on(copy) == 4
    assert released(copy) == 10


def test_a_directory_that_cannot_be_written_to_says_so():
    directory = Path("/proc/self/task")  # which not even root can write to
    with pytest.raises(dp.CheckpointError, match=re.escape(str(directory))):
        goes_on(directory)


def test_files_of_others_stay(tmp_path):
    """Whatever their names are: hosts, notes, a folder beside the checkpoints."""
    names = ("hosts/mine.txt", "checkpoints/notes/mine.txt", "ledger/notes.txt", "00000002/mine")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    goes_on(tmp_path, save_every=1, keep=1)
    goes_on(tmp_path)
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4
    assert saved(tmp_path) == [10]


def test_an_edited_model_goes_on_only_if_it_fits(copy):
    with pytest.raises(ValueError, match=r"weight: .*\(2, 4\)|\(2, 4\)"):
        runs.trainer(copy, STEP).run(small_model(3))
    other = eqx.tree_at(lambda m: m.weight, small_model(), np.zeros((2, 4), np.float32))
    assert int(runs.trainer(copy, STEP).run(other).step) == 10


# What a first reader of the code found.


def test_a_start_of_another_size_that_took_no_step_does_not_count(copy):
    (file,) = (x for x in (copy / "ledger").iterdir() if json.loads(x.read_text())["start"] == 1)
    other = json.loads(file.read_text()) | {"num_examples": 65, "steps": 0, "start": 2}
    (copy / "ledger" / "0123456789abcdef.json").write_text(json.dumps(other))
    assert goes_on(copy) == 4


def test_a_statement_that_a_killed_process_left_too_low_is_written_anew(copy):
    goes_on(copy)
    old = stated(copy) | {"steps_released": 3, "epsilon": 0.1}
    (copy / "privacy.json").write_text(json.dumps(old))
    runs.trainer(copy, STEP).run(small_model())
    assert stated(copy)["steps_released"] == 10


def test_a_statement_names_the_policy_of_the_newest_start(tmp_path):
    for steps, policy in ((2, None), (4, None), (6, dp.load_policy("mixed_bfloat16"))):
        runs.trainer(tmp_path, make(policy=policy)).run(small_model(), steps=steps)
    dp.save_model(tmp_path / "m.safetensors", small_model(), privacy=tmp_path)
    with safe_open(tmp_path / "m.safetensors", "numpy") as file:
        found = json.loads(file.metadata()["privacy"])
    assert "bfloat16" in found["policy"]
    assert found["policy"] == stated(tmp_path)["policy"]


def test_a_checkpoint_whose_record_is_damaged_is_not_used(copy):
    for number in ("6", "4"):
        for file in (copy / "checkpoints" / number / "record").rglob("*"):
            if file.is_file() and file.name == "metadata":
                file.write_text("{}")
    with pytest.warns(CheckpointWarning, match="checkpoints/6 cannot be read"):
        goes_on(copy)
