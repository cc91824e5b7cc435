"""The JSON Schema that the package carries, against the reader of files."""

import json
import tomllib
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from eqx_dp.precision import parse_policy, schema_text
from tests.precision.test_extends import REFUSED as REFUSED_EXTENDING
from tests.precision.test_files import DTYPES, REFUSED, RULE, SCALE

SCHEMA_FILE = files("eqx_dp") / "precision" / "policy.schema.json"
VALIDATOR = jsonschema.Draft7Validator(json.loads(schema_text()))
# What follows from several entries together, or from numbers: the reader alone knows.
BEYOND_A_SCHEMA = {
    *("float64", "rule float64", "narrow accumulate", "narrow noise", "same rule", "pattern"),
    *("value", "negative", "infinite", "huge", "out of range", "none and value"),
}
NO_TOML = {"not TOML", "repeated table", "not UTF-8"}


def test_the_file_is_what_the_entries_say():
    assert SCHEMA_FILE.read_text() == schema_text(), "write it anew: eqx-dp policies --schema"
    jsonschema.Draft7Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("policies/*.toml")), ids=str)
def test_presets_are_valid(path):
    VALIDATOR.validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        DTYPES,
        DTYPES + SCALE,
        DTYPES + '[loss_scale]\nkind = "none"',
        DTYPES + RULE,
        DTYPES + '[params]\nrounding = "stochastic"',
        DTYPES + 'optimizer = "float64"',
        'unsafe = true\nnarrow_optimizer = true\nmatmul_precision = "highest"' + DTYPES,
        'extends = "float32"',
        'extends = "float32"\n[dtypes]\nparams = "bfloat16"',
    ],
)
def test_what_is_read_is_valid(text):
    VALIDATOR.validate(tomllib.loads(text))


def test_json_of_a_policy_is_valid():
    policy = parse_policy("c=f16,o=f32,loss_scale=64,rounding=stochastic,module:head=f32")
    VALIDATOR.validate(json.loads(policy.to_json()))


@pytest.mark.parametrize("case", sorted(set(REFUSED) - NO_TOML))
def test_what_is_refused_is_not_valid(case):
    content = tomllib.loads(REFUSED[case][0])
    assert VALIDATOR.is_valid(content) == (case in BEYOND_A_SCHEMA)


@pytest.mark.parametrize(
    "case",
    ["number", "error of its own", "unknown key", "rule without a dtype", "scale without a kind"],
)
def test_the_same_of_a_file_that_extends(case):
    assert not VALIDATOR.is_valid(tomllib.loads(REFUSED_EXTENDING[case][0]["top"]))
