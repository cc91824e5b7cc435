"""What a report says of a run is what the run's directory and its plan say."""

import json
import math

import pytest

import eqx_dp as dp
from eqx_dp.report import description_of
from tests.report.made import STEPS, changed, copied, trained
from tests.training import runs

PLAN = runs.plan_of()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("a run"))


@pytest.fixture
def copy(run, tmp_path):
    return copied(run, tmp_path / "copy")


def refused(directory, match):
    with pytest.raises(ValueError, match=match) as caught:
        description_of(directory)
    assert type(caught.value) is ValueError


def test_it_says_what_the_run_says(run):
    before = sorted(run.rglob("*"))
    found = description_of(run)
    assert sorted(run.rglob("*")) == before
    assert json.loads(json.dumps(found, allow_nan=False))["format"] == "eqx_dp.report"
    assert found["name"] == run.name
    assert dp.PrivacyPlan.from_json(json.dumps(found["plan"])) == PLAN
    assert found["num_examples"] == runs.NUM_EXAMPLES
    assert found["steps_released"] == STEPS
    assert found["epsilon"] == PLAN.epsilon(STEPS)
    assert found["delta"] == PLAN.delta
    assert all(epsilon == PLAN.epsilon(step) for step, epsilon in found["epsilon_over_steps"])
    assert {0, STEPS, PLAN.steps} <= {step for step, _ in found["epsilon_over_steps"]}
    statement = json.loads((run / "privacy.json").read_text())
    assert found["covers"] == statement["covers"]
    assert found["does_not_cover"] == statement["does_not_cover"]
    assert found["checks"] == json.loads((run / "checks.json").read_text())
    assert found["audit"] is None
    steps = list(range(1, STEPS + 1))
    assert found["metrics"] == {
        "accuracy": [(step, 0.5) for step in steps],
        "error": [(step, None) for step in steps],
    }
    assert found["made_by"]["eqx_dp"] == found["versions"]["eqx_dp"] == dp.__version__
    assert found["made_by"].keys() > found["versions"].keys()
    assert (found["randomness"], found["is_unsafe"], found["starts"]) == ("fresh", False, 1)


def ledger_of(directory):
    (file,) = (directory / "ledger").glob("*.json")
    return file


def test_steps_that_may_have_been_released_count(copy):
    """Those of a process that was killed, and of other starts."""
    changed(ledger_of(copy), steps=8, ended=False)
    found = description_of(copy)
    assert found["steps_released"] == 8
    assert found["epsilon"] == PLAN.epsilon(8)
    entry = json.loads(ledger_of(copy).read_text())
    second = entry | {"start": 1, "steps": 1, "randomness": "seeded", "policy": None}
    (copy / "ledger" / "another.json").write_text(json.dumps(second))
    found = description_of(copy)
    assert (found["steps_released"], found["starts"], found["randomness"]) == (9, 2, "seeded")
    assert found["policy"] is None


def test_a_run_that_has_taken_no_step(copy):
    """Its only start withdrew what it had announced: nothing was released."""
    changed(ledger_of(copy), steps=0)
    with pytest.raises(ValueError, match="no start in it has taken a step"):
        description_of(copy)


def test_a_run_without_noise(tmp_path):
    plan = dp.PrivacyPlan(0.25, 3, 0.0, 1e-5)
    runs.trainer(tmp_path, runs.make(plan)).run(runs.small_model())
    found = description_of(tmp_path)
    assert found["epsilon"] is None
    assert found["trade_off"] == [[0, 1], [1, 1]]
    assert found["epsilon_over_steps"] == [(0, 0), (1, None), (2, None), (3, None)]
    json.dumps(found, allow_nan=False)


def test_an_audit_is_taken_over_with_numbers_that_json_knows(copy):
    found = {"neighbours": {"ok": True, "moved": [{"by": math.inf}]}, "other": {"ok": False}}
    (copy / "audit.json").write_text(json.dumps(found))
    assert description_of(copy)["audit"] == {
        "neighbours": {"ok": True, "moved": [{"by": "inf"}]},
        "canaries": None,
    }


def test_lines_that_are_no_metrics_are_passed_over(copy):
    """As a run that is resumed does: half a line of a process that was killed, and others'."""
    with (copy / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 7, "accuracy": 1e999, "text": "no", "yes": true, "deep": [1]}\n')
        stream.write('{"step": 7, "huge": 1' + "0" * 400 + '}\n[]\n{"step": "8"}\n{"step": -1}\n')
        stream.write(
            "[" * 100_000 + "\nno json\n" + '{"step": 8, "accuracy": 0.75}\n{"step": 9, "a'
        )
    found = description_of(copy)["metrics"]
    assert found.keys() == {"accuracy", "error"}
    assert found["accuracy"][-2:] == [(STEPS, 0.5), (8, 0.75)]
    (copy / "metrics.jsonl").unlink()
    assert description_of(copy)["metrics"] == {}


def test_no_run(tmp_path):
    refused(tmp_path / "nowhere", "found no folder")
    refused(
        tmp_path, "it has no ledger, or no start in it has taken a step; allowed: the directory"
    )
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "found no folder")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff", '{"a": 1' + "0" * 5000])
@pytest.mark.parametrize("name", ["ledger/another.json", "checks.json", "audit.json"])
def test_files_that_are_damaged(copy, name, text):
    (copy / name).unlink(missing_ok=True)
    (copy / name).write_text(text, "latin-1")
    refused(copy, name.replace(".", r"\."))


def test_files_that_are_of_another_run_or_release(copy):
    def other(name, match, **values):
        file = copy / name
        before = file.read_text()
        changed(file, **values)
        refused(copy, match)
        file.write_text(before)

    ledger = str(ledger_of(copy).relative_to(copy))
    other(ledger, "not of format eqx_dp.ledger, version 1", version=3)
    other(ledger, "not of format eqx_dp.ledger", format="another")
    other(ledger, "its plan cannot be read: a plan in JSON must say", plan={"version": 2})
    other(ledger, "'steps' is missing", steps=-1)
    precision = json.loads((copy / "checks.json").read_text())["precision"]
    other("checks.json", "version 2; this release", precision=precision | {"version": 2})
    other("checks.json", "'privacy' must be null, or", privacy={"ok": "yes"})
    (copy / "audit.json").write_text("{}")
    other("audit.json", "'canaries' must be null, or", canaries=[])
    deep = {"ok": True}
    for _ in range(50):
        deep = {"ok": True, "deep": deep}
    other("audit.json", "nested more than 20 deep", neighbours=deep)


def test_what_is_not_there_is_not_needed(copy):
    """What follows from plan and ledger, and what was not checked."""
    (copy / "privacy.json").unlink()
    (copy / "checks.json").unlink()
    made_by = json.loads(ledger_of(copy).read_text())["made_by"]
    changed(ledger_of(copy), made_by={k: made_by[k] for k in made_by if k != "equinox"})
    found = description_of(copy)
    assert found["checks"] == {"precision": None, "privacy": None}
    assert "equinox" not in found["made_by"]
    assert found["epsilon"] == PLAN.epsilon(STEPS)
