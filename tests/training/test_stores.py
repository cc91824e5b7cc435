"""A run in an object store is one like others: no links, no locks, no renaming."""

import json
import time

import pytest
from eqx_dp.training.directory import RunDirectory
from eqx_dp.training.parts import problem_of

import eqx_dp as dp
from tests.training import runs, store
from tests.training.runs import SEED, assert_same, make, small_model

STEP = make()  # compiled once for this file
PLAN = STEP.plan
URL = "gs://bucket/runs/one"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    return store.opened(store.Bucket(tmp_path / "store"), monkeypatch)


@pytest.fixture(params=["store", "fsspec"])
def any_bucket(request, tmp_path, monkeypatch):
    made = store.Bucket if request.param == "store" else store.FsspecBucket
    return store.opened(made(tmp_path / "store"), monkeypatch)


def goes_on(steps=None, callbacks_first=lambda event: None, **options):
    seen = []
    callbacks = [callbacks_first, lambda event: seen.append(event.step)]
    state = runs.trainer(URL, STEP, callbacks=callbacks, **options).run(small_model(), steps)
    return seen, state


def until_saved(bucket, number):
    end = time.monotonic() + 100
    while runs.assert_agrees(bucket.at(URL), PLAN) < number:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_run_in_a_store_is_resumed(any_bucket):
    bucket = any_bucket
    evaluated = {"evaluate": lambda _: {"one": 1}, "evaluate_every": 1}
    STEP.unrecorded.steps = 0
    whole = runs.trainer(None, STEP).run(small_model())
    assert goes_on(4, **evaluated)[0] == [1, 2, 3, 4]
    seen, state = goes_on(**evaluated)
    assert seen == [5, 6, 7, 8, 9, 10]
    assert_same(state, whole)
    directory = bucket.at(URL)
    assert runs.assert_agrees(directory, PLAN) == 10
    assert sorted(x.name for x in directory.glob("0*")) == ["00000006", "00000008", "00000010"]
    assert [x.name for x in directory.glob("released*")] == ["released_at_most.00000010"]
    lines = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert_same(dp.load_model(URL, like=small_model()), whole.model)
    assert not [how for how, _ in getattr(bucket, "seen", ()) if how == "rename"]
    assert [x for x in directory.rglob("*") if x.is_symlink()] == []


@pytest.mark.slow
def test_of_two_runs_the_earlier_one_ends(bucket):
    """Before it takes a step that the later one does not count; which goes on as if alone."""
    STEP.unrecorded.steps = 0
    whole = runs.trainer(None, STEP).run(small_model())
    later = []

    def begin_another(event):
        if event.step == 5:
            until_saved(bucket, 4)
            later.append(runs.trainer(URL, make()).run(small_model()))

    seen = []
    callbacks = [begin_another, lambda event: seen.append(event.step)]
    with (
        pytest.warns(dp.CheckpointWarning, match="step 6 could not be saved.*Another run"),
        pytest.raises(dp.CheckpointError, match=r"Another run has begun in gs://.*: process"),
    ):
        runs.trainer(URL, make(), callbacks=callbacks).run(small_model())
    assert seen == [1, 2, 3, 4, 5, 6]  # those that it had noted before
    assert_same(later[0], whole)
    assert runs.assert_agrees(bucket.at(URL), PLAN) == 10
    kept = sorted(bucket.at(URL).glob("0*"))
    assert [folder.name for folder in kept] == ["00000006", "00000008", "00000010"]
    assert [problem_of(folder) for folder in kept] == [None] * 3


