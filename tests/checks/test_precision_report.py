"""A report as JSON says what it says otherwise."""

import json

import eqx_dp as dp
from tests.checks.test_precision_made_step import MIXED, check, made


def test_a_report_as_json():
    report = check(*made(), policy=dp.load_policy("float32"))
    assert not report.ok
    found = json.loads(report.to_json())
    assert (found["format"], found["version"]) == ("eqx_dp.PrecisionReport", 1)
    assert found["ok"] is False
    assert found["policy"] == {"name": "float32", "text": str(report.policy)}
    assert [tuple(row.values()) for row in found["violations"]] == list(report.violations)
    assert [tuple(row.values()) for row in found["summary"]] == list(report.summary)
    assert tuple(found["notes"]) == report.notes
    assert found["violations"][0].keys() == {"stage", "declared", "found", "where"}


def test_what_is_as_declared_is_ok_in_json():
    assert json.loads(check(*made(), policy=MIXED).to_json())["ok"] is True
