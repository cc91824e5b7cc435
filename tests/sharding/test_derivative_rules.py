"""Losses whose functions bring derivatives of their own, on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.losses import Says, mesh_of

KINDS = ["auto", "explicit"]
rng = np.random.default_rng(0)
ORDER = jnp.asarray([4, 2, 0, 1, 3])
WEIGHT = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
X = rng.normal(size=(8, 5, 4)).astype(np.float32)


def check(make_loss, kind):
    """The clipped gradient on a 4 x 2 mesh is that on one device without constraints."""
    mesh = mesh_of(kind, data=4, model=2)
    rules = dp.ShardingRules(mesh)
    options = {"l2_clip_norm": 1.0, "keep_batch_dim": True}
    on_mesh = dp.filter_clipped_grad(make_loss(Says(kind)), sharding=rules, **options)
    with jax.set_mesh(mesh):
        found = jax.jit(on_mesh)(rules.shard(WEIGHT), rules.shard_batch(X))
    alone = dp.filter_clipped_grad(make_loss(Says("auto", constrained=False)), **options)
    np.testing.assert_allclose(found, jax.jit(alone)(WEIGHT, X), rtol=1e-5, atol=1e-6)


def hidden(says, w, x):
    return says.einsum("btd,df->btf", x, w, P("data"))


def of_a_number(says):
    """`softplus(x)` is `logaddexp(x, 0)`, with a rule of its own: what is 0 knows no mesh."""
    return lambda w, x: jnp.sum(jax.nn.softplus(hidden(says, w, x)))


def that_reads_what_it_was_left(says):
    @jax.custom_vjp
    def function(x):
        return says.constrain(x**2, P("data"))

    def backward(left, cotangent):
        x, doubles = left
        return (says.constrain(2 * x * cotangent, P("data")) if doubles else x,)

    function.defvjp(lambda x: (x**2, (x, True)), backward)
    return lambda w, x: jnp.sum(function(hidden(says, w, x)))


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


def within_another(says):
    """The inner rule demands something, the outer one and the loss nothing."""

    @jax.custom_vjp
    def inner(x):
        return jnp.tanh(x)

    def backward(x, cotangent):
        return (says.constrain(3 * cotangent * jnp.cos(x), P("data")),)

    inner.defvjp(lambda x: (jnp.tanh(x), x), backward)

    @jax.custom_jvp
    def outer(x):
        return jnp.tanh(x)

    @outer.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda x: inner(2 * x), primals, tangents)

    return lambda w, x: jnp.sum(outer(hidden(says, w, x)))


def of_a_linear_system(says):
    matrix = jnp.eye(6) * 3 + 1

    def solve(b):
        solver = lambda _, b: b @ jnp.linalg.inv(matrix)  # noqa: E731
        return jax.lax.custom_linear_solve(lambda y: y @ matrix, b, solver, solver)

    return lambda w, x: jnp.sum(solve(says.constrain(hidden(says, w, x), P("data"))) ** 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make_loss",
    [
        of_a_number,
        that_reads_what_it_was_left,
        that_sees_zeros,
        with_integers,
        within_another,
        of_a_linear_system,
    ],
)
def test_a_derivative_on_a_mesh(make_loss, kind):
    check(make_loss, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cotangent_that_is_a_number(kind, unchecked):
    check(whose_cotangent_is_a_number, kind)
