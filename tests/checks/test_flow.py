"""Facts go through all that JAX's programs are made of: here, what inputs a value is made of."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

from eqx_dp.checks.flow import Context, Flow
from tests.sharding.losses import mesh_of


class Origins(Flow[frozenset[int]]):
    """Follows the numbers of inputs."""

    nothing = frozenset()

    def __init__(self):
        super().__init__()
        self.seen, self.loops = [], []

    def joined(self, facts):
        return frozenset().union(*facts)

    def equation(self, context, equation, inputs):
        if context.is_final:
            self.seen.append((equation.primitive.name, context.times, context.line))
        return [self.joined(inputs)] * len(equation.outvars)

    def carried(self, context, variable, fact):
        self.loops.append((variable.aval.shape, set(fact)))


def followed(function, *inputs):
    program = jax.make_jaxpr(function)(*inputs)
    flow = Origins()
    results = flow.program(program, [frozenset({i}) for i in range(len(inputs))], Context())
    return flow, [set(fact) for fact in results]


def with_backward_rule(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda *args: (f(*args), args), lambda args, g: jax.vjp(f, *args)[1](g))
    return wrapped


def on_devices(f):
    mesh = mesh_of("auto", data=8)
    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def apart(a, b):
    return jnp.sin(a), b * 2


ELSEWHERE = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "custom_vjp": with_backward_rule,
    "vmap": jax.vmap,
    "shard_map": on_devices,
    "scan": lambda f: lambda a, b: lax.scan(lambda c, _: (f(*c), None), (a, b), length=3)[0],
    "over slices": lambda f: lambda a, b: lax.scan(lambda c, x: (c, f(*x)), 0, (a, b))[1],
    "while": lambda f: lambda a, b: lax.while_loop(lambda c: False, lambda c: f(*c), (a, b)),
    "cond": lambda f: lambda a, b: lax.cond(a[0] > 0, f, lambda a, b: (a, b), a, b),
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_each_result_descends_from_what_it_is_made_of(elsewhere):
    f = ELSEWHERE[elsewhere]
    _, results = followed(f(apart), jnp.ones(3), jnp.ones(3))
    assert results == [{0}, {1}]
    _, results = followed(f(lambda a, b: (a + b, b * 2)), jnp.ones(3), jnp.ones(3))
    assert results == [{0, 1}, {1}]


def test_what_a_loop_carries_is_settled():
    """What came in last is met in the third step only."""

    def turn(carry, _):
        _, b, c = carry
        return (b, c, c * 2), None

    flow, results = followed(lambda *abc: lax.scan(turn, abc, length=5)[0], *[jnp.ones(1)] * 3)
    assert results == [{0, 1, 2}, {1, 2}, {2}]
    assert flow.loops == [((1,), {0, 1, 2}), ((1,), {1, 2}), ((1,), {2})]


def test_an_equation_is_seen_once_with_how_often_it_runs_and_its_line():
    def step(c, _):
        return on_devices(jnp.sin)(c), None

    def function(x):
        return lax.scan(lambda c, _: (lax.scan(step, c, length=2)[0], None), x, length=3)[0]

    flow, _ = followed(function, jnp.ones(8))
    (sine,) = [seen for seen in flow.seen if seen[0] == "sin"]
    assert sine[1] == 3 * 2 * 8
    assert "test_flow.py" in sine[2]


def test_what_is_inside_is_taken_for_made_of_everything_where_nothing_is_known_of_it():
    def kernel(a, b, result, other):
        result[...] = a[...]
        other[...] = b[...]

    shapes = [jax.ShapeDtypeStruct((3,), jnp.float32)] * 2
    call = pallas.pallas_call(kernel, out_shape=shapes, interpret=True)
    _, results = followed(lambda a, b: tuple(call(a, b)), jnp.ones(3), jnp.ones(3))
    assert results == [{0, 1}, {0, 1}]


def test_a_scatter_is_one_equation():
    _, results = followed(lambda a, b: a.at[0].add(b[0]), jnp.ones(3), jnp.ones(3))
    assert results == [{0, 1}]
