"""A run shows and writes what is public, and ends where it is told to."""

import contextlib
import json
import os
import re
import signal

import numpy as np
import optax
import optax.contrib
import pytest

import eqx_dp as dp
from eqx_dp.training.checkpoint import Checkpoints
from tests.training import runs
from tests.training.runs import XS, YS, assert_agrees, assert_same, make, small_model

STEP = make()  # compiled once for this file
PLAN = STEP.plan


@pytest.fixture(autouse=True)
def untrained():
    STEP.unrecorded.steps = 0


def test_a_callback_ends_a_run_which_is_saved(tmp_path):
    seen = []

    def ends(event):
        seen.append((event.step, int(event.state.step), dict(event.metrics), event.epsilon))
        return event.step == 3

    state = runs.trainer(tmp_path, STEP, callbacks=[ends], save_every=100).run(small_model())
    assert seen == [(t, t, {}, None) for t in (1, 2, 3)]
    assert int(state.step) == 3
    assert assert_agrees(tmp_path, PLAN) == 3
    assert not (tmp_path / "metrics.jsonl").exists()  # nothing was measured, nothing is written


def test_a_run_stops_after_so_many_steps(tmp_path):
    assert int(runs.trainer(None, STEP).run(small_model(), steps=0).step) == 0
    part = runs.trainer(tmp_path, STEP).run(small_model(), steps=3)
    assert int(part.step) == 3
    assert_same(part, runs.trainer(None, STEP).run(small_model(), steps=3))
    STEP.unrecorded.steps = 0
    with pytest.raises(ValueError, match="steps must be at most 10"):
        runs.trainer(None, STEP).run(small_model(), steps=11)


@pytest.mark.parametrize("fails", [False, True])
def test_asked_to_stop_during_the_last_save(tmp_path, monkeypatch, fails):
    """It finishes the save, and its status says whether that went well."""
    commit, before = Checkpoints._commit, signal.getsignal(signal.SIGTERM)

    def asked(self, folder, number, save):
        if number:
            os.kill(os.getpid(), signal.SIGTERM)
        if number and fails:
            raise OSError("the disk is full")
        commit(self, folder, number, save)

    monkeypatch.setattr(Checkpoints, "_commit", asked)
    warned = pytest.warns(dp.CheckpointWarning) if fails else contextlib.nullcontext()
    with warned, pytest.raises(SystemExit) as caught:
        runs.trainer(tmp_path, STEP, save_every=100).run(small_model())
    assert caught.value.code == int(fails)
    assert assert_agrees(tmp_path, PLAN) == (0 if fails else 10)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_optimizer_gets_the_public_values_that_it_wants(tmp_path):
    """At every step, also of a run that is resumed: the rate falls when the value stays."""
    asked = []

    def extra(done, model):
        asked.append(done)
        return {"value": 1.0}

    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    step = make(optimizer=optax.chain(optax.sgd(0.1), plateau))
    whole = runs.trainer(None, step, extra=extra).run(small_model())
    for steps in (4, 10):
        state = runs.trainer(tmp_path, step, extra=extra).run(small_model(), steps=steps)
    assert_same(state, whole)
    assert set(range(10)) == set(asked)
    assert float(whole.opt_state[1][1].scale) < 1


def test_progress_shows_what_is_public(capsys):
    def evaluate(model):
        return {"held-out": np.float32(0.5)}

    runs.trainer(None, STEP, progress=True, evaluate=evaluate, evaluate_every=5).run(small_model())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    # There is no rate after the first step, which was compiled.
    pattern = r"step (\d+)/10(?:  [\d.e+]+ steps/s)?  epsilon ([\d.e+-]+)(  held-out 0\.5)?"
    for done, line in enumerate(lines, 1):
        found = re.fullmatch(pattern, line)
        assert found, line
        assert int(found[1]) == done
        assert ("steps/s" in line) == (done > 1)
        assert float(found[2]) == pytest.approx(PLAN.epsilon(done), rel=1e-3)
        assert bool(found[3]) == (done % 5 == 0)


def test_what_is_disclosed_is_written_each_step(tmp_path):
    runs.trainer(tmp_path, make(disclose=("num_examples",))).run(small_model(), steps=3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    sampler = make(disclose=("num_examples",)).sampler(small_model(), XS, YS)
    drawn = [int((~sampler.batch(t)[1]).sum()) for t in range(3)]
    assert [line["num_examples"] for line in lines] == drawn
    statement = json.loads((tmp_path / "privacy.json").read_text())
    assert any("num_examples of each batch" in text for text in statement["does_not_cover"])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (0.5, "evaluate must return a mapping of names to numbers"),
        ({"epsilon": 1.0}, "other than step, seconds, epsilon; found 'epsilon'"),
        ({1: 1.0}, "found a int"),
        ({"accuracy": "good"}, "found a str for 'accuracy'"),
    ],
)
def test_what_an_evaluation_may_not_return(found, said):
    with pytest.raises(ValueError, match=said):
        runs.trainer(None, STEP, evaluate=lambda model: found, evaluate_every=1).run(small_model())


def test_numbers_that_are_not_finite_are_null(tmp_path):
    runs.trainer(
        tmp_path, STEP, evaluate=lambda model: {"a": np.nan, "b": 1}, evaluate_every=1
    ).run(small_model(), steps=1)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["a"], line["b"], line["epsilon"]) == (None, 1.0, PLAN.epsilon(1))


def test_figures_go_to_tensorboard(tmp_path):
    reader = pytest.importorskip("tensorboardX.proto.event_pb2")
    board = dp.TensorBoard(tmp_path)
    runs.trainer(
        None, STEP, callbacks=[board], evaluate=lambda model: {"norm": 2.0}, evaluate_every=5
    ).run(small_model())
    (file,) = tmp_path.glob("events*")
    content, found = file.read_bytes(), []
    while content:  # length, its checksum, an event, its checksum
        size = int.from_bytes(content[:8], "little")
        event = reader.Event.FromString(content[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        content = content[12 + size + 4 :]
    expected = [
        (t, n, v) for t in (5, 10) for n, v in (("norm", 2.0), ("epsilon", PLAN.epsilon(t)))
    ]
    assert [x[:2] for x in found] == [x[:2] for x in expected]
    np.testing.assert_allclose([x[2] for x in found], [x[2] for x in expected], rtol=1e-6)


def test_metrics_that_cannot_be_written_cost_no_run(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()  # as good as a full disk
    with pytest.warns(UserWarning, match=r"Metrics cannot be written to .*metrics.jsonl"):
        state = runs.trainer(tmp_path, STEP, evaluate=lambda model: {"one": 1.0}).run(small_model())
    assert state.step == 10
