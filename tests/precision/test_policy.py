"""The policy value: equality, casts, defaults, and everything it refuses."""

import dataclasses
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.precision import LossScale, Matmul, ModuleRule, Policy, checked_policy

F32 = np.dtype("float32")
BF16 = jnp.dtype("bfloat16")


def test_is_a_jmp_policy_with_dtypes_in_one_spelling():
    policy = Policy(jnp.float32, "bfloat16", np.float32, np.dtype("float32"), jnp.float32)

    assert isinstance(policy, jmp.Policy)
    assert policy == Policy("float32", jnp.bfloat16, "float32")
    assert hash(policy) == hash(Policy("float32", jnp.bfloat16, "float32"))
    assert policy.with_output_dtype("bfloat16").output_dtype == BF16
    assert isinstance(policy.with_output_dtype("bfloat16"), Policy)


def test_defaults_are_never_narrower_than_float32():
    with jax.enable_x64(True):
        for compute in ("bfloat16", "float16", "float32", "float64"):
            policy = Policy("float32", compute, "float32")
            wide = np.dtype("float64" if compute == "float64" else "float32")
            assert policy.accumulate_dtype == policy.noise_dtype == wide
        assert Policy("float32", "float32", "float32", "float64").noise_dtype == np.dtype("float64")
        unsafe = Policy("float32", "bfloat16", "float32", "bfloat16", unsafe=True)
        assert unsafe.noise_dtype == F32


