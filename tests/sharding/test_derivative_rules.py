"""Losses whose functions bring derivatives of their own, on a mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from tests.sharding.losses import assert_like_free

ORDER = jnp.asarray([4, 2, 0, 1, 3])


def hidden(says, w, x):
    return says.einsum("btd,df->btf", x, w, P("data"))


def of_a_number(says):
    """`softplus(x)` is `logaddexp(x, 0)`, with a rule of its own: what is 0 knows no mesh."""
    return lambda w, x: jnp.sum(jax.nn.softplus(hidden(says, w, x)))


def that_sees_zeros(says):
    @jax.custom_vjp
    def both(x, y):
        return jnp.sin(x), jnp.cos(y)

    def forward(x, y):
        assert x.perturbed
        assert not y.perturbed
        return (jnp.sin(x.value), jnp.cos(y.value)), x.value

    def backward(x, cotangents):
        first, second = cotangents
        assert isinstance(second, SymbolicZero)
        return says.constrain(jnp.cos(x) * first, P("data")), None

    both.defvjp(forward, backward, symbolic_zeros=True)
    return lambda w, x: jnp.sum(both(hidden(says, w, x), x)[0])


def whose_cotangent_is_a_number(says):
    @jax.custom_vjp
    def function(x):
        return x

    function.defvjp(lambda x: (x, None), lambda _, cotangent: (3.0,))
    return lambda w, x: function(jnp.sum(hidden(says, w, x)))


def with_integers(says):
    @jax.custom_vjp
    def rows(x, order):
        return x[:, order], order + 1

    def backward(order, cotangents):
        rows, _ = cotangents
        return says.constrain(jnp.zeros_like(rows).at[:, order].add(rows), P("data")), None

    rows.defvjp(lambda x, order: (rows(x, order), order), backward)
    weights = jnp.arange(5.0)[:, None]
    return lambda w, x: jnp.sum(rows(hidden(says, w, x), ORDER)[0] * weights)


def of_a_linear_system(says):
    matrix = jnp.eye(6) * 3 + 1

    def solve(b):
        solver = lambda _, b: b @ jnp.linalg.inv(matrix)  # noqa: E731
        return jax.lax.custom_linear_solve(lambda y: y @ matrix, b, solver, solver)

    return lambda w, x: jnp.sum(solve(says.constrain(hidden(says, w, x), P("data"))) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", pytest.param("explicit", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make_loss",
    [of_a_number, that_sees_zeros, whose_cotangent_is_a_number, with_integers, of_a_linear_system],
)
def test_a_derivative_on_a_mesh(make_loss, kind, unchecked):
    assert_like_free(make_loss, kind)
