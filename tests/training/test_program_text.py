"""The text of a program says what is computed, and nothing of where or by what name."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_dp.training.program_text import program_text


def text_of(function, *args):
    return program_text(jax.make_jaxpr(function)(*(args or (np.ones((2, 3), np.float32),))))


def branching(x):
    y = jax.lax.cond(x[0, 0] > 0, jnp.sin, jax.jit(lambda y: 2 * y), x)
    return jax.lax.while_loop(lambda y: jnp.sum(y) < 3, lambda y: y + 1, jnp.abs(y))


def calling_back(x):
    return jax.pure_callback(
        lambda y: np.asarray(y) + 1, jax.ShapeDtypeStruct((2, 3), np.float32), x
    )


def everything(x):
    key = jax.random.key(0)
    y = jax.checkpoint(jnp.tanh)(x) + jax.random.normal(key, x.shape) + calling_back(x)
    y = jax.nn.softmax(jax.nn.gelu(branching(y)) @ np.eye(3, dtype=np.float32))
    return jnp.sort(y)[:, ::-1].at[0, 0].set(7.0)


def test_nothing_of_the_process_is_in_it():
    text = text_of(everything)
    assert not re.search(r"0x[0-9a-f]{4}|object at|Mesh|Sharding|CpuDevice|\.py\b", text)
    assert text == text_of(everything)
    assert text == text_of(jax.jit(everything))
    assert text == text_of(lambda x: jax.jit(lambda y: jax.jit(everything)(y))(x))


def test_names_do_not_matter():
    def one(x):
        first = x + 1
        return first * first

    def other(value):
        named_otherwise = value + 1
        return named_otherwise * named_otherwise

    assert text_of(one) == text_of(other)


CONSTANT = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1.0, lambda x: x + 1.5),
        (lambda x: x + 1, lambda x: x - 1),
        (lambda x: x - x[0, 0], lambda x: x[0, 0] - x),
        (lambda x: x + CONSTANT, lambda x: x + (CONSTANT + 1)),
        (lambda x: x + jnp.asarray(CONSTANT), lambda x: x + jnp.asarray(CONSTANT + 1)),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float16)),
        (
            lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, None, 3)[0],
            lambda x: jax.lax.scan(lambda c, _: (c + 2, None), x, None, 3)[0],
        ),
        (
            lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, None, 3)[0],
            lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, None, 4)[0],
        ),
        (lambda x: jax.nn.relu(x), lambda x: jnp.maximum(x, 0)),  # their derivatives at 0 differ
        (lambda x: (x, 2 * x), lambda x: (2 * x, x)),
        (
            lambda x: x + jax.random.normal(jax.random.key(0), (3,)),
            lambda x: x + jax.random.normal(jax.random.key(1), (3,)),
        ),
    ],
)
def test_what_differs_reads_differently(one, other):
    assert text_of(one) != text_of(other)
    assert text_of(jax.jit(one)) != text_of(jax.jit(other))


def test_shapes_and_dtypes_of_inputs_matter_and_values_do_not():
    def double(x):
        return x * 2

    usual = text_of(double, np.ones(3, np.float32))
    assert usual == text_of(double, jnp.zeros(3))
    assert usual != text_of(double, np.ones(4, np.float32))
    assert usual != text_of(double, np.ones(3, np.int32))


def ruled(forward, backward):
    @jax.custom_vjp
    def function(x):
        return x

    function.defvjp(forward, backward)
    return function


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_derivative_rules_are_read(kind):
    def function(factor):
        if kind == "custom_vjp":
            return ruled(lambda x: (x, None), lambda _, c: (factor * c,))
        function = jax.custom_jvp(lambda x: x)
        function.defjvp(lambda primals, tangents: (function(*primals), factor * tangents[0]))
        return function

    assert text_of(function(2.0)) == text_of(function(2.0))
    assert text_of(function(2.0)) != text_of(function(3.0))


def test_a_rule_that_cannot_be_traced_is_told_by_its_name():
    def failing(_, cotangent):
        raise RuntimeError("not here")

    text = text_of(ruled(lambda x: (x, None), failing))
    assert "custom_vjp_call" in text
    assert text == text_of(ruled(lambda x: (x, None), failing))


def test_constants_that_are_traced_enter_by_their_shape():
    texts = []

    @jax.jit
    def outer(x, y):
        texts.append(program_text(jax.make_jaxpr(lambda z: z + x)(y)))
        return y

    outer(jnp.ones(3), jnp.ones(3))
    assert "float32[3]" in texts[0]
