"""Policy files and presets: what they say, and every way a file can be refused."""

import json
import tomllib
from pathlib import Path

import jax
import jsonschema
import pytest

from eqx_dp.precision import (
    LossScale,
    Matmul,
    ModuleRule,
    Policy,
    available_policies,
    load_policy,
    parse_policy,
    schema_text,
)

PRESETS = (
    *("bfloat16", "float32", "float64", "mixed_bfloat16", "mixed_float16"),
    *("mixed_float8", "mixed_float8_wide_heads"),
)

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
            (tmp_path / f"{name}.toml").write_text(content)
        return tmp_path

    return write


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "mine.toml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


# Presets.


def test_available_policies_are_the_files_of_the_folder():
    folder = Path(__file__).parents[2] / "policies"
    assert available_policies() == tuple(sorted(path.stem for path in folder.glob("*.toml")))
    assert set(PRESETS) <= set(available_policies())


def test_presets_say_what_their_names_promise():
    float32, half = "float32", "float16"
    assert load_policy("float32") == parse_policy("float32")
    assert load_policy("bfloat16") == parse_policy("bfloat16")
    assert load_policy("mixed_bfloat16") == Policy(float32, "bfloat16", float32, float32, float32)
    assert load_policy("mixed_float16") == Policy(
        float32, half, float32, float32, float32, loss_scale=LossScale("static", 1024)
    )
    with jax.enable_x64(True):
        assert load_policy("float64") == parse_policy("float64")


def test_every_preset_is_safe_named_described_and_parses_back():
    with jax.enable_x64(True):
        for name in available_policies():
            policy = load_policy(name)
            assert policy.name == name
            assert policy.description
            assert not policy.unsafe
            assert parse_policy(str(policy)) == policy


def test_float64_preset_needs_x64():
    with jax.enable_x64(False), pytest.raises(ValueError, match="JAX_ENABLE_X64=1") as error:
        load_policy("float64")
    assert "float64.toml: dtypes." in str(error.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("mixed_bf16", "mixed_bfloat16"),
        ("BFLOAT", "bfloat16"),
        ("mixed-float16", "mixed_float16"),
        ("f64", "float64"),
    ],
)
def test_unknown_preset_lists_the_presets_and_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"found {name!r}.*nearest is {nearest!r}") as error:
        load_policy(name)
    for preset in available_policies():
        assert preset in str(error.value)


def test_a_text_for_parse_policy_is_told_so():
    with pytest.raises(ValueError, match=r"found 'p=f32,c=bf16'.*\(parse_policy reads such a text"):
        load_policy("p=f32,c=bf16")


@pytest.mark.parametrize("name", ["", ".", "..", "\u00e9"])
def test_senseless_names_are_unknown_presets(name):
    with pytest.raises(ValueError, match=r"policy preset: found .*nearest"):
        load_policy(name)


# What tells a path from a preset's name.


def test_path_objects_separators_and_the_ending_mean_a_file(write, monkeypatch):
    path = write(DTYPES)
    monkeypatch.chdir(path.parent)
    (path.parent / "float32").write_text(DTYPES)  # a file with the name of a preset

    assert load_policy(path) == load_policy(str(path)) == parse_policy("c=bf16,o=f32")
    assert load_policy(path).name == str(path)
    assert load_policy("mine.toml").name == "mine.toml"
    assert load_policy("./float32") == load_policy(Path("float32")) == load_policy(path)
    assert load_policy("float32") == parse_policy("float32")


@pytest.mark.parametrize(
    "path", ["nowhere/policy", "nowhere.toml", "float32.toml", "/", "a\0b.toml"]
)
def test_refuses_paths_without_a_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"file: found no.*; allowed: a TOML file") as error:
        load_policy(path)
    assert str(error.value).startswith(f"{path}: ")


def test_refuses_a_directory(tmp_path):
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(ValueError, match="file: found nothing to read") as error:
        load_policy(folder)
    assert str(error.value).startswith(f"{folder}: ")


# What a file may say.


