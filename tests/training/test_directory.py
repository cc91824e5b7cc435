"""A directory has one run at a time, and one of which a part is damaged says so."""

import json
import os
import shutil
from pathlib import Path

import pytest

import eqx_dp as dp
from tests.training import runs
from tests.training.runs import assert_agrees, make, small_model

STEP = make()  # compiled once for this file
PLAN = STEP.plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints of steps 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("saved")
    runs.trainer(directory, STEP, evaluate=lambda _: {"one": 1}, evaluate_every=2).run(
        small_model(), steps=6
    )
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy", symlinks=True)


def goes_on(directory, **options):
    """The first step that a run takes there."""
    seen = []
    callbacks = [lambda event: seen.append(event.step)]
    runs.trainer(directory, STEP, callbacks=callbacks, **options).run(small_model())
    assert assert_agrees(directory, PLAN) == 10
    return seen[0]


# One run at a time.


def test_two_runs_in_one_directory_are_told_apart(copy):
    """The second is refused, whether it is another process or not, and the first goes on."""
    said = []

    def begin_another(event):
        before = sorted(copy.rglob("*"))
        with pytest.raises(dp.CheckpointError) as caught:
            runs.trainer(copy, STEP).run(small_model())
        said.append(str(caught.value))
        assert sorted(copy.rglob("*")) == before

    runs.trainer(copy, STEP, callbacks=[begin_another], save_every=100).run(small_model())
    assert f"Another run is under way in {copy}: process {os.getpid()} on " in said[0]
    assert "name another directory" in said[0]
    assert assert_agrees(copy, PLAN) == 10


def test_a_lock_ends_with_its_run(copy):
    def fails(event):
        raise RuntimeError("a mistake in a callback")

    with pytest.raises(RuntimeError, match="a mistake"):
        runs.trainer(copy, STEP, callbacks=[fails]).run(small_model())
    assert goes_on(copy) == 7


def test_a_directory_that_cannot_be_written_to_says_so():
    directory = Path("/proc/self/task")  # which not even root can write to
    with pytest.raises(dp.CheckpointError, match=f"Nothing can be written to {directory} "):
        runs.trainer(directory, STEP).run(small_model())


def test_a_run_that_cannot_be_recorded_does_not_begin(tmp_path, monkeypatch):
    def full(self, folder, number, save):
        raise OSError("No space left on device")

    monkeypatch.setattr("eqx_dp.training.checkpoint.Checkpoints._commit", full)
    seen = []
    with (
        pytest.warns(dp.CheckpointWarning, match="state of step 0 could not be saved"),
        pytest.raises(dp.CheckpointError, match="cannot be recorded in"),
    ):
        runs.trainer(tmp_path, STEP, callbacks=[seen.append]).run(small_model())
    assert seen == []


# What names the checkpoint that counts.


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text", ['{"steps_done": 1}', "", "[]", '{"steps_done": "6"}', '{"steps_done": true}', None]
)
def test_a_statement_that_names_no_checkpoint_costs_nothing(text, copy):
    (copy / "privacy.json").unlink()
    if text is not None:
        (copy / "privacy.json").write_text(text)
    with pytest.warns(dp.CheckpointWarning, match="should name the checkpoint that counts"):
        assert goes_on(copy) == 7
    assert not list(copy.glob("*.damaged"))


def test_a_statement_whose_checkpoint_is_gone_is_the_one_before(copy):
    (copy / "privacy.json").write_text('{"steps_done": 8}')
    with pytest.warns(dp.CheckpointWarning, match=r"step 8 .*is damaged.*step 6"):
        assert goes_on(copy) == 7


# Digests.


def listed(directory):
    return json.loads((directory / "00000006/files.json").read_text())


def with_files(change):
    """The list, with other entries."""
    return lambda found: json.dumps(found | {"files": change(found["files"])})


