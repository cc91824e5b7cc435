"""The policy value: equality, casts, defaults, and everything it refuses."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from eqx_dp.precision import LossScale, ModuleRule, Policy

F32 = np.dtype("float32")
BF16 = jnp.dtype("bfloat16")


def test_is_a_jmp_policy_with_dtypes_in_one_spelling():
    policy = Policy(jnp.float32, "bfloat16", np.float32, np.dtype("float32"), jnp.float32)

    assert isinstance(policy, jmp.Policy)
    assert policy == Policy("float32", jnp.bfloat16, "float32")
    assert hash(policy) == hash(Policy("float32", jnp.bfloat16, "float32"))
    for field in (
        "param_dtype",
        "compute_dtype",
        "output_dtype",
        "accumulate_dtype",
        "noise_dtype",
    ):
        assert isinstance(getattr(policy, field), np.dtype)
    assert policy.with_output_dtype("bfloat16").output_dtype == BF16
    assert isinstance(policy.with_output_dtype("bfloat16"), Policy)


@pytest.mark.parametrize(
    "change",
    [
        {"param_dtype": "bfloat16"},
        {"compute_dtype": "float16"},
        {"output_dtype": "bfloat16"},
        {"accumulate_dtype": "float64"},
        {"noise_dtype": "float64"},
        {"modules": (ModuleRule("**.head", "float32"),)},
        {"loss_scale": LossScale("static", 2.0)},
        {"matmul_precision": "highest"},
        {"unsafe": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_equality_counts_every_setting(change):
    with jax.enable_x64(True):
        policy = Policy("float32", "bfloat16", "float32")
        changed = dataclasses.replace(policy, **change)
        assert changed != policy
        assert dataclasses.replace(changed, name="mine", description="words") == changed


def test_fields_cannot_be_set():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy("float32", "float32", "float32").unsafe = True  # pyright: ignore


def test_defaults_are_never_narrower_than_float32():
    with jax.enable_x64(True):
        for compute, accumulate in [
            ("bfloat16", "float32"),
            ("float16", "float32"),
            ("float32", "float32"),
            ("float64", "float64"),
        ]:
            policy = Policy("float32", compute, "float32")
            assert policy.accumulate_dtype == np.dtype(accumulate)
            assert policy.noise_dtype == np.dtype(accumulate)
        assert Policy("float32", "float32", "float32", "float64").noise_dtype == np.dtype("float64")
        unsafe = Policy("float32", "bfloat16", "float32", "bfloat16", unsafe=True)
        assert unsafe.noise_dtype == F32


@pytest.mark.parametrize("verb", ["param", "compute", "output", "accumulate", "noise"])
def test_each_verb_casts_to_its_own_dtype_and_floats_alone(verb):
    with jax.enable_x64(True):
        # Five stages, four dtypes: every verb has a dtype that is not its neighbor's.
        policy = Policy("float16", "bfloat16", "float16", "float32", "float64")
        expected = {
            "param": "float16",
            "compute": "bfloat16",
            "output": "float16",
            "accumulate": "float32",
            "noise": "float64",
        }[verb]
        model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        tree = {
            "model": model,
            "numpy": np.ones(2, np.float32),
            "int": jnp.arange(3),
            "bool": np.ones(2, bool),
            "key": jax.random.key(1),
            "none": None,
            "text": "text",
            "python": 1.5,
        }
        out = getattr(policy, f"cast_to_{verb}")(tree)

        assert out["model"].weight.dtype == out["model"].bias.dtype == jnp.dtype(expected)
        assert out["numpy"].dtype == jnp.dtype(expected)
        assert out["int"].dtype == tree["int"].dtype
        assert out["bool"].dtype == bool
        assert out["key"].dtype == tree["key"].dtype
        assert (out["none"], out["text"], out["python"]) == (None, "text", 1.5)


def test_is_a_static_argument_of_jit():
    @eqx.filter_jit
    def cast(x, policy):
        return policy.cast_to_compute(x)

    assert cast(jnp.ones(2), Policy("float32", "bfloat16", "float32")).dtype == BF16


@pytest.mark.parametrize("field", ["param", "compute", "output", "accumulate", "noise"])
@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        ("int32", "'int32'"),
        (jnp.int8, "int8"),
        (np.uint32, "uint32"),
        (bool, "bool"),
        ("complex64", "'complex64'"),
        (jnp.complex64, "complex64"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
        (np.longdouble, str(np.dtype(np.longdouble))),
        (np.dtype(">f4"), ">f4"),
        ("f4", "'f4'"),
        ("banana", "'banana'"),
    ],
)
def test_refuses_what_is_no_float_dtype(field, dtype, found):
    dtypes = dict.fromkeys(["param_dtype", "compute_dtype", "output_dtype"], "float32")
    with pytest.raises(ValueError, match=f"^dtypes.{field}s?: found {found}; allowed: .*float32"):
        Policy(**{**dtypes, f"{field}_dtype": dtype})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [None, 3, 1.0, object()])
def test_refuses_what_is_no_dtype(dtype):
    with jax.enable_x64(True):  # so that a None read as float64 would pass
        with pytest.raises(ValueError, match=r"^dtypes.params: found .*; allowed: bfloat16"):
            Policy(dtype, "float32", "float32")
        with pytest.raises(ValueError, match=r"^modules.compute: found .*; allowed: bfloat16"):
            ModuleRule("**", dtype)


@pytest.mark.parametrize("field", ["param", "compute", "output", "accumulate", "noise"])
def test_refuses_float64_while_x64_is_off(field):
    dtypes = dict.fromkeys(["param_dtype", "compute_dtype", "output_dtype"], "float32")
    dtypes[f"{field}_dtype"] = "float64"
    with jax.enable_x64(False):
        with pytest.raises(
            ValueError, match=f"^dtypes.{field}s?: .*jax_enable_x64.*JAX_ENABLE_X64=1"
        ):
            Policy(**dtypes)
        with pytest.raises(ValueError, match=r"^modules.compute: .*jax_enable_x64"):
            ModuleRule("**", "float64")
    with jax.enable_x64(True):
        # A compute dtype of float64 takes accumulate along, so every field may be the wide one.
        assert getattr(Policy(**dtypes), f"{field}_dtype") == np.dtype("float64")


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (
            "dtypes.accumulate: found bfloat16, narrower than float32",
            {"accumulate_dtype": "bfloat16"},
        ),
        (
            "dtypes.accumulate: found float16, narrower than float32",
            {"accumulate_dtype": "float16"},
        ),
        ("dtypes.noise: found bfloat16, narrower than float32", {"noise_dtype": "bfloat16"}),
        ("dtypes.noise: found float16, narrower than float32", {"noise_dtype": "float16"}),
        (
            r"dtypes.accumulate: found float32, narrower than dtypes.compute \(float64\)",
            {"compute_dtype": "float64", "accumulate_dtype": "float32"},
        ),
        (
            r"dtypes.accumulate: found float32, narrower than modules.compute of 'Head'",
            {"modules": (("Head", "float64"),)},
        ),
    ],
)
def test_narrow_dtypes_need_unsafe(message, arguments):
    with jax.enable_x64(True):
        dtypes = {"param_dtype": "float32", "compute_dtype": "bfloat16", "output_dtype": "float32"}
        rules = [ModuleRule(*rule) for rule in arguments.get("modules", ())]
        settings = dtypes | arguments | {"modules": rules}
        with pytest.raises(ValueError, match=f"^{message}.*; allowed: .*unsafe = true"):
            Policy(**settings)
        unsafe = Policy(**settings, unsafe=True)
        assert "unsafe=True" in repr(unsafe)
        assert "unsafe=true" in str(unsafe)


def test_narrow_params_and_output_are_safe():
    policy = Policy("bfloat16", "bfloat16", "float16")
    assert not policy.unsafe
    assert "unsafe=true" not in str(policy)


@pytest.mark.parametrize("match", ["", "a b", "a,b", "a=b", "a\tb", "a\n", "\u00a0"])
def test_refuses_patterns_that_the_string_form_cannot_hold(match):
    with pytest.raises(ValueError, match=r"^modules.match: found .*; allowed: .*printable"):
        ModuleRule(match, "float32")


def test_module_rules_keep_their_order_and_come_once():
    first, second = ModuleRule("**.head", "float32"), ModuleRule("Linear", "bfloat16")
    policy = Policy("float32", "bfloat16", "float32", modules=[first, second])
    assert policy.modules == (first, second)
    assert policy != dataclasses.replace(policy, modules=(second, first))
    with pytest.raises(
        ValueError, match=r"^modules.match: found '\*\*.head' twice; allowed: each once"
    ):
        dataclasses.replace(policy, modules=(first, second, ModuleRule("**.head", "float16")))


@pytest.mark.parametrize("value", [1, 2, 32768, 0.5, 2.0**-24, 2**20])
def test_loss_scale_is_any_power_of_two(value):
    assert LossScale("static", value) == LossScale("static", float(value))
    assert type(LossScale("static", value).value) is float


@pytest.mark.parametrize(
    "value", [0, -2.0, 3, 1000, float("nan"), float("inf"), -float("inf"), 10**400, 1 + 2**-52]
)
def test_refuses_a_loss_scale_that_is_no_power_of_two(value):
    with pytest.raises(ValueError, match=r"^loss_scale.value: found .*; allowed: a power of two"):
        LossScale("static", value)


def test_no_loss_scale_is_a_scale_of_one():
    assert LossScale() == LossScale("none", 1)
    with pytest.raises(ValueError, match=r"^loss_scale.value: found 2.0; allowed: 1 where"):
        LossScale("none", 2.0)


@pytest.mark.parametrize(
    ("value", "output", "key"),
    [
        (2.0**16, "float16", "dtypes.output"),
        (2.0**-15, "float16", "dtypes.output"),
        (2.0**127, "float32", "dtypes.accumulate"),  # its inverse is subnormal
        (2.0**-127, "bfloat16", "dtypes.output"),
        (2.0**128, "float32", "dtypes.output"),
    ],
)
def test_refuses_a_loss_scale_that_its_dtypes_do_not_hold(value, output, key):
    with pytest.raises(
        ValueError,
        match=f"^{re.escape(f'loss_scale.value: found {value!r}, out of range for {key}')}",
    ):
        Policy("float32", "float32", output, loss_scale=LossScale("static", value))


def test_the_largest_loss_scales_are_exact():
    for value, output in [(2.0**15, "float16"), (2.0**-14, "float16"), (2.0**126, "float32")]:
        policy = Policy("float32", "float16", output, loss_scale=LossScale("static", value))
        assert float(jnp.asarray(value, policy.output_dtype)) == value
        assert float(jnp.asarray(1 / value, policy.accumulate_dtype)) == 1 / value


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("matmul_precision", {"matmul_precision": "high"}),
        ("unsafe", {"unsafe": "false"}),
        ("unsafe", {"unsafe": 1}),
        ("loss_scale", {"loss_scale": 32768.0}),
        ("modules", {"modules": [("**", "float32")]}),
    ],
)
def test_refuses_settings_of_the_wrong_kind(key, settings):
    with pytest.raises(ValueError, match=f"^{key}: found .*; allowed: "):
        Policy("float32", "float32", "float32", **settings)


@pytest.mark.usefixtures("unchecked")
def test_refuses_a_dynamic_loss_scale():
    with pytest.raises(
        ValueError, match=r"^loss_scale.kind: found 'dynamic'; allowed: none, static"
    ):
        LossScale("dynamic", 2.0)
