"""The programs inside equations, and programs gone through equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_dp.programs import evaluated, interpret, literal_value

X = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)


@jax.custom_vjp
def with_backward_rule(x):
    return jnp.tanh(x)


with_backward_rule.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g / jnp.cosh(x) ** 2,))


def scan(x):
    carry, stacked = jax.lax.scan(
        lambda carry, row: (carry + X.sum() * row, jnp.sin(carry)), x[0], x, reverse=True
    )
    return carry + stacked.sum(0)


def while_loop(x):
    limit, step = x.max() + 4, x.min() - 1
    return jax.lax.while_loop(lambda y: y.sum() < limit, lambda y: y - step, x)


def cond(x):
    return jax.lax.cond(x.sum() > 0.1, lambda y: y + 1, lambda y: y @ jnp.ones((2, 2)), x)


HOLDING = {
    "jit": jax.jit(jnp.sin),
    "remat": jax.checkpoint(jnp.sin),
    "custom_jvp": jax.nn.relu,
    "custom_vjp": with_backward_rule,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
}


def run(program, inputs, of_equation=evaluated):
    return interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)


@pytest.mark.parametrize("name", HOLDING)
def test_a_program_gives_the_same_equation_by_equation(name):
    program = jax.make_jaxpr(HOLDING[name])(X)
    (found,) = run(program, [X])
    np.testing.assert_array_equal(found, HOLDING[name](X))
