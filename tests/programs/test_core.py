"""The programs inside equations, and programs gone through equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec as P

from eqx_dp.programs import (
    Call,
    Cond,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    equations,
    evaluated,
    inside,
    interpret,
    literal_value,
    programs_of,
    rematerialised,
    scanned,
    settled,
)
from eqx_dp.programs.inside import HOLDERS
from eqx_dp.programs.operations import matmul_flops

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


def shard_map(x):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P(None, "model")
    return jax.shard_map(lambda y: y * 2, mesh=mesh, in_specs=spec, out_specs=spec)(x)


HOLDING = {
    "jit": (jax.jit(jnp.sin), Call),
    "remat": (jax.checkpoint(jnp.sin), Call),
    "custom_jvp": (jax.nn.relu, Call),
    "custom_vjp": (with_backward_rule, Call),
    "custom_vmap": (with_batching_rule, Call),
    "scan": (scan, Scan),
    "while": (while_loop, While),
    "cond": (cond, Cond),
    "linear_solve": (linear_solve, LinearSolve),
}


def equation_of(function, kind, *inputs):
    """The one equation of a kind, wherever it stands."""

    def find(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for held in programs_of(equation):
                yield from find(held)

    program = jax.make_jaxpr(function)(*inputs)
    return next(e for e in find(program.jaxpr) if isinstance(inside(e), kind))


def run(program, inputs, of_equation=evaluated):
    return interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)


@pytest.mark.parametrize("name", HOLDING)
def test_what_holds_programs_is_known(name):
    function, kind = HOLDING[name]
    equation = equation_of(function, kind, X)
    inner = inside(equation)
    assert isinstance(inner, kind)
    assert equation.primitive.name in HOLDERS
    if isinstance(inner, Call):
        assert inner.wrapper == name
        assert len(inner.body.jaxpr.invars) == len(equation.invars)
        assert len(inner.body.jaxpr.outvars) == len(equation.outvars)


def test_a_shard_map_says_over_what():
    spread = inside(equation_of(shard_map, ShardMap, X))
    assert spread.axes == {"model"}
    assert spread.num_devices == 2
    assert len(spread.in_specs) == len(spread.out_specs) == 1
    assert spread.body.in_avals[0].shape == (3, 1)


def test_what_puts_two_numbers_together_is_no_program_of_operands():
    for function in (lambda x: x.at[0].add(1.0), jnp.sin):
        program = jax.make_jaxpr(function)(X)
        equations = [e for e in program.jaxpr.eqns if not isinstance(inside(e), Call)]
        assert equations
        assert all(inside(e) is None for e in equations)


def test_operands_are_split_as_the_programs_take_them():
    equation = equation_of(scan, Scan, X)
    inner = inside(equation)
    parts = inner.split(equation.invars)
    assert [len(part) for part in parts][1:] == [1, 1]
    assert [v for part in parts for v in part] == equation.invars
    assert (inner.length, inner.num_carry) == (3, 1)
    shapes = [variable.aval.shape for variable in inner.body.jaxpr.invars]
    assert shapes[-2:] == [(2,), (2,)]  # the carry, and a slice

    equation = equation_of(while_loop, While, X)
    loop = inside(equation)
    of_condition, of_body, carry = loop.split(equation.invars)
    assert len(of_condition) == len(of_body) == len(carry) == 1
    assert of_condition != of_body
    assert len(loop.condition.jaxpr.invars) == 2

    equation = equation_of(linear_solve, LinearSolve, X)
    system = inside(equation)
    given = system.split(equation.invars)
    assert [v.aval.shape for v in given] == [v.aval.shape for v in system.solve.jaxpr.invars]


@pytest.mark.parametrize("name", HOLDING)
def test_a_program_gives_the_same_equation_by_equation(name):
    program = jax.make_jaxpr(HOLDING[name][0])(X)
    (found,) = run(program, [X])
    np.testing.assert_array_equal(found, HOLDING[name][0](X))


def test_constants_and_literals_are_read():
    program = jax.make_jaxpr(lambda x: (x + X * 2.5, 7.0, x))(X)
    found = run(program, [X])
    np.testing.assert_allclose(found[0], 3.5 * X, rtol=1e-6)
    assert found[1] == 7.0
    assert found[2] is X


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
    function = HOLDING[name][0]
    program = jax.make_jaxpr(function)(X)
    np.testing.assert_allclose(run(program, [X], rebuilt)[0], function(X), rtol=1e-6)
    if name not in ("while", "custom_vmap"):
        gradient = jax.grad(lambda x: jnp.sum(run(program, [x], rebuilt)[0] ** 2))(X)
        expected = jax.grad(lambda x: jnp.sum(function(x) ** 2))(X)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_facts_settle():
    # b becomes known through a, c through b: three rounds.
    step = lambda carry: [carry[0], carry[0] or carry[1], carry[1] or carry[2]]  # noqa: E731
    assert settled(step, [True, False, False], lambda a, b: a or b) == [True, True, True]
    assert settled(step, [False, False, False], lambda a, b: a or b) == [False, False, False]


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
