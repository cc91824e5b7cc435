"""A run in an object store is one like others: no links, no locks, no renaming."""

import json

import pytest

import eqx_dp as dp
from eqx_dp.training import CheckpointWarning
from tests.training import runs, store
from tests.training.runs import assert_same, make, released, saved, small_model

STEP = make()  # compiled once for this file
URL = "gs://bucket/runs/one"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    return store.opened(store.Bucket(tmp_path / "store"), monkeypatch)


def goes_on(steps=None, **options):
    seen = []
    callbacks = [lambda event: seen.append(event.step)]
    state = runs.trainer(URL, STEP, callbacks=callbacks, **options).run(small_model(), steps)
    return seen, state


def test_a_run_in_a_store_goes_on(bucket):
    evaluated = {"evaluate": lambda _: {"one": 1}, "evaluate_every": 1}
    assert goes_on(4, **evaluated)[0] == [1, 2, 3, 4]
    seen, state = goes_on(**evaluated)
    assert seen == [5, 6, 7, 8, 9, 10]
    directory = bucket.at(URL)
    assert released(directory) == 10
    assert saved(directory) == [6, 8, 10]
    lines = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert_same(dp.load_model(URL, like=small_model()), state.model)
    assert not [x for x in directory.rglob("*") if x.is_symlink()]


def test_damage_in_a_store_is_seen(bucket):
    goes_on(6)
    directory = bucket.at(URL)
    (directory / "checkpoints/6/state/_METADATA").write_text("{")
    with pytest.warns(CheckpointWarning, match="checkpoints/6 cannot be read"):
        assert goes_on()[0] == [7, 8, 9, 10]
    file = next((directory / "ledger").iterdir())
    file.write_text("{")
    with pytest.raises(dp.CheckpointError, match=rf"gs://.*{file.name} cannot be used"):
        goes_on()


class Dumb(store.Bucket):
    """From some step on nothing of the ledger is written; its library's error is no OSError."""

    is_dumb = False

    def written(self, path, mode):
        if self.is_dumb and "ledger" in str(path):
            raise RuntimeError("no answer")
        return super().written(path, mode)


def test_a_store_that_does_not_answer_ends_a_run(tmp_path, monkeypatch):
    """No step is taken that is not noted."""
    bucket = store.opened(Dumb(tmp_path / "store"), monkeypatch)
    trainer = runs.trainer(URL, STEP, callbacks=[lambda e: setattr(bucket, "is_dumb", e.step == 4)])
    with (
        pytest.warns(CheckpointWarning, match="cannot be written"),
        pytest.raises(dp.CheckpointError, match=r"gs://.*no answer"),
    ):
        trainer.run(small_model())
    bucket.is_dumb = False
    assert goes_on()[0] == [5, 6, 7, 8, 9, 10]
    assert released(bucket.at(URL)) == 10


@pytest.mark.parametrize("name", ["s3://bucket/run", "memory://run", "gs://", "file:///tmp/run"])
def test_stores_that_orbax_does_not_know_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"directory must be a path on a file system.*gs://bucket"):
        runs.trainer(name, STEP)
    with pytest.raises(ValueError, match="source must be a path"):
        dp.load_model(name, like=small_model())
    with pytest.raises(ValueError, match=r"file must be a path on a file system"):
        dp.save_model("gs://bucket/model.safetensors", small_model())
    assert not list(tmp_path.iterdir())
