"""The string form: jmp's grammar whole, a way back for every policy, and what is refused."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import strategies as st

from eqx_dp.precision import LossScale, Matmul, ModuleRule, Policy, parse_policy

NAMES = ["bf16", "bfloat16", "f16", "float16", "full", "f32", "float32", "f64", "float64", "half"]


def jmp_texts():
    """Every key spelling and presence, and every dtype name in every place."""
    yield from NAMES
    for keys in itertools.product(["", "p", "params"], ["", "c", "compute"], ["", "o", "output"]):
        present = [key for key in keys if key]
        for names in itertools.product(["bf16", "half", "f64"], repeat=len(present)):
            parts = [f"{key}={name}" for key, name in zip(present, names, strict=True)]
            yield from (",".join(order) for order in itertools.permutations(parts) if parts)
    for key, name in itertools.product(["p", "c", "o"], NAMES):
        yield f"{key}={name}"


@pytest.mark.filterwarnings("ignore:.*float16 without a loss scale")
def test_reads_all_that_jmp_reads_as_jmp_does():
    with jax.enable_x64(True):
        texts = set(jmp_texts())
        assert len(texts) > 1000
        for text in texts:
            expected, policy = jmp.get_policy(text), parse_policy(text)
            assert policy.param_dtype == jnp.dtype(expected.param_dtype), text
            assert policy.compute_dtype == jnp.dtype(expected.compute_dtype), text
            assert policy.output_dtype == jnp.dtype(expected.output_dtype), text
            wide = "float64" if policy.compute_dtype == np.dtype("float64") else "float32"
            assert policy.accumulate_dtype == policy.noise_dtype == np.dtype(wide), text
            assert parse_policy(str(expected)) == policy, text


def test_every_key():
    with jax.enable_x64(True):
        policy = parse_policy(
            "p=f64,c=bf16,o=f32,a=bf16,n=f64,loss_scale=32768,matmul_precision=highest,"
            "unsafe=true,module:**.head=f32,module:Linear=half:wide:optional,optimizer=bf16,"
            "narrow_optimizer=true,rounding=stochastic,matmul=float8_e4m3fn:float8_e5m2:none"
        )
        assert policy == Policy(
            *("float64", "bfloat16", "float32", "bfloat16", "float64"),
            modules=(
                ModuleRule("**.head", "float32"),
                ModuleRule("Linear", jmp.half_dtype(), "wide", optional=True),
            ),
            optimizer_dtype="bfloat16",
            narrow_optimizer=True,
            rounding="stochastic",
            matmul=Matmul("float8_e4m3fn", "float8_e5m2", "none"),
            loss_scale=LossScale("static", 32768),
            matmul_precision="highest",
            unsafe=True,
        )
    plain = "accumulate=f32,noise=f32,unsafe=false,matmul=none,loss_scale=none,rounding=nearest"
    assert parse_policy(plain) == parse_policy("f32")


DTYPES = st.sampled_from(["bfloat16", "float16", "float32", "float64"])
PATTERNS = st.text(min_size=1, max_size=8).filter(
    lambda text: text.isprintable() and not set(text) & set(" ,=")
) | st.sampled_from(["**.head", "layers[0].weight", "module:x", "['a']", ":", "*"])
# Exact, with their inverses, in every dtype that a policy can name.
LOSS_SCALES = st.sampled_from([LossScale("static", 2.0**power) for power in range(-14, 15)])


# Settings rather than policies: building one runs the type checker, which draws random numbers.
SETTINGS = st.fixed_dictionaries(
    {
        **{f"{stage}_dtype": DTYPES for stage in ("param", "compute", "output", "noise")},
        "accumulate_dtype": st.none() | DTYPES,
        "loss_scale": st.just(LossScale()) | LOSS_SCALES,
        "matmul_precision": st.sampled_from(["default", "tensorfloat32", "highest"]),
        "name": st.none() | st.text(max_size=3),
        "optimizer_dtype": st.none() | DTYPES,
        "rounding": st.sampled_from(["nearest", "stochastic"]),
    }
)
RULE = st.tuples(PATTERNS, DTYPES, st.none() | DTYPES)
RULES = st.lists(RULE, max_size=3, unique_by=lambda rule: rule[0])


@pytest.mark.slow
@hypothesis.given(settings=SETTINGS, rules=RULES)
@hypothesis.settings(max_examples=200, deadline=None)
def test_str_parses_back_to_an_equal_policy(settings, rules):
    with jax.enable_x64(True):
        modules = [ModuleRule(match, dtype, param_dtype=kept) for match, dtype, kept in rules]
        policy = Policy(**settings, modules=modules, unsafe=True, narrow_optimizer=True)
        again = parse_policy(str(policy))
        assert again == policy
        assert hash(again) == hash(policy)
        assert str(again) == str(policy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "dtype: found ''; allowed: .*bfloat16.*half"),
        ("banana", "dtype: found 'banana'; allowed: .*bfloat16.*half"),
        ("mixed_bfloat16", "dtype: found 'mixed_bfloat16'; allowed: .*presets: load_policy"),
        ("c=", "part: found 'c='; allowed: key=value"),
        ("p=f32,", "part: found ''; allowed: key=value"),
        ("f16,c=f32", "part: found 'f16'; allowed: key=value"),
        ("c=f16=f32", "compute: found 'f16=f32'; allowed: "),
        ("c=int8", "dtypes.compute: found 'int8'; allowed: .*bfloat16"),
        ("x=f32", r"key: found 'x'; allowed: params \(p\), compute \(c\), output \(o\), .*module"),
        ("p=f32,p=f32", "params: found a second value, 'f32'; allowed: each key once"),
        ("module:x=f32,module:x=f16", "module:x: found a second value"),
        ("module:x=f32:narrow", "module:x: .*:wide"),
        ("module:x=f32:wide:wide", "module:x: .*:wide"),
        ("module:x=f32:optional:wide", "module:x: .*:wide"),
        ("matmul=f32", "matmul.forward: found 'float32'; allowed: float8_e4m3fn"),
        ("matmul=f16:", "matmul.backward: found ''; allowed: "),
        ("matmul=f16:f16:batch", "matmul.scaling: found 'batch'; .*privacy guarantee"),
        ("loss_scale=big", "loss_scale.value: found 'big'; allowed: a number: .*power of two"),
        ("unsafe=yes", "unsafe: found 'yes'; allowed: true, false"),
        ("n=f16", "dtypes.noise: found float16, narrower than float32; .*unsafe"),
        ("module:x=f64", "module:x: found float64 while jax_enable_x64 is off"),
    ],
)
def test_refuses(text, message):
    with jax.enable_x64(False), pytest.raises(ValueError, match=message) as error:
        parse_policy(text)
    assert str(error.value).startswith(f"policy {text!r}: ")
