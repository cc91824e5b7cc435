"""What matrix products are multiplied in, as policies say it: files, texts, and every refusal."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp

DTYPES = "p=f32,c=bf16,o=f32"
HEAD = """
[dtypes]
params     = "float32"
compute    = "bfloat16"
output     = "float32"
accumulate = "float32"
noise      = "float32"
"""


def load(tmp_path, text):
    path = tmp_path / "policy.toml"
    path.write_text(HEAD + text)
    return dp.load_policy(path)


def test_a_file_and_a_text_say_the_same(tmp_path):
    found = load(
        tmp_path,
        """
[matmul]
forward  = "float8_e4m3fn"
backward = "float8_e5m2"
scaling  = "none"

[[modules]]
match  = "head"
matmul = "wide"

[[modules]]
match    = "**.body"
compute  = "float32"
matmul   = "wide"
optional = true
""",
    )
    text = (
        f"{DTYPES},matmul=float8_e4m3fn:float8_e5m2:none,module:head=bf16:wide,"
        "module:**.body=f32:wide:optional"
    )
    assert found == dp.parse_policy(text) == dp.parse_policy(str(found))
    assert found.matmul == dp.Matmul(jnp.float8_e4m3fn, jnp.float8_e5m2, "none")
    assert found.modules[0] == dp.ModuleRule("head", "bfloat16", "wide")


def test_defaults(tmp_path):
    (text, file) = (
        dp.parse_policy(f"{DTYPES},matmul=f16"),
        load(tmp_path, '[matmul]\nforward = "float16"'),
    )
    assert text == file == dataclasses.replace(text, matmul=dp.Matmul("float16"))
    assert file.matmul == dp.Matmul("float16", "float16", "per_example")
    assert dp.parse_policy(f"{DTYPES},matmul=none") == dp.parse_policy(DTYPES)
    assert hash(text) == hash(file)


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ("batch", "a maximum over a batch"),
        ("current", "a maximum over a batch"),
        ("delayed", "maxima over earlier steps"),
        ("history", "maxima over earlier steps"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_scale_that_leaks_is_refused_with_the_reason(scaling, reason, tmp_path):
    for make in (
        lambda: dp.Matmul("float8_e4m3fn", scaling=scaling),
        lambda: dp.parse_policy(f"{DTYPES},matmul=float8_e4m3fn:float8_e5m2:{scaling}"),
        lambda: load(tmp_path, f'[matmul]\nforward = "float16"\nscaling = "{scaling}"'),
    ):
        with pytest.raises(ValueError, match=r"matmul\.scaling: found") as error:
            make()
        assert reason in str(error.value)
        assert "allowed: per_example, none" in str(error.value)


@pytest.mark.parametrize("scaling", ["amax", "dynamic", "per_tensor", None, 1, ["batch"]])
@pytest.mark.usefixtures("unchecked")
def test_any_other_scale_is_told_what_none_may_look_at(scaling):
    with pytest.raises(ValueError, match=r"matmul\.scaling: .*allowed: .*no scale that looks at"):
        dp.Matmul("float8_e4m3fn", scaling=scaling)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[matmul]\nbackward = "float16"', "matmul.forward: found nothing.*: float8_e4m3fn,"),
        ('[matmul]\nforward = "float32"', "matmul.forward: found 'float32'"),
        ('[matmul]\nforward = "float16"\nbackward = 8', "matmul.backward: found 8"),
        ('[matmul]\nforward = "float16"\nscaling = "no"', "matmul.scaling: found 'no'"),
        ('[matmul]\nforward = "float16"\nscale = 1', "matmul.scale: found an unknown key"),
        ('[[modules]]\nmatch = "a"\nmatmul = "narrow"', r"modules\[0\].matmul: found 'narrow'"),
        ('[[modules]]\nmatch = "a"\nmatmul = "wide"\noptional = 1', r"modules\[0\].optional"),
        ('[[modules]]\nmatch = "a"\noptional = true', r"modules\[0\].compute: found nothing.*wide"),
    ],
)
def test_bad_entries_of_a_file(text, key, tmp_path):
    with pytest.raises(ValueError, match=key) as error:
        load(tmp_path, text)
    assert "policy.toml" in str(error.value)
    assert "allowed: " in str(error.value)


@pytest.mark.parametrize(
    "part",
    [
        "matmul=f32",
        "matmul=f16:f16:none:f16",
        "matmul=f16:",
        "module:a=f32:narrow",
        "module:a=f32:wide:wide",
        "module:a=f32:optional:wide",
    ],
)
def test_bad_parts_of_a_text(part):
    with pytest.raises(ValueError, match="allowed: "):
        dp.parse_policy(f"{DTYPES},{part}")


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_matmul():
    base = dp.parse_policy(DTYPES)
    with pytest.raises(ValueError, match="found 'float16'; allowed: a Matmul"):
        dataclasses.replace(base, matmul="float16")
    with pytest.raises(ValueError, match=r"modules\.optional"):
        dp.ModuleRule("a", "float32", None, 1)  # pyright: ignore[reportArgumentType]


def test_float64_has_no_narrow_products():
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match=r"dtypes\.compute: found float64 beside"):
            dp.parse_policy("p=f64,c=f64,matmul=f16")
        with pytest.raises(ValueError, match=r"modules\.compute of 'a'"):
            dp.parse_policy("p=f32,c=f32,a=f64,matmul=f16,module:a=f64")
        assert dp.parse_policy("p=f32,c=f32,a=f64,n=f64,matmul=f16,module:a=f64:wide").matmul


def test_describe_has_a_column():
    model = {"a": eqx.nn.Linear(2, 2, key=jax.random.key(0)), "b": jnp.zeros(2)}
    policy = dp.parse_policy(f"{DTYPES},matmul=float8_e4m3fn,module:a=bf16:wide")
    rows = {row.path: row.matmul for row in dp.describe(model, policy).rows}
    assert rows["a.weight"] is None
    assert rows["b"] == jnp.float8_e4m3fn
    lines = str(dp.describe(model, policy)).splitlines()
    assert lines[0].split()[:4] == ["path", "params", "compute", "matmul"]
    assert "wide" in lines[1].split()
    assert "matmul" not in str(dp.describe(model, dp.parse_policy(DTYPES))).splitlines()[0]


def test_an_optional_rule_may_match_nothing():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    dp.describe(model, dp.parse_policy(f"{DTYPES},module:head=bf16:wide:optional"))
    with pytest.raises(ValueError, match="'head', which matches no module"):
        dp.describe(model, dp.parse_policy(f"{DTYPES},module:head=bf16:wide"))
