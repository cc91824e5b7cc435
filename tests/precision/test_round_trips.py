"""A policy written as TOML, as JSON and as a line of text is the same policy again."""

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

from eqx_dp.precision import ModuleRule, Policy, load_policy, parse_policy
from tests.precision.test_parse_policy import RULES, SETTINGS

MORE = st.fixed_dictionaries(
    {
        "optimizer_dtype": st.none()
        | st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
        "rounding": st.sampled_from(["nearest", "stochastic"]),
        "description": st.text(max_size=12)
        | st.sampled_from(['"', "\\", "a\nb\t'''\x7f\x00", "é 🎲"]),
    }
)


@hypothesis.given(settings=SETTINGS, more=MORE, rules=RULES)
@hypothesis.settings(max_examples=150, deadline=None)
def test_every_form_reads_back(settings, more, rules, tmp_path_factory):
    with jax.enable_x64(True):
        modules = [ModuleRule(match, dtype) for match, dtype in rules]
        policy = Policy(**settings, **more, modules=modules, unsafe=True, narrow_optimizer=True)
        file = tmp_path_factory.getbasetemp() / "policy.toml"
        file.write_bytes(policy.to_toml().encode())
        of_file, of_json = load_policy(file), parse_policy(policy.to_json())
        assert of_file == of_json == parse_policy(str(policy)) == policy
        assert of_file.description == of_json.description == policy.description
        assert of_file.to_toml() == policy.to_toml()


def test_a_file_reads_back():
    with jax.enable_x64(True):
        for name in ("bfloat16", "float64", "mixed_float16"):
            policy = load_policy(name)
            assert parse_policy(policy.to_json()) == policy


def test_defaults_are_left_out():
    assert parse_policy("c=bf16,o=f32").to_toml() == (
        '[dtypes]\nparams = "float32"\ncompute = "bfloat16"\noutput = "float32"\n'
        'accumulate = "float32"\nnoise = "float32"\n'
    )
    assert str(parse_policy("c=bf16,optimizer=f32,rounding=nearest")) == str(parse_policy("c=bf16"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "text: found no JSON"),
        ("{}", "dtypes: found nothing; allowed: a table, which is required"),
        ('{"unsafe": true, "unsafe": false}', "unsafe: found a second value; .*each key once"),
        ('{"extends": "float32"}', "extends: found 'float32'; allowed: nothing"),
        ('{"dtypes": 3}', "dtypes: found 3; allowed: a table"),
        ('{"x": 3}', "x: found an unknown key; allowed: description"),
    ],
)
def test_refuses_json(text, message):
    with pytest.raises(ValueError, match=f"^policy in JSON: {message}"):
        parse_policy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optimizer=bf16",
            "dtypes.optimizer: found bfloat16, narrower than float32.*costs no priv",
        ),
        ("optimizer=f16,unsafe=true", "dtypes.optimizer: found float16, narrower"),
        (
            "optimizer=float8_e4m3fn",
            "optimizer: found 'float8_e4m3fn', in which a second moment und",
        ),
        ("optimizer=int8", "optimizer: found 'int8', in which a second moment underflows"),
        ("rounding=up", "rounding: found 'up'; allowed: nearest, stochastic"),
        ("narrow_optimizer=yes", "narrow_optimizer: found 'yes'; allowed: true, false"),
    ],
)
def test_refuses_text(text, message):
    with pytest.raises(ValueError, match=f": {message}"):
        parse_policy(text)


def test_eight_bits_of_optimizer_state_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"^dtypes.optimizer: found float8_e5m2, in which .*block"):
        Policy("float32", "float32", "float32", optimizer_dtype=jax.numpy.float8_e5m2)


def test_an_accumulate_dtype_that_is_narrow_knowingly_takes_the_optimizer_along():
    assert parse_policy("a=bf16,n=f32,unsafe=true").optimizer_dtype == "bfloat16"