def test_reads_every_entry(write):
    path = write(
        """
        description = "a head in float32"
        unsafe = true
        matmul_precision = "tensorfloat32"
        dtypes.params = "bfloat16"
        dtypes.compute = "float16"
        dtypes.output = "float32"
        dtypes.accumulate = "bfloat16"
        dtypes.noise = "float16"
        [loss_scale]
        kind = "static"
        value = 0.5
        [[modules]]
        match = "**.head"
        compute = "float32"
        [[modules]]
        match = "LayerNorm"
        matmul = "wide"
        optional = true
        [matmul]
        forward = "float8_e4m3fn"
        backward = "float8_e5m2"
        scaling = "none"
        [params]
        rounding = "stochastic"
        """
    )
    policy = load_policy(path)
    assert policy == Policy(
        "bfloat16",
        "float16",
        "float32",
        "bfloat16",
        "float16",
        modules=(
            ModuleRule("**.head", "float32"),
            ModuleRule("LayerNorm", "float16", "wide", optional=True),
        ),
        loss_scale=LossScale("static", 0.5),
        matmul_precision="tensorfloat32",
        unsafe=True,
        rounding="stochastic",
        matmul=Matmul("float8_e4m3fn", "float8_e5m2", "none"),
    )
    assert policy.description == "a head in float32"
    assert "unsafe=True" in repr(policy)


def test_optional_entries_default(write):
    policy = load_policy(write(DTYPES.replace("\n", "\r\n")))
    assert policy == Policy("float32", "bfloat16", "float32")
    assert policy.description == ""
    assert load_policy(write(DTYPES + '[loss_scale]\nkind = "none"')) == policy
    assert load_policy(write(DTYPES + '[loss_scale]\nkind = "none"\nvalue = 1')) == policy
    assert load_policy(write("unsafe = false\nmodules = []" + DTYPES)) == policy


def without(key: str) -> str:
    return "\n".join(line for line in DTYPES.splitlines() if not line.startswith(key))


def with_dtype(key: str, value: str) -> str:
    return f"{without(key)}\n{key} = {value}"


RULE = '[[modules]]\nmatch = "a"\ncompute = "float32"\n'
MATMUL = '[matmul]\nforward = "float16"\n'
SCALE = '[loss_scale]\nkind = "static"\nvalue = 2\n'
DTYPE_NAMES = "allowed: bfloat16, float16, float32, float64"

