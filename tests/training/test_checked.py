"""What the checks say of a run's step is written beside the run, and never stops it."""

import dataclasses
import json
import warnings

import jax
import pytest

import eqx_dp as dp
from eqx_dp.training import checked
from tests.training import runs
from tests.training.runs import make, small_model

MIXED = dp.load_policy("mixed_bfloat16")
NARROW = dp.parse_policy("p=f32,c=bf16,a=bf16,n=f32,unsafe=true")


def checks(directory):
    return json.loads((directory / "checks.json").read_text())


def run(directory, step, steps=1):
    return runs.trainer(directory, step).run(small_model(), steps=steps)


def test_a_step_with_a_policy_is_checked_against_it(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path, make(policy=MIXED))
    found = checks(tmp_path)
    assert found.keys() == {"precision", "privacy"}
    precision = found["precision"]
    assert (precision["format"], precision["version"]) == ("eqx_dp.PrecisionReport", 1)
    assert precision["ok"] is True
    assert precision["policy"] == {"name": "mixed_bfloat16", "text": str(MIXED)}
    assert {row["kind"] for row in precision["summary"]} >= {"contraction", "draw"}


def test_without_a_policy_there_is_no_precision_to_check(tmp_path):
    run(tmp_path, make())
    assert checks(tmp_path)["precision"] is None


def test_the_privacy_of_a_step_is_checked_against_its_plan(tmp_path):
    run(tmp_path, step := make())
    privacy = checks(tmp_path)["privacy"]
    assert (privacy["format"], privacy["version"]) == ("eqx_dp.PrivacyReport", 1)
    assert privacy["ok"] is True
    assert privacy["noise_multiplier"] == pytest.approx(step.plan.noise_multiplier)


def test_without_noise_there_is_no_privacy_to_check(tmp_path):
    plan = dataclasses.replace(make().plan, noise_multiplier=0.0)
    run(tmp_path, make(plan=plan))
    assert checks(tmp_path) == {"precision": None, "privacy": None}


def test_a_step_that_is_not_private_is_a_warning(tmp_path, monkeypatch):
    def against_another(step, *args, **kwargs):
        plan = dataclasses.replace(step.plan, noise_multiplier=2 * step.plan.noise_multiplier)
        return dp.check_privacy(step, *args, plan=plan, **kwargs)

    monkeypatch.setattr(checked, "check_privacy", against_another)
    with pytest.warns(UserWarning, match="keep to its privacy: check_privacy found 1"):
        run(tmp_path, make())
    assert checks(tmp_path)["privacy"]["ok"] is False


def test_a_violation_is_a_warning_and_the_run_goes_on(tmp_path, monkeypatch):
    def against_another(*args, policy, **kwargs):
        return dp.check_precision(*args, policy=dp.load_policy("float32"), **kwargs)

    monkeypatch.setattr(checked, "check_precision", against_another)
    with pytest.warns(UserWarning, match=r"keep to its precision: check_precision found \d"):
        state = run(tmp_path, make(policy=MIXED), steps=2)
    assert int(state.step) == 2
    precision = checks(tmp_path)["precision"]
    assert precision["ok"] is False
    assert "bfloat16" in precision["violations"][0]["found"]


def test_a_check_that_fails_is_a_warning_and_the_run_goes_on(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("a primitive that nobody knows")

    monkeypatch.setattr(checked, "check_precision", fails)
    with pytest.warns(UserWarning, match="precision of this run's step could not be checked"):
        state = run(tmp_path, make(policy=MIXED))
    assert int(state.step) == 1
    assert checks(tmp_path)["precision"] is None


def test_what_cannot_be_written_is_a_warning_and_the_run_goes_on(tmp_path):
    (tmp_path / "checks.json").mkdir()
    with pytest.warns(UserWarning, match=r"checks\.json cannot be written"):
        assert int(run(tmp_path, make(policy=MIXED)).step) == 1


@pytest.mark.slow
def test_a_run_that_goes_on_as_another_program_is_checked_anew(tmp_path):
    run(tmp_path, make(policy=MIXED))
    other = dp.load_policy("float32")
    trainer = runs.trainer(tmp_path, make(policy=other), allow_changed=("policy", "loss"))
    with pytest.warns(dp.CheckpointWarning):
        trainer.run(small_model(), steps=2)
    assert checks(tmp_path)["precision"]["policy"]["name"] == "float32"


def test_a_refused_run_changes_nothing(tmp_path):
    run(tmp_path, make(policy=MIXED))
    before = checks(tmp_path)
    with pytest.raises(ValueError, match="belongs to another run"):
        run(tmp_path, make(policy=dp.load_policy("float32")))
    assert checks(tmp_path) == before


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.slow
def test_a_step_on_a_mesh_is_checked(tmp_path, kind):
    step = make(policy=MIXED, sharding=runs.rules_of(kind))
    run(tmp_path, step)
    assert checks(tmp_path)["precision"]["ok"] is True


@pytest.mark.slow
def test_the_step_is_read_as_it_was_traced(tmp_path):
    """The loss is traced no more often than it is without a policy."""
    calls = []

    def loss(model, x, y):
        calls.append(None)
        return runs.loss(model, x, y)

    def traced(directory, policy):
        calls.clear()
        jax.clear_caches()
        run(directory, make(policy=policy, loss=loss))
        return len(calls)

    without = traced(tmp_path / "without", None)
    assert traced(tmp_path / "with", dp.load_policy("float32")) == without


def test_other_hosts_check_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(checked, "is_first_host", lambda: False)
    run(tmp_path, make(policy=MIXED))
    assert not (tmp_path / "checks.json").exists()
