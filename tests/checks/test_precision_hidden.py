"""check_precision finds digits of a sum, or of its noise, that are lost and no dtype shows it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.lax import DotAlgorithm, DotAlgorithmPreset

import eqx_dp as dp
from eqx_dp.precision import stage

pytestmark = pytest.mark.optimized

MIXED = dp.load_policy("mixed_bfloat16")
BF16, F32 = jnp.bfloat16, jnp.float32
X = jax.ShapeDtypeStruct((4, 3), F32)
LEAF = jax.ShapeDtypeStruct((3,), F32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def summed(x):
    with stage("sum"):
        return jnp.sum(x, 0)


def found(step, policy=MIXED):
    report = dp.check_precision(step, X, KEY, policy=policy)
    assert all("test_precision_hidden.py:" in row.where for row in report.violations)
    return {(row.stage, row.declared, row.found) for row in report.violations}


def between(change):
    """What is found of a step that changes the sum before it adds noise."""
    return found(lambda x, key: change(summed(x)) + jax.random.normal(key, (3,)))


def of_noise(change):
    """What is found of a step that changes the noise before it adds it."""
    return found(lambda x, key: summed(x) + change(jax.random.normal(key, (3,))))


# Products.


def product(precision, preferred=None, matrix=None):
    def apply(g):
        numbers = ((1,), (0,)), ((), ())
        left = jnp.eye(3) if matrix is None else matrix
        made = lax.dot_general(
            left, g, numbers, precision=precision, preferred_element_type=preferred
        )
        return made.astype(F32)

    return apply


def convolution(precision):
    def apply(g):
        kernel = jnp.ones((1, 1, 1))
        return lax.conv_general_dilated(g[None, None], kernel, (1,), "SAME", precision=precision)[
            0, 0
        ]

    return apply


LESS = {
    None: "float32 at precision default (bfloat16 on accelerators)",
    "default": "float32 at precision default (bfloat16 on accelerators)",
    "high": "float32 at precision high (TensorFloat32 on accelerators)",
    ("highest", "high"): "float32 at precision high (TensorFloat32 on accelerators)",
    DotAlgorithmPreset.DEFAULT: "float32 at precision default (bfloat16 on accelerators)",
    DotAlgorithmPreset.BF16_BF16_F32: "bfloat16 by BF16_BF16_F32",
    DotAlgorithmPreset.BF16_BF16_F32_X3: "bfloat16 by BF16_BF16_F32_X3",
    DotAlgorithmPreset.TF32_TF32_F32: "TensorFloat32 by TF32_TF32_F32",
    DotAlgorithmPreset.TF32_TF32_F32_X3: "TensorFloat32 by TF32_TF32_F32_X3",
    DotAlgorithmPreset.ANY_F8_ANY_F8_F32: "float8 by ANY_F8_ANY_F8_F32",
    DotAlgorithm(F32, F32, F32): "float32 at precision default (bfloat16 on accelerators)",
}
ENOUGH = (
    "highest",
    DotAlgorithmPreset.F32_F32_F32,
    DotAlgorithmPreset.BF16_BF16_F32_X6,
    DotAlgorithmPreset.BF16_BF16_F32_X9,
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("precision", "name"), LESS.items(), ids=str)
def test_a_product_that_rounds_its_operands(precision, name):
    def over_examples(x, key):
        with stage("sum"):
            total = product(precision, matrix=jnp.ones((3, 4)))(x)[0]
        return total + jax.random.normal(key, (3,))

    assert between(product(precision)) == {("between clip and noise", "float32", name)}
    assert of_noise(product(precision)) == {("noise draw", "float32", name)}
    assert found(over_examples) == {("sum over examples", "float32", name)}


@pytest.mark.parametrize("precision", ENOUGH, ids=str)
def test_no_alarm_on_a_product_that_keeps_its_operands(precision):
    assert between(product(precision)) == of_noise(product(precision)) == set()
    with jax.default_matmul_precision("highest"):
        assert between(lambda g: jnp.eye(3) @ g) == set()


def test_a_product_that_is_asked_for_a_narrow_result():
    assert between(product("highest", BF16)) == {("between clip and noise", "float32", "bfloat16")}


def test_a_convolution_of_a_sum():
    assert between(convolution("highest")) == set()
    assert between(convolution(None)) == {("between clip and noise", "float32", LESS[None])}


def test_a_sum_of_narrow_operands_is_as_wide_as_its_result():
    def step(x, key, precision=None):
        with stage("sum"):
            ones = jnp.ones((3, 4), BF16)
            total = product(precision, F32, ones)(x.astype(BF16))[0]
        return total + jax.random.normal(key, (3,))

    cast = ("sum over examples", "float32", "bfloat16")  # of x, by the step itself
    assert found(step) == {cast}
    narrow = functools.partial(step, precision=DotAlgorithmPreset.BF16_BF16_BF16)
    assert found(narrow) == {cast, (*cast[:2], "bfloat16 by BF16_BF16_BF16")}


@pytest.mark.parametrize("precision", ["default", "tensorfloat32", "highest"])
def test_products_of_the_loss_by_algorithms(precision):
    digits = {"default": 7, "tensorfloat32": 10, "highest": 23}[precision]
    policy = dp.parse_policy(f"p=f32,c=f32,matmul_precision={precision}")

    def stages(algorithm):
        def step(x, key):
            with stage("loss"):
                x = product(algorithm, matrix=jnp.ones((4, 4)))(x)
            return summed(x) + jax.random.normal(key, (3,))

        return {(row[0], row[1]) for row in found(step, policy)}

    violation = {("forward", f"matmul_precision {precision}")}
    for algorithm, kept in (
        (DotAlgorithmPreset.ANY_F8_ANY_F8_F32, 3),
        (DotAlgorithmPreset.BF16_BF16_F32, 7),
        (DotAlgorithm(BF16, BF16, F32), 7),
        (DotAlgorithmPreset.TF32_TF32_F32, 10),
        (DotAlgorithmPreset.BF16_BF16_F32_X3, 7),
        (DotAlgorithmPreset.BF16_BF16_F32_X6, 23),
    ):
        assert stages(algorithm) == (violation if kept < digits else set())


# What nothing is known of.


def foreign(name):
    return {
        "pure_callback": lambda g: jax.pure_callback(lambda g: g, LEAF, g),
        "io_callback": lambda g: io_callback(lambda g: g, LEAF, g),
        "ffi_call": lambda g: jax.ffi.ffi_call("somewhere", LEAF)(g),
    }[name]


@pytest.mark.parametrize("name", ["pure_callback", "io_callback", "ffi_call"])
def test_what_comes_out_of_a_callback(name):
    what = f"result of {name}, of which nothing is known"
    assert between(foreign(name)) == {("between clip and noise", "float32", what)}
    assert of_noise(foreign(name)) == {("noise draw", "float32", what)}
    # After the noise, all is post-processing.
    after = lambda x, key: foreign(name)(summed(x) + jax.random.normal(key, (3,)))  # noqa: E731
    assert found(after) == set()


def test_no_alarm_on_callbacks_that_return_nothing():
    def looked_at(g):
        jax.debug.print("{}", g)
        jax.debug.callback(lambda g: None, g)
        io_callback(lambda g: None, None, g)
        return g

    assert between(looked_at) == of_noise(looked_at) == set()
