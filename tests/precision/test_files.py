"""Policy files, presets and the schema: what they say, and every way a file can be refused."""

import json
import tomllib
from pathlib import Path

import jax
import jsonschema
import pytest

from eqx_dp import precision
from eqx_dp.precision import Policy, available_policies, load_policy, parse_policy

FOLDER = Path(__file__).parents[2] / "policies"
DTYPES = """
[dtypes]
params     = "float32"
compute    = "bfloat16"
output     = "float32"
accumulate = "float32"
noise      = "float32"
"""


@pytest.fixture
def files(tmp_path):
    def write(**contents):
        for name, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            (tmp_path / f"{name}.toml").write_bytes(data)
        return tmp_path

    return write


@pytest.fixture
def load(files):
    return lambda content: load_policy(files(mine=content) / "mine.toml")


# Presets.


def test_presets_say_what_their_names_promise():
    assert available_policies() == tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
    f32 = "float32"
    assert load_policy("mixed_bfloat16") == Policy(f32, "bfloat16", f32, f32, f32)
    assert load_policy("mixed_float16") == Policy(
        f32, "float16", f32, f32, f32, loss_scale=precision.LossScale("static", 1024)
    )
    with jax.enable_x64(True):
        for name in ("float32", "bfloat16", "float64"):
            assert load_policy(name) == parse_policy(name)
        for name in available_policies():
            policy = load_policy(name)
            assert policy.name == name
            assert policy.description
            assert not policy.unsafe
            assert parse_policy(str(policy)) == policy
    with jax.enable_x64(False), pytest.raises(ValueError, match="JAX_ENABLE_X64=1") as error:
        load_policy("float64")
    assert "float64.toml: dtypes." in str(error.value)


NEAREST = {"mixed_bf16": "mixed_bfloat16", "BFLOAT": "bfloat16", "f64": "float64"}


@pytest.mark.parametrize("name", [*NEAREST, "", ".", "..", "\u00e9"])
def test_unknown_preset_lists_the_presets_and_the_nearest(name):
    nearest = NEAREST.get(name, "")
    with pytest.raises(ValueError, match=f"preset: found .*nearest is '{nearest}") as error:
        load_policy(name)
    assert all(preset in str(error.value) for preset in available_policies())


# What tells a path from a preset's name.


def test_path_objects_separators_and_the_ending_mean_a_file(files, monkeypatch):
    folder = files(mine=DTYPES)
    monkeypatch.chdir(folder)
    (folder / "float32").write_text(DTYPES)  # a file with the name of a preset
    for path in (folder / "mine.toml", str(folder / "mine.toml"), "mine.toml", "./float32"):
        assert load_policy(path) == parse_policy("c=bf16,o=f32")
        assert load_policy(path).name == str(path)
    assert load_policy(Path("float32")) == load_policy("mine.toml")
    assert load_policy("float32") == parse_policy("float32")


@pytest.mark.parametrize(
    "path", ["nowhere/policy", "float32.toml", "/", "a\0b.toml", "folder.toml"]
)
def test_refuses_paths_without_a_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ValueError, match=r"file: found no.*; allowed: a TOML file") as error:
        load_policy(path)
    assert str(error.value).startswith(f"{path}: ")


# What a file may say.


def test_reads_every_entry(load):
    policy = load(
        """
        description = "a head in float32"
        unsafe = true
        matmul_precision = "tensorfloat32"
        dtypes.params = "bfloat16"
        dtypes.compute = "float16"
        dtypes.output = "float32"
        dtypes.accumulate = "bfloat16"
        dtypes.noise = "float16"
        loss_scale = {kind = "static", value = 0.5}
        matmul = {forward = "float8_e4m3fn", backward = "float8_e5m2", scaling = "none"}
        params.rounding = "stochastic"
        [[modules]]
        match = "**.head"
        compute = "float32"
        [[modules]]
        match = "LayerNorm"
        matmul = "wide"
        optional = true
        params = "float32"
        """
    )
    assert policy == parse_policy(
        "p=bf16,c=f16,o=f32,a=bf16,n=f16,unsafe=true,loss_scale=0.5,rounding=stochastic,"
        "matmul_precision=tensorfloat32,matmul=float8_e4m3fn:float8_e5m2:none,"
        "module:**.head=f32,module:LayerNorm=f16:wide:optional:params=f32"
    )
    assert policy.description == "a head in float32"
    assert "unsafe=True" in repr(policy)


