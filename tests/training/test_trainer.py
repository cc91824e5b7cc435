"""A run shows and writes what is public, and ends where it is told to."""

import dataclasses
import json
import re

import numpy as np
import optax
import pytest

import eqx_dp as dp
from tests.training import runs
from tests.training.runs import make, released, seeded, small_model

STEP = seeded()  # compiled once for this file
PLAN = STEP.plan


def test_a_callback_ends_a_run_which_is_saved(tmp_path):
    seen = []

    def ends(event):
        seen.append((event.step, int(event.state.step), dict(event.metrics), event.epsilon))
        return event.step == 3

    state = runs.trainer(tmp_path, STEP, callbacks=[ends], save_every=100).run(small_model())
    assert seen == [(t, t, {}, None) for t in (1, 2, 3)]
    assert int(state.step) == 3
    assert released(tmp_path) == 3
    assert not (tmp_path / "metrics.jsonl").exists()  # nothing was measured, nothing is written


def test_a_run_stops_after_so_many_steps():
    for steps in (0, 3):
        assert int(runs.trainer(None, STEP).run(small_model(), steps=steps).step) == steps
    with pytest.raises(ValueError, match="steps must be at most 10"):
        runs.trainer(None, STEP).run(small_model(), steps=11)


def test_runs_of_one_trainer_with_a_seed_have_noise_of_their_own():
    step = seeded(optimizer=optax.sgd(1.0), loss=runs.zero_loss)
    trainer = runs.trainer(None, step)
    one, other = (trainer.run(small_model(), steps=1).model.weight for _ in range(2))
    assert not np.any(one == other)


def test_progress_shows_what_is_public(capsys):
    def evaluate(model):
        return {"held-out": np.float32(0.5)}

    runs.trainer(None, STEP, progress=True, evaluate=evaluate, evaluate_every=5).run(small_model())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    pattern = r"step (\d+)/10  epsilon ([\d.e+-]+)(  held-out 0\.5)?"
    for done, line in enumerate(lines, 1):
        found = re.fullmatch(pattern, line)
        assert found, line
        assert int(found[1]) == done
        assert float(found[2]) == pytest.approx(PLAN.epsilon(done), rel=1e-3)
        assert bool(found[3]) == (done % 5 == 0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (0.5, "evaluate must return a mapping of names to numbers"),
        ({"epsilon": 1.0}, r"other than step, seconds, epsilon. Found names \['epsilon'\]"),
        ({1: 1.0}, r"Found names \[1\]"),
        ({"accuracy": "good"}, r"Found a dict \(ValueError\)"),
    ],
)
def test_what_an_evaluation_may_not_return(found, message):
    with pytest.raises(ValueError, match=message):
        runs.trainer(None, STEP, evaluate=lambda model: found, evaluate_every=1).run(small_model())


def test_metrics_are_lines_behind_those_of_a_killed_process(tmp_path):
    """Half a line is ended; numbers that are not finite are null."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 3}\n{"step": 4, "se')
    evaluated = {"evaluate": lambda model: {"a": np.nan, "b": 1}, "evaluate_every": 5}
    runs.trainer(tmp_path, STEP, **evaluated).run(small_model())
    lines = file.read_text().splitlines()
    assert lines[:2] == ['{"step": 3}', '{"step": 4, "se']
    for line, step in zip(map(json.loads, lines[2:]), (5, 10), strict=True):
        found = line["step"], line["a"], line["b"], line["epsilon"]
        assert found == (step, None, 1.0, PLAN.epsilon(step))


@pytest.mark.parametrize("name", ["metrics.jsonl", "checks.json"])
def test_files_that_cannot_be_written_cost_no_run(name, tmp_path):
    (tmp_path / name).mkdir()  # as good as a full disk
    trainer = runs.trainer(tmp_path, STEP, evaluate=lambda model: {"one": 1.0})
    with pytest.warns(UserWarning, match=rf"annot be written to .*{name}|{name} cannot be written"):
        assert trainer.run(small_model()).step == 10


# What the checks say.

MIXED = dp.load_policy("mixed_bfloat16")


def checks(directory):
    return json.loads((directory / "checks.json").read_text())


def test_what_the_checks_say_is_written(tmp_path, recwarn):
    runs.trainer(tmp_path, make(policy=MIXED)).run(small_model(), steps=1)
    found = checks(tmp_path)
    assert {name: found[name]["format"] for name in found} == {
        "precision": "eqx_dp.PrecisionReport",
        "privacy": "eqx_dp.PrivacyReport",
    }
    assert found["precision"]["ok"] is found["privacy"]["ok"] is True
    assert found["precision"]["policy"] == {"name": "mixed_bfloat16", "text": str(MIXED)}
    runs.trainer(tmp_path, make()).run(small_model(), steps=2)
    assert checks(tmp_path)["precision"] is None  # no policy, nothing to hold it against
    quiet = dp.PrivacyPlan(0.25, 10, 0.0, 1e-5)
    runs.trainer(tmp_path / "quiet", make(quiet)).run(small_model(), steps=1)
    assert checks(tmp_path / "quiet") == {"precision": None, "privacy": None}
    assert not list(recwarn)


def test_a_step_that_breaks_its_plan_is_refused(tmp_path, monkeypatch):
    """With half of the noise; nothing is released, and nothing is written."""
    seen, privatizer = [], dp.PrivacyPlan.privatizer

    def less(self, grad_fn, **options):
        half = dataclasses.replace(self, noise_multiplier=self.noise_multiplier / 2)
        return privatizer(half, grad_fn, **options)

    monkeypatch.setattr(dp.PrivacyPlan, "privatizer", less)
    for directory in (None, tmp_path):
        trainer = runs.trainer(directory, make(), callbacks=[seen.append])
        with pytest.raises(ValueError, match="This step breaks its privacy declaration"):
            trainer.run(small_model())
    assert not seen
    assert not (tmp_path / "ledger").exists()


def test_a_step_that_breaks_its_policy_is_refused(tmp_path):
    """The loss multiplies in bfloat16, where the policy says float32."""

    def narrow(model, x, y):
        product = model.weight.astype("bfloat16") @ x.astype("bfloat16")
        return (product.astype("float32").sum() - y) ** 2

    step = make(policy=dp.load_policy("float32"), loss=narrow)
    with pytest.raises(ValueError, match="breaks its precision declaration"):
        runs.trainer(tmp_path, step).run(small_model())
    assert not (tmp_path / "ledger").exists()
