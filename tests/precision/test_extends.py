"""Files that extend others: what holds of the two, and what is refused."""

import pytest

from eqx_dp.precision import LossScale, ModuleRule, load_policy, parse_policy


@pytest.fixture
def files(tmp_path):
    def write(**contents):
        for name, content in contents.items():
            (tmp_path / f"{name}.toml").write_text(content)
        return tmp_path

    return write


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
WHOLE = """
[dtypes]
params = "float32"
compute = "float32"
output = "float32"
accumulate = "float32"
noise = "float32"
"""
REFUSED = {
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
        r"base.toml: extends: found './top.toml', which closes a circle \(top.toml extends -> "
        r"base.toml extends -> top.toml\); allowed: a preset",
    ),
    "number": ({"top": "extends = 3"}, "extends: found 3; allowed: a string"),
    "error of its own": (
        {"top": BASE + '[dtypes]\nnoise = "f31"', "base": WHOLE},
        "dtypes.noise: found 'f31'; allowed: bfloat16",
    ),
    "unknown key": ({"top": BASE + "x = 1", "base": WHOLE}, "x: found an unknown key"),
    "error of the base": (
        {"top": BASE, "base": WHOLE + "x = 1"},
        r"extends .*base.toml: dtypes.x: found an unknown key",
    ),
    "base is not whole": (
        {"top": BASE, "base": WHOLE.replace("noise", "# noise")},
        r"extends .*base.toml: dtypes.noise: found nothing; allowed: a string, which is required: ",
    ),
    "rule without a dtype": (
        {"top": BASE + '[[modules]]\nmatch = "a"', "base": WHOLE},
        r"modules\[0\].compute: found nothing",
    ),
    "scale without a kind": (
        {"top": BASE + "[loss_scale]\nvalue = 2", "base": WHOLE},
        "loss_scale.kind: found nothing",
    ),
    "unsafe is not inherited": (
        {
            "top": BASE,
            "base": "unsafe = true" + WHOLE.replace('noise = "float32"', 'noise = "bfloat16"'),
        },
        "dtypes.noise: found bfloat16, narrower than float32; .*unsafe = true",
    ),
    "nor is narrow_optimizer": (
        {"top": BASE, "base": "narrow_optimizer = true" + WHOLE + 'optimizer = "float16"'},
        "dtypes.optimizer: found float16, narrower than float32.*narrow_optimizer = true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case, files):
    contents, message = REFUSED[case]
    folder = files(**contents)
    with pytest.raises(ValueError, match=message) as error:
        load_policy(folder / "top.toml")
    assert str(error.value).startswith(f"{folder / 'top.toml'}: ")


def test_a_file_that_says_so_itself_may_extend_an_unsafe_one(files):
    base = "unsafe = true" + WHOLE.replace('noise = "float32"', 'noise = "bfloat16"')
    folder = files(top="unsafe = true\n" + BASE, base=base)
    assert load_policy(folder / "top.toml").unsafe