@pytest.mark.parametrize("verb", ["param", "compute", "output", "accumulate"])
def test_each_verb_casts_to_its_own_dtype_and_floats_alone(verb):
    dtypes = {"param": "float16", "compute": "bfloat16", "output": "float16"}
    dtypes["accumulate"] = "float32"
    policy, model = Policy(*dtypes.values()), eqx.nn.Linear(3, 2, key=jax.random.key(0))
    tree = {"model": model, "numpy": np.ones(2, np.float32), "int": jnp.arange(3)}
    tree |= {"key": jax.random.key(1), "none": None, "text": "t", "one": 1.5}
    out = getattr(policy, f"cast_to_{verb}")(tree)
    wanted = jnp.dtype(dtypes[verb])
    assert out["model"].weight.dtype == out["model"].bias.dtype == out["numpy"].dtype == wanted
    assert (out["int"].dtype, out["key"].dtype) == (tree["int"].dtype, tree["key"].dtype)
    assert (out["none"], out["text"], out["one"]) == (None, "t", 1.5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("field", ["param", "compute", "output", "accumulate", "noise"])
def test_refuses_what_is_no_float_dtype(field):
    dtypes = dict.fromkeys(["param_dtype", "compute_dtype", "output_dtype"], "float32")
    for found, told in (
        *((name, f"'{name}'") for name in ("int32", "f4", "banana", "float8_e4m3fn")),
        (bool, "'bool'"),
        (jnp.float8_e4m3fn, "'float8_e4m3fn'"),
        (np.dtype(">f4"), "'>f4'"),
        (object(), "a value of type object"),
        (jnp.ones(2), "an array of float32"),
    ):
        message = f"^dtypes.{field}s?: found {told}.*; allowed: bfloat16, float16, float32"
        with pytest.raises(ValueError, match=message):
            Policy(**{**dtypes, f"{field}_dtype": found})
    with jax.enable_x64(True):  # so that a None read as float64 would pass
        with pytest.raises(ValueError, match=r"^dtypes.params: found None; allowed: bfloat16"):
            Policy(None, "float32", "float32")
        with pytest.raises(ValueError, match=r"^modules.compute: found None; allowed: bfloat16"):
            ModuleRule("**", None)


NARROW = {
    "accumulate: found float16, narrower than float32": {"accumulate_dtype": "float16"},
    "noise: found bfloat16, narrower than float32": {"noise_dtype": "bfloat16"},
    r"accumulate: found float32, narrower than dtypes.compute \(float64\)": {
        "compute_dtype": "float64",
        "accumulate_dtype": "float32",
    },
    r"accumulate: found float32, narrower than modules.compute of 'Head'": {"modules": ["float64"]},
}


@pytest.mark.parametrize("message", NARROW)
def test_narrow_dtypes_need_unsafe(message):
    with jax.enable_x64(True):
        dtypes = {"param_dtype": "float32", "compute_dtype": "bfloat16", "output_dtype": "float32"}
        rules = [ModuleRule("Head", dtype) for dtype in NARROW[message].get("modules", ())]
        settings = dtypes | NARROW[message] | {"modules": rules}
        with pytest.raises(ValueError, match=f"^dtypes.{message}.*; allowed: .*unsafe = true"):
            Policy(**settings)
        unsafe = Policy(**settings, unsafe=True)
        assert "unsafe=True" in repr(unsafe)
        assert "unsafe=true" in str(unsafe)


@pytest.mark.parametrize("match", ["", "a b", "a,b", "a=b", "a\tb", "a\n", "\u00a0"])
def test_refuses_patterns_that_the_string_form_cannot_hold(match):
    with pytest.raises(ValueError, match=r"^modules.match: found .*; allowed: .*printable"):
        ModuleRule(match, "float32")


def test_a_loss_scale_is_a_power_of_two():
    for value in (1, 2, 32768, 0.5, 2.0**-24, 2**20):
        assert LossScale("static", value) == LossScale("static", float(value))
        assert type(LossScale("static", value).value) is float
    for value in (0, -2.0, 3, 1000, np.nan, np.inf, -np.inf, 10**400, 1 + 2**-52):
        with pytest.raises(ValueError, match=r"^loss_scale.value: found .*; .*a power of two"):
            LossScale("static", value)
    assert LossScale() == LossScale("none", 1)
    with pytest.raises(ValueError, match=r"^loss_scale.value: found 2.0; allowed: 1 where"):
        LossScale("none", 2.0)


@pytest.mark.parametrize(
    ("power", "output", "key"),
    [
        *((16, "float16", "output"), (-15, "float16", "output"), (-127, "bfloat16", "output")),
        *((127, "float32", "accumulate"), (128, "float32", "output")),  # 2^-127 is subnormal
    ],
)
def test_refuses_a_loss_scale_that_its_dtypes_do_not_hold(power, output, key):
    message = re.escape(f"found {2.0**power!r}, out of range for dtypes.{key}")
    with pytest.raises(ValueError, match=message):
        Policy("float32", "float32", output, loss_scale=LossScale("static", 2.0**power))


@pytest.mark.usefixtures("unchecked")
def test_refuses_settings_of_the_wrong_kind():
    for name, value in (
        *(("matmul_precision", "high"), ("unsafe", "false"), ("unsafe", 1), ("rounding", "up")),
        *(("loss_scale", 32768.0), ("matmul", "float16"), ("modules", [("**", "float32")])),
        *(("narrow_optimizer", 1), ("accumulate_dtype", 3)),
    ):
        with pytest.raises(ValueError, match=r"found .*; allowed: "):
            Policy("float32", "float32", "float32", **{name: value})
    with pytest.raises(ValueError, match=r"^loss_scale.kind: found 'dynamic'; .*none, static"):
        LossScale("dynamic", 2.0)


def test_the_optimizer_dtype():
    assert Policy("float32", "float32", "float32").optimizer_dtype == F32
    unsafe = Policy("float32", "bfloat16", "float32", "bfloat16", "float32", unsafe=True)
    assert unsafe.optimizer_dtype == BF16  # knowingly narrow sums take the optimizer along
    with pytest.raises(ValueError, match=r"^dtypes.optimizer: .*narrower.*costs no priv"):
        Policy("float32", "float32", "float32", optimizer_dtype="float16", unsafe=True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("scaling", ["batch", "current", "delayed", "history", None, 1, ["batch"]])
def test_a_scale_that_leaks_is_refused_with_the_reason(scaling):
    with pytest.raises(ValueError, match=r"^matmul\.scaling: found") as error:
        Matmul("float8_e4m3fn", scaling=scaling)
    assert "allowed: per_example, none; no scale that looks at other examples" in str(error.value)
    assert "the privacy guarantee would not hold" in str(error.value)


def test_float64_has_no_narrow_products():
    matmul = Matmul("float16")
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match=r"dtypes\.compute: found float64 beside"):
            Policy("float64", "float64", "float32", matmul=matmul)
        base = Policy("float32", "float32", "float32", "float64", matmul=matmul)
        assert dataclasses.replace(base, modules=[ModuleRule("a", "float64")]).modules[0].is_wide


# What would lose gradients, and is right.

WARNED = {
    "p=f32,c=f16,o=f32": "float16 without a loss scale",
    "p=f32,c=bf16,o=f32,module:head=f16": "float16 without a loss scale",
    "half": "float16 without a loss scale",
    "p=f32,c=f16,o=f32,loss_scale=1024": None,
}


@pytest.mark.parametrize(("text", "said"), WARNED.items())
def test_what_loses_gradients_gives_a_warning(text, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dp.parse_policy(text)
    assert [bool(re.search(said, str(one.message))) for one in caught] == [True] * bool(said)


# What is handed over in its place.


def test_a_policy_of_jmp_is_accepted_wherever_a_policy_is():
    given, ours = jmp.get_policy("p=f32,c=bf16,o=f32"), Policy("float32", "bfloat16", "float32")
    assert checked_policy(given) == ours
    model, x = eqx.nn.Linear(2, 2, key=jax.random.key(0)), jnp.ones((3, 2))

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, policy=given)
    assert grad_fn.policy == ours
    assert grad_fn(dp.apply_policy(model, given), x).weight.dtype == F32
    dp.gaussian_privatizer(stddev=1.0, key=0, policy=given)
    assert dp.apply_updates(model, model, given).weight.dtype == F32
    assert dp.check_precision(grad_fn, model, x, policy=given).ok