REFUSED = {
    # Unknown entries.
    "unknown key": ("x = 1" + DTYPES, "x: found an unknown key; allowed: description, .*dtypes"),
    "unknown dtypes key": (DTYPES + "acc = 1", "dtypes.acc: found an unknown key; allowed: params"),
    "unknown scale key": (DTYPES + SCALE + "x = 1", "loss_scale.x: found an unknown key; .*kind"),
    "unknown rule key": (DTYPES + RULE + 'output = ""', r"modules\[0\].output: found an unknown"),
    "second rule": (DTYPES + RULE + RULE + "x = 1", r"modules\[1\].x: found an unknown key"),
    "empty key": ('"" = 1' + DTYPES, ": found an unknown key"),
    "unknown table": (DTYPES + "[sharding]", "sharding: found an unknown table; allowed: .*dtypes"),
    "unknown tables": (DTYPES + "[[rules]]", "rules: found an unknown table; allowed: .*modules"),
    "nested table": (DTYPES + "[dtypes.x]", "dtypes.x: found an unknown table; allowed: params"),
    "table in scale": (DTYPES + SCALE + "[loss_scale.x]", "loss_scale.x: found an unknown table"),
    "table in rule": (DTYPES + RULE + "[modules.x]", r"modules\[0\].x: found an unknown table"),
    "typo": (DTYPES.replace("noise", "niose"), "dtypes.niose: found an unknown key; .*noise"),
    # Missing entries.
    "empty file": ("", "dtypes: found nothing; allowed: a table, which is required"),
    "no dtypes": (SCALE, "dtypes: found nothing; allowed: a table"),
    "no params": (without("params"), "dtypes.params: found nothing; allowed: a string"),
    "no compute": (without("compute"), "dtypes.compute: found nothing"),
    "no output": (without("output"), "dtypes.output: found nothing"),
    "no accumulate": (without("accumulate"), "dtypes.accumulate: found nothing"),
    "no noise": (without("noise"), "dtypes.noise: found nothing"),
    "no kind": (DTYPES + "[loss_scale]\nvalue = 2", "loss_scale.kind: found nothing"),
    "no value": (DTYPES + '[loss_scale]\nkind = "static"', "loss_scale.value: found nothing"),
    "no match": (DTYPES + '[[modules]]\ncompute = "float32"', r"modules\[0\].match: found nothing"),
    "no rule dtype": (
        DTYPES + '[[modules]]\nmatch = "a"',
        r"modules\[0\].compute: found nothing.*wide",
    ),
    # Dtypes.
    "unknown dtype": (with_dtype("noise", '"f31"'), f"dtypes.noise: found 'f31'; {DTYPE_NAMES}"),
    "short dtype": (with_dtype("noise", '"bf16"'), f"dtypes.noise: found 'bf16'; {DTYPE_NAMES}"),
    "integer dtype": (
        with_dtype("params", '"int8"'),
        f"dtypes.params: found 'int8'; {DTYPE_NAMES}",
    ),
    "rule dtype": (
        DTYPES + RULE.replace("float32", "int8"),
        rf"modules\[0\].compute: found 'int8'; {DTYPE_NAMES}",
    ),
    "float64": (with_dtype("noise", '"float64"'), "dtypes.noise: found float64 while jax_enable_x"),
    "rule float64": (
        DTYPES + RULE.replace("float32", "float64"),
        r"modules\[0\].compute: found float64 while jax_enable_x64 is off; .*JAX_ENABLE_X64=1",
    ),
    "narrow accumulate": (
        with_dtype("accumulate", '"bfloat16"'),
        "dtypes.accumulate: found bfloat16, narrower than float32; allowed: .*unsafe = true",
    ),
    "narrow noise": (
        with_dtype("noise", '"float16"'),
        "dtypes.noise: found float16, narrower than float32; allowed: .*unsafe = true",
    ),
    # Values of the wrong type.
    "number for dtype": (with_dtype("output", "32"), "dtypes.output: found 32; allowed: a string"),
    "list for dtype": (with_dtype("output", '["a"]'), r"dtypes.output: found \['a'\]; .*a string"),
    "date for dtype": (with_dtype("output", "2020-01-01"), "dtypes.output: found .*; .*a string"),
    "string for table": ('dtypes = "float32"', "dtypes: found 'float32'; allowed: a table"),
    "tables for table": ("[[dtypes]]", r"dtypes: found \[{}\]; allowed: a table"),
    "table for tables": (DTYPES + "[modules]", r"modules: found {}; .* written as \[\[modules\]\]"),
    "strings for tables": ('modules = ["a"]' + DTYPES, r"modules\[0\]: found 'a'; .*a table"),
    "number for rule": (
        DTYPES + RULE.replace('"a"', "1"),
        r"modules\[0\].match: found 1; allowed: a string",
    ),
    "number for scale": ("loss_scale = 2" + DTYPES, "loss_scale: found 2; allowed: a table"),
    "bool for value": (
        DTYPES + SCALE.replace("2", "true"),
        "loss_scale.value: found True; allowed: a number",
    ),
    "string for value": (
        DTYPES + SCALE.replace("2", '"2"'),
        "loss_scale.value: found '2'; allowed: a number",
    ),
    "bool for kind": (
        DTYPES + SCALE.replace('"static"', "true"),
        "loss_scale.kind: found True; allowed: a string",
    ),
    "number for unsafe": ("unsafe = 1" + DTYPES, "unsafe: found 1; allowed: true, false"),
    "string for unsafe": ('unsafe = "true"' + DTYPES, "unsafe: found 'true'; allowed: true, false"),
    "number for precision": (
        "matmul_precision = 1" + DTYPES,
        "matmul_precision: found 1; .*string",
    ),
    "number for description": ("description = 1" + DTYPES, "description: found 1; .*a string"),
    "number for rule's optional": (
        DTYPES + RULE + "optional = 1",
        r"modules\[0\].optional: found 1",
    ),
    "number for backward": (DTYPES + MATMUL + "backward = 8", "matmul.backward: found 8; .*string"),
    # Values that are not allowed.
    "matmul": (DTYPES + MATMUL.replace("16", "32"), "matmul.forward: found 'float32'; .*float8_e4"),
    "no forward": (DTYPES + '[matmul]\nscaling = "none"', "matmul.forward: found nothing.*float8_"),
    "scaling": (
        DTYPES + MATMUL + 'scaling = "delayed"',
        "matmul.scaling: found 'delayed'; allowed: per_example, none; .*privacy guarantee",
    ),
    "rule's matmul": (DTYPES + RULE + 'matmul = "narrow"', r"modules\[0\].matmul: found 'narrow'"),
    "rounding": (DTYPES + '[params]\nrounding = "up"', "params.rounding: found 'up'; .*stochastic"),
    "optimizer": (
        DTYPES + 'optimizer = "int8"',
        "dtypes.optimizer: found 'int8'; .*second moment underflows",
    ),
    "precision": (
        'matmul_precision = "high"' + DTYPES,
        "matmul_precision: found 'high'; .*highest",
    ),
    "kind": (
        DTYPES + SCALE.replace("static", "dynamic"),
        "loss_scale.kind: found 'dynamic'; .*none",
    ),
    "value": (
        DTYPES + SCALE.replace("2", "3"),
        "loss_scale.value: found 3; allowed: a power of two",
    ),
    "negative": (DTYPES + SCALE.replace("2", "-2"), "loss_scale.value: found -2; allowed: a power"),
    "infinite": (
        DTYPES + SCALE.replace("2", "inf"),
        "loss_scale.value: found inf; .*a power of two",
    ),
    "huge": (
        DTYPES + SCALE.replace("2", "1" + "0" * 400),
        "loss_scale.value: found a whole number beyond 2.64; .*power",
    ),
    "out of range": (DTYPES + SCALE.replace("2", str(2**128)), "loss_scale.value: .*out of range"),
    "none and value": (
        DTYPES + SCALE.replace("static", "none"),
        "loss_scale.value: found 2; allowed: 1 where",
    ),
    "pattern": (DTYPES + RULE.replace('"a"', '"a b"'), r"modules\[0\].match: found 'a b'"),
    "same rule": (DTYPES + RULE + RULE, "modules.match: found 'a' twice; allowed: each once"),
    # No TOML.
    "not TOML": ("dtypes: float32", "file: found no TOML .*line 1.*; allowed: a TOML file"),
    "repeated table": (DTYPES + DTYPES, "file: found no TOML"),
    "not UTF-8": (b"description = '\xff'", "file: found no TOML .*utf-8.*; allowed: .*in UTF-8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case, write):
    content, message = REFUSED[case]
    path = write(content)
    with jax.enable_x64(False), pytest.raises(ValueError, match=message) as error:
        load_policy(path)
    assert str(error.value).startswith(f"{path}: ")


def test_refuses_accumulate_narrower_than_compute(write):
    path = write(with_dtype("compute", '"float64"'))
    with (
        jax.enable_x64(True),
        pytest.raises(
            ValueError, match=r"dtypes.accumulate: found float32, narrower than"
        ) as error,
    ):
        load_policy(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "content",
    [
        with_dtype("accumulate", '"bfloat16"'),
        with_dtype("noise", '"float16"'),
        with_dtype("compute", '"float64"'),
    ],
)
def test_unsafe_lifts_the_narrow_refusals_alone(content, write):
    with jax.enable_x64(True):
        policy = load_policy(write("unsafe = true\n" + content))
        assert policy.unsafe
        assert "unsafe=true" in str(policy)
        with pytest.raises(ValueError, match="found an unknown key"):
            load_policy(write("unsafe = true\nx = 1\n" + content))


# Files that extend others.


def test_a_preset_with_one_dtype_changed(files):
    folder = files(mine='extends = "mixed_bfloat16"\n[dtypes]\nparams = "bfloat16"')
    policy = load_policy(folder / "mine.toml")
    assert policy == parse_policy("p=bf16,c=bf16,o=f32")
    assert policy.description == ""  # that of the preset would be wrong
    assert policy.name == str(folder / "mine.toml")


def test_what_holds_of_two(files):
    folder = files(
        base="""
            description = "the base"
            matmul_precision = "highest"
            [dtypes]
            params = "bfloat16"
            compute = "float16"
            output = "float32"
            accumulate = "float32"
            noise = "float32"
            [params]
            rounding = "stochastic"
            [loss_scale]
            kind = "static"
            value = 64
            [[modules]]
            match = "head"
            compute = "float32"
            [[modules]]
            match = "Linear"
            compute = "bfloat16"
            """,
        middle='extends = "base.toml"\n[dtypes]\noptimizer = "bfloat16"',
        top="""
            description = "the top"
            extends = "./middle.toml"
            narrow_optimizer = true
            [loss_scale]
            kind = "none"
            [[modules]]
            match = "Linear"
            compute = "float32"
            [[modules]]
            match = "norm"
            compute = "float32"
            """,
    )
    policy = load_policy(folder / "top.toml")
    expected = parse_policy(
        "p=bf16,c=f16,o=f32,optimizer=bf16,rounding=stochastic,matmul_precision=highest,"
        "narrow_optimizer=true,module:Linear=f32,module:norm=f32,module:head=f32"
    )
    assert policy == expected
    assert policy.description == "the top"
    assert policy.loss_scale == LossScale()
    assert policy.modules[0] == ModuleRule("Linear", "float32")


BASE = 'extends = "base.toml"\n'
REFUSED_EXTENDING = {
    "no preset": (
        {"top": 'extends = "mixed_bf16"'},
        "extends: policy preset: found 'mixed_bf16'; allowed: .*nearest is 'mixed_bfloat16'",
    ),
    "no file": ({"top": BASE}, "extends .*base.toml: file: found nothing to read"),
    "itself": (
        {"top": 'extends = "top.toml"'},
        "extends: found 'top.toml', which closes a circle",
    ),
    "a circle": (
        {"top": BASE, "base": 'extends = "./top.toml"'},
        r"base.toml: extends: found './top.toml', which closes a circle "
        r"\(top.toml -> base.toml -> top.toml\); allowed: a preset",
    ),
    "number": ({"top": "extends = 3"}, "extends: found 3; allowed: a string"),
    "error of its own": (
        {"top": BASE + '[dtypes]\nnoise = "f31"', "base": DTYPES},
        "dtypes.noise: found 'f31'; allowed: bfloat16",
    ),
    "unknown key": ({"top": BASE + "x = 1", "base": DTYPES}, "x: found an unknown key"),
    "error of the base": (
        {"top": BASE, "base": DTYPES + "x = 1"},
        r"extends .*base.toml: dtypes.x: found an unknown key",
    ),
    "base is not whole": (
        {"top": BASE, "base": without("noise")},
        r"extends .*base.toml: dtypes.noise: found nothing; allowed: a string, which is required: ",
    ),
    "rule without a dtype": (
        {"top": BASE + '[[modules]]\nmatch = "a"', "base": DTYPES},
        r"modules\[0\].compute: found nothing",
    ),
    "scale without a kind": (
        {"top": BASE + "[loss_scale]\nvalue = 2", "base": DTYPES},
        "loss_scale.kind: found nothing",
    ),
    "unsafe is not inherited": (
        {
            "top": BASE,
            "base": "unsafe = true" + with_dtype("noise", '"bfloat16"'),
        },
        "dtypes.noise: found bfloat16, narrower than float32; .*unsafe = true",
    ),
    "nor is narrow_optimizer": (
        {"top": BASE, "base": "narrow_optimizer = true" + DTYPES + 'optimizer = "float16"'},
        "dtypes.optimizer: found float16, narrower than float32.*narrow_optimizer = true",
    ),
}


@pytest.mark.parametrize("case", REFUSED_EXTENDING)
def test_refuses_files_that_extend(case, files):
    contents, message = REFUSED_EXTENDING[case]
    folder = files(**contents)
    with pytest.raises(ValueError, match=message) as error:
        load_policy(folder / "top.toml")
    assert str(error.value).startswith(f"{folder / 'top.toml'}: ")


def test_a_file_that_says_so_itself_may_extend_an_unsafe_one(files):
    base = "unsafe = true" + with_dtype("noise", '"bfloat16"')
    folder = files(top="unsafe = true\n" + BASE, base=base)
    assert load_policy(folder / "top.toml").unsafe


# The schema, as an editor holds files against it.

SCHEMA = json.loads(schema_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
# What follows from several entries together, or from numbers: the reader alone knows.
BEYOND_A_SCHEMA = {
    *("float64", "rule float64", "narrow accumulate", "narrow noise", "same rule", "pattern"),
    *("value", "negative", "infinite", "huge", "out of range", "none and value"),
}
NO_TOML = {"not TOML", "repeated table", "not UTF-8"}


def test_the_schema_is_one_and_names_what_the_code_allows():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    entries = SCHEMA["properties"]
    kinds = {
        dtype["enum"] == ["bfloat16", "float16", "float32", "float64"]
        for dtype in entries["dtypes"]["properties"].values()
    }
    assert kinds == {True}
    for name in entries["matmul"]["properties"]["forward"]["enum"]:
        assert Matmul(name, name, "none").backward == name


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
