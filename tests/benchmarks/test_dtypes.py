"""The table of dtypes."""

import jax
import jax.numpy as jnp
import pytest

from tests.benchmarks.dtypes import Kind, is_widened, kinds, support, table


def test_each_dtype_has_a_row():
    head, *rows = table(32, 64, 1)
    assert head.split()[:2] == ["dtype", "ms"]
    assert [row.split()[0] for row in rows] == [kind.name for kind in kinds()]
    assert not jax.config.read("jax_enable_x64")


def test_conversion_is_read_off_the_compiled_program():
    def text_of(dtype, function):
        a = jax.ShapeDtypeStruct((16, 128), dtype)
        return jax.jit(function).lower(a).compile().as_text()

    wide = text_of("bfloat16", lambda a: a.astype(jnp.float32) @ a.T.astype(jnp.float32))
    assert is_widened(wide, 16, 128, "bfloat16")
    assert not is_widened(text_of("float32", lambda a: a @ a.T), 16, 128, "float32")


@pytest.mark.parametrize(
    ("name", "dtype", "ratio", "widens", "found"),
    [
        ("float32", "float32", 1.0, False, "-"),
        ("bfloat16", "bfloat16", 9.0, False, "native"),
        ("bfloat16", "bfloat16", 9.0, True, "no native support"),
        ("tensorfloat32", "float32", 1.0, False, "no native support"),
        ("float64", "float64", 0.5, False, "native"),
    ],
)
def test_support_follows_from_rate_and_program(name, dtype, ratio, widens, found):
    assert support(Kind(name, dtype), ratio, widens) == found
