"""The programs inside equations, and programs gone through equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec as P

from eqx_dp.programs import (
    Call,
    Scan,
    equations,
    evaluated,
    inside,
    interpret,
    literal_value,
    matmul_flops,
    rematerialised,
    scanned,
)

X = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)


@jax.custom_vjp
def with_backward_rule(x):
    return jnp.tanh(x)


with_backward_rule.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g / jnp.cosh(x) ** 2,))


@jax.custom_batching.custom_vmap
def with_batching_rule(x):
    return x * 3


with_batching_rule.def_vmap(lambda size, is_batched, x: (x * 3, is_batched[0]))


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


def linear_solve(x):
    matrix = x.T @ x + jnp.eye(2)
    solve = lambda _, b: jnp.linalg.inv(matrix) @ b  # noqa: E731
    return jax.lax.custom_linear_solve(lambda v: matrix @ v, x[0], solve, solve)


HOLDING = {
    "jit": jax.jit(jnp.sin),
    "remat": jax.checkpoint(jnp.sin),
    "custom_jvp": jax.nn.relu,
    "custom_vjp": with_backward_rule,
    "custom_vmap": with_batching_rule,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "linear_solve": linear_solve,
}


def run(program, inputs, of_equation=evaluated):
    return interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)


@pytest.mark.parametrize("name", HOLDING)
def test_a_program_gives_the_same_equation_by_equation(name):
    program = jax.make_jaxpr(HOLDING[name])(X)
    (found,) = run(program, [X])
    np.testing.assert_array_equal(found, HOLDING[name](X))


def rebuilt(equation, inputs):
    """Every loop, branch and remat is put together again, and what it holds gone through."""
    count = jnp.zeros((), jnp.int32)

    def inner(program, inputs):
        outputs = run(program, inputs, lambda e, xs: rebuilt(e, xs))
        return outputs, count + len(program.jaxpr.eqns)

    match inside(equation):
        case Call("remat", body):
            return rematerialised(equation, lambda xs, _: inner(body, xs), inputs, None)[0]
        case Call(body=body):
            return inner(body, inputs)[0]
        case Scan() as scan:
            outputs, counts = scanned(
                equation, scan, lambda xs, given: inner(scan.body, xs), inputs, jnp.arange(3)
            )
            assert counts.shape == (scan.length,)
            return outputs
        case _:
            return evaluated(equation, inputs)


@pytest.mark.parametrize("name", HOLDING)
def test_loops_branches_and_remats_are_put_together_again(name):
    function = HOLDING[name]
    program = jax.make_jaxpr(function)(X)
    np.testing.assert_allclose(run(program, [X], rebuilt)[0], function(X), rtol=1e-6)
    if name not in ("while", "custom_vmap"):
        gradient = jax.grad(lambda x: jnp.sum(run(program, [x], rebuilt)[0] ** 2))(X)
        expected = jax.grad(lambda x: jnp.sum(function(x) ** 2))(X)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_scopes_and_lines_of_an_equation_stay():
    def named(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    program = jax.make_jaxpr(named)(X)

    def again(x):
        with jax.named_scope("outer"):
            return run(program, [x])[0]

    (equation,) = jax.make_jaxpr(again)(X).jaxpr.eqns
    assert str(equation.source_info.name_stack) == "outer/inner"


def test_flops_of_every_holder():
    w = jnp.ones((2, 2))
    product = lambda x: x @ w  # noqa: E731
    once = 2 * 3 * 2 * 2
    flops = lambda function: matmul_flops(jax.make_jaxpr(function)(X))  # noqa: E731
    assert flops(jax.checkpoint(product)) == once
    assert flops(lambda x: jax.lax.fori_loop(0, 5, lambda _, y: product(y), x)) == 5 * once
    assert flops(lambda x: jax.lax.cond(True, product, lambda y: y, x)) in (0, once)
    assert flops(lambda x: jax.lax.cond(x.sum() > 0, product, lambda y: y, x)) == once
    assert flops(lambda x: jax.lax.while_loop(lambda y: y.sum() < 1, product, x)) == once
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert flops(spread) == 2 * once  # each device does it


def test_a_literal_is_of_the_mesh_at_hand():
    mesh = jax.make_mesh((2,), ("model",))
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(jax.nn.softplus)(jnp.ones(3))
    literals = [
        literal_value(v)
        for equation in equations(program)
        for v in equation.invars
        if isinstance(v, jex_core.Literal)
    ]
    assert literals
    assert all(jax.typeof(value).sharding.mesh.empty for value in literals)