def test_of_two_runs_at_the_same_moment_one_counts_the_other(bucket, monkeypatch):
    """The later one begins when the earlier one has noted its steps, and has taken none of them."""
    seen, began, set_bound = [], [], RunDirectory.set_bound

    def noted(self, number):
        set_bound(self, number)
        if number == 4 and not began:
            began.append(number)
            other = make(l2_clip_norm=2.0)
            with pytest.warns(dp.CheckpointWarning, match="The next is step 5"):
                runs.trainer(URL, other, allow_changed=("l2_clip_norm",)).run(small_model())

    monkeypatch.setattr(RunDirectory, "set_bound", noted)
    earlier = runs.trainer(URL, STEP, callbacks=[lambda event: seen.append(event.step)])
    with pytest.raises(dp.CheckpointError, match="Another run has begun"):
        earlier.run(small_model())
    assert seen == [1, 2]


def test_a_run_that_is_refused_disturbs_no_other(bucket):
    def begin_another(event):
        if event.step == 3:
            until_saved(bucket, 2)
            with pytest.raises(ValueError, match="seed: the checkpoint was made with another seed"):
                runs.trainer(URL, make(seed=SEED + 1)).run(small_model())

    assert goes_on(callbacks_first=begin_another)[0] == list(range(1, 11))


def test_damage_in_a_store_is_seen(any_bucket):
    bucket = any_bucket
    goes_on(6)
    directory = bucket.at(URL)
    data = max((directory / "00000006/state").rglob("d/*"), key=lambda x: x.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (directory / "00000008/state").mkdir(parents=True)  # of a process that was killed
    (directory / "00000008/run.json").write_text("{}")
    with pytest.warns(dp.CheckpointWarning) as caught:
        assert goes_on()[0] == list(range(5, 11))
    said = [str(w.message) for w in caught if w.category is dp.CheckpointWarning]
    assert "The checkpoint of step 8 in gs://bucket/runs/one is removed" in said[0]
    assert "The checkpoint of step 6 in gs://bucket/runs/one is damaged" in said[1]
    assert (directory / "00000006.damaged").is_dir()


def test_an_error_after_a_checkpoint_counts_leaves_it_there(bucket, monkeypatch):
    """As where a store takes what is written, and its answer is lost."""
    point_to = RunDirectory.point_to

    def lost(self, number):
        point_to(self, number)
        if number == 6:
            raise OSError("timed out")

    monkeypatch.setattr(RunDirectory, "point_to", lost)
    with pytest.warns(dp.CheckpointWarning, match="step 6 could not be saved.*that of step 6"):
        goes_on(6)
    monkeypatch.undo()
    store.opened(bucket, monkeypatch)
    assert problem_of(bucket.at(URL) / "00000006") is None
    assert goes_on()[0] == [7, 8, 9, 10]


def test_a_store_that_does_not_answer_ends_a_run(bucket, monkeypatch):
    """What its library raises is no OSError."""
    opens, silent = bucket.open, []

    def fails(path, mode):
        if silent and "lock" in str(path):
            raise RuntimeError("no answer")
        return opens(path, mode)

    def falls_silent(event):
        if event.step == 4:
            until_saved(bucket, 2)
            silent.append("lock")

    monkeypatch.setattr(bucket, "open", fails)
    with (
        pytest.warns(dp.CheckpointWarning, match="step 4 could not be saved.*no answer"),
        pytest.raises(dp.CheckpointError, match=r"cannot be read in gs://.*lock which.*no answer"),
    ):
        goes_on(callbacks_first=falls_silent)
    silent.clear()
    assert goes_on()[0] == list(range(3, 11))


@pytest.mark.parametrize("name", ["s3://bucket/run", "memory://run", "gs://", "file:///tmp/run"])
def test_stores_that_orbax_does_not_know_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"directory must be a path on a file system.*gs://bucket"):
        runs.trainer(name, STEP)
    with pytest.raises(ValueError, match="source must be a path"):
        dp.load_model(name, like=small_model())
    assert not list(tmp_path.iterdir())


def test_what_needs_a_file_system_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="mode 0600, which an object store does not have"):
        dp.kept_secret("gs://bucket/secret")
    with pytest.raises(ValueError, match=r"file must be a path on a file system; found 'gs://"):
        dp.save_model("gs://bucket/model.safetensors", small_model())
    assert not list(tmp_path.iterdir())