def without(key: str) -> str:
    return "\n".join(line for line in DTYPES.splitlines() if not line.startswith(key))


def having(key: str, value: str) -> str:
    return f"{without(key)}\n{key} = {value}"


RULE = '[[modules]]\nmatch = "a"\ncompute = "float32"\n'
SCALE = '[loss_scale]\nkind = "static"\nvalue = 2\n'
MATMUL = '[matmul]\nforward = "float16"\n'


def scaled(value: str) -> str:
    return DTYPES + SCALE.replace("2", value)


# By case: what a file holds, and what the error has to say behind its name.
REFUSED = {
    # Unknown entries.
    "key": ("x = 1" + DTYPES, "x: found an unknown key; allowed: description, .*dtypes"),
    # Missing entries.
    "empty file": ("", "dtypes: found nothing; allowed: a table, which is required"),
    **{key: (without(key), f"dtypes.{key}: found nothing") for key in ("compute", "noise")},
    "no match": (DTYPES + '[[modules]]\ncompute = "float32"', r"modules\[0\].match: found nothing"),
    # Values of the wrong type.
    "number for dtype": (having("output", "32"), "dtypes.output: found 32; allowed: a string"),
    "string for table": ('dtypes = "float32"', "dtypes: found 'float32'; allowed: a table"),
    "table for tables": (DTYPES + "[modules]", r"modules: found {}; .* written as \[\[modules\]\]"),
    "string for unsafe": ('unsafe = "true"' + DTYPES, "unsafe: found 'true'; allowed: true, false"),
    # Values that are not allowed.
    "dtype": (having("noise", '"bf16"'), "dtypes.noise: found 'bf16'; allowed: bfloat16, float16"),
    "optimizer": (DTYPES + 'optimizer = "int8"', "optimizer: found 'int8'; .*second moment under"),
    "matmul": (DTYPES + MATMUL.replace("16", "32"), "matmul.forward: found 'float32'; .*float8_e4"),
}
# What follows from several entries together, or from numbers: the schema does not know.
BEYOND_A_SCHEMA = {
    "float64": (having("noise", '"float64"'), "noise: found float64 while jax_enable_x64 is off"),
    "accumulate": (having("accumulate", '"bfloat16"'), "found bfloat16, narrower.*unsafe = true"),
    "value": (scaled("3"), "loss_scale.value: found 3; allowed: a power of two"),
    "none and value": (DTYPES + SCALE.replace("static", "none"), "value: found 2; allowed: 1"),
    "pattern": (DTYPES + RULE.replace('"a"', '"a b"'), r"modules\[0\].match: found 'a b'"),
    "same rule": (DTYPES + RULE + RULE, "modules.match: found 'a' twice; allowed: each once"),
}
NO_TOML = {
    "not TOML": ("dtypes: float32", "file: found no TOML .*line 1.*; allowed: a TOML file"),
    "repeated table": (DTYPES + DTYPES, "file: found no TOML"),
    "nested lists": ("x = " + "[" * 900 + "]" * 900, "file: found no TOML .*more than 100 deep"),
    "nested tables": (f"x.{'.'.join('a' * 3_000)} = 1", "file: found no TOML .* 100 deep"),
    "not UTF-8": (b"description = '\xff'", "file: found no TOML .*utf-8.*; allowed: .*in UTF-8"),
}