DIGESTS = {
    "empty": lambda _: "{}",
    "of nothing": with_files(lambda files: {}),
    "too few": with_files(lambda files: dict(list(files.items())[1:])),
    "a list": with_files(list),
    "no JSON": lambda _: "\xff",
    "numbers": with_files(lambda files: dict.fromkeys(files, 1)),
    "sizes": with_files(lambda files: {name: [n + 1, x] for name, (n, x) in files.items()}),
    "elsewhere": with_files(lambda files: files | {"../00000004/run.json": [0, ""]}),
    "another step": lambda found: json.dumps(found | {"step": 4}),
    "no step": lambda found: json.dumps({"files": found["files"]}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DIGESTS)
def test_digests_that_vouch_for_less_than_all_are_damage(name, copy):
    file = copy / "00000006/files.json"
    file.write_text(DIGESTS[name](listed(copy)), encoding="latin-1")
    with pytest.warns(dp.CheckpointWarning, match=r"step 6 .*is damaged.*step 4") as caught:
        assert goes_on(copy) == 5
    assert len(caught) == 1


def test_a_checkpoint_that_is_emptied_with_its_digests_is_damage(copy):
    for part in (copy / "00000006").iterdir():
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    (copy / "00000006/files.json").write_text("{}")
    with pytest.warns(dp.CheckpointWarning, match="it is empty"):
        assert goes_on(copy) == 5


# The record.


def edited(**fields):
    return lambda text: json.dumps(json.loads(text) | fields)


RECORDS = {
    "no JSON": (lambda text: text[:-1], "it cannot be read"),
    "not UTF-8": (lambda text: "\xff", "it cannot be read"),
    "a list": (lambda text: "[]", "holds no JSON object"),
    "another format": (edited(format="other"), "its format is not eqx_dp.run"),
    "an older version": (edited(version=1), "it is of version 1, and this release"),
    "lacking": (lambda text: '{"format": "eqx_dp.run", "version": 2}', "its 'plan' is missing"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_cannot_be_used_is_refused(name, copy):
    change, said = RECORDS[name]
    file = copy / "run.json"
    file.write_text(change(file.read_text()), encoding="latin-1")
    with pytest.raises(dp.CheckpointError, match=said) as caught:
        goes_on(copy)
    assert f"{file} cannot be used" in str(caught.value)


def test_checkpoints_without_a_record_are_refused(copy):
    """As those of a release that kept none."""
    (copy / "run.json").unlink()
    with pytest.raises(dp.CheckpointError, match=r"\(steps 6, 4, 2\) and no run.json"):
        goes_on(copy)


def test_a_record_without_checkpoints_is_refused(copy):
    for folder in copy.glob("0*"):
        shutil.rmtree(folder)
    (copy / "privacy.json").unlink()
    with pytest.raises(dp.CheckpointError, match=r"holds no checkpoint.*released_at_most.00000006"):
        goes_on(copy)


def test_a_bound_that_is_gone_counts_all_steps(copy):
    (copy / "released_at_most.00000006").unlink()
    other = make(l2_clip_norm=2.0)
    with pytest.raises(ValueError, match="10 of the plan's 10 steps may have been released"):
        runs.trainer(copy, other, allow_changed=("l2_clip_norm",)).run(small_model())
    assert goes_on(copy) == 7


# Metrics.


def test_lines_that_nobody_can_read_stay(copy):
    file = copy / "metrics.jsonl"
    before = file.read_bytes()
    assert before.count(b"\n") == 3
    file.write_bytes(b"\xff\xfe\n" + before + b'[1]\n{"step": 7}\n{"step": "x"}\n{"step": 8, "se')
    goes_on(copy, evaluate=lambda _: {"one": 1}, evaluate_every=2)
    lines = file.read_bytes().splitlines()
    assert lines[0] == b"\xff\xfe"
    assert lines[1:6] == [*before.splitlines(), b"[1]", b'{"step": "x"}']
    assert [json.loads(line)["step"] for line in lines[6:]] == [8, 10]


def test_metrics_of_a_run_without_a_record_are_not_ours(tmp_path):
    theirs = '{"step": 3, "loss": 1.0}\n'
    for name in ("metrics.jsonl", "metrics.before1.jsonl"):
        (tmp_path / name).write_text(theirs)
    with pytest.warns(UserWarning, match="of another run.*it is now metrics.before2.jsonl"):
        goes_on(tmp_path, evaluate=lambda _: {"one": 1}, evaluate_every=5)
    assert (tmp_path / "metrics.before1.jsonl").read_text() == theirs
    assert (tmp_path / "metrics.before2.jsonl").read_text() == theirs
    assert "loss" not in (tmp_path / "metrics.jsonl").read_text()