# Files that extend others: the file, the one that it extends, and what the error has to say.
BASE = 'extends = "base.toml"\n'
UNSAFE = "unsafe = true" + having("noise", '"bfloat16"')
NARROW = "narrow_optimizer = true" + DTYPES + 'optimizer = "float16"'
EXTENDING = {
    "no preset": ('extends = "mixed_bf16"', "", "extends: policy preset: found 'mixed_bf16'"),
    "itself": ('extends = "top.toml"', "", "extends: found 'top.toml', which closes a circle"),
    "a circle": (BASE, 'extends = "./top.toml"', r"\(top.toml -> base.toml -> top.toml\); allowed"),
    "its own key": (BASE + "x = 1", DTYPES, "x: found an unknown key"),
    "not whole": (BASE, without("noise"), "extends .*base.toml: dtypes.noise: found nothing"),
    "unsafe is not inherited": (BASE, UNSAFE, "noise: found bfloat16, narrower than float32"),
    "nor is narrow_optimizer": (BASE, NARROW, "optimizer: found float16, narrower than float32"),
}
ALL = {**REFUSED, **BEYOND_A_SCHEMA, **NO_TOML, **EXTENDING}


@pytest.mark.parametrize("case", ALL)
def test_refuses(case, files):
    content, *base, message = ALL[case]
    path = files(top=content, base="".join(base)) / "top.toml"
    with jax.enable_x64(False), pytest.raises(ValueError, match=message) as error:
        load_policy(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("key", ["accumulate", "noise"])
def test_unsafe_lifts_the_narrow_refusals_alone(key, load):
    content = "unsafe = true\n" + having(key, '"bfloat16"')
    assert load(content).unsafe
    with pytest.raises(ValueError, match="found an unknown key"):
        load("x = 1\n" + content)


# Files that extend others.


def test_a_preset_with_one_dtype_changed(load):
    policy = load('extends = "mixed_bfloat16"\n[dtypes]\nparams = "bfloat16"')
    assert policy == parse_policy("p=bf16,c=bf16,o=f32")
    assert policy.description == ""  # that of the preset would be wrong


def test_what_holds_of_two(files):
    tables = 'params.rounding = "stochastic"\n' + DTYPES.replace("float32", "bfloat16", 1)
    of_linear = RULE.replace('"a"', '"Linear"')
    rules = RULE.replace('"a"', '"head"') + of_linear.replace("float32", "float16")
    folder = files(
        base='description = "the base"\nmatmul_precision = "highest"\n' + tables + SCALE + rules,
        middle='extends = "base.toml"\n[dtypes]\noptimizer = "bfloat16"',
        top='description = "the top"\nextends = "./middle.toml"\nnarrow_optimizer = true\n'
        'loss_scale.kind = "none"\n' + of_linear + RULE,
    )
    policy = load_policy(folder / "top.toml")
    assert policy == parse_policy(
        "p=bf16,c=bf16,o=f32,optimizer=bf16,rounding=stochastic,matmul_precision=highest,"
        "narrow_optimizer=true,module:Linear=f32,module:a=f32,module:head=f32"
    )
    assert policy.description == "the top"


def test_a_file_that_says_so_itself_may_extend_an_unsafe_one(files):
    assert load_policy(files(top="unsafe = true\n" + BASE, base=UNSAFE) / "top.toml").unsafe


# The schema, as an editor holds files against it.

SCHEMA = json.loads(precision.schema_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def test_the_schema_takes_what_is_read():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    for path in FOLDER.glob("*.toml"):
        VALIDATOR.validate(tomllib.loads(path.read_text()))
    for text in (
        *(DTYPES, DTYPES + SCALE, DTYPES + RULE, DTYPES + MATMUL, DTYPES + 'optimizer = "float64"'),
        'unsafe = true\nnarrow_optimizer = true\nmatmul_precision = "highest"' + DTYPES,
        'extends = "float32"\n[dtypes]\nparams = "bfloat16"\n[params]\nrounding = "stochastic"',
    ):
        VALIDATOR.validate(tomllib.loads(text))
    for name in SCHEMA["properties"]["matmul"]["properties"]["forward"]["enum"]:
        assert precision.Matmul(name, name, "none").backward == name


@pytest.mark.parametrize("case", {**REFUSED, **BEYOND_A_SCHEMA})
def test_the_schema_refuses_what_is_refused(case):
    content = tomllib.loads({**REFUSED, **BEYOND_A_SCHEMA}[case][0])
    assert VALIDATOR.is_valid(content) == (case in BEYOND_A_SCHEMA)
