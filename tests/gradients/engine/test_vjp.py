"""Parameters in equations that no kind of use knows: JAX's own derivative of that one equation."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests import models, oracle
from tests.gradients.engine import agreement, uses
from tests.gradients.engine.kinds import check, examples, normal

pytestmark = pytest.mark.sampled(6)


@jax.custom_vjp
def doubled(w, x):
    """Its rule says three times what the derivative is, and is not looked into."""
    return 2 * w * x


doubled.defvjp(lambda w, x: (doubled(w, x), (w, x)), lambda kept, g: (6 * g * kept[1], g * kept[0]))


@jax.custom_vjp
def counted(w, count, x):
    """One of its operands is an integer, which has no cotangent."""
    return count * w * x


counted.defvjp(
    lambda w, count, x: (counted(w, count, x), (w, count, x)),
    lambda kept, g: (kept[1] * kept[2] * g, None, kept[0] * kept[1] * g),
)


@jax.custom_jvp
def slope(w, x):
    return jnp.where(x > 0, x, w * x)


slope.defjvps(lambda d, out, w, x: jnp.where(x > 0, 0, d * x), lambda d, out, w, x: 2 * d)


def in_cond(w, x):
    return jnp.sin(lax.cond(x[0] > 0, lambda: w * x, lambda: x))


def in_switch(w, x):
    branches = [lambda w, x: x @ w, lambda w, x: jnp.tanh(w) @ x, lambda w, x: x]
    return lax.switch((x[0] * 10).astype(int) % 3, branches, w, x)


def attention(w, x):
    q, k, v = (jnp.tanh(x @ w).reshape(2, 1, 3), w[None, :2, None, :], w[None, 1:, None, :])
    return jax.nn.dot_product_attention(q[None], k, v)


def carried(w, x):
    """The first state of a recurrent network."""
    return lax.scan(lambda c, x: (jnp.sin(c + x), c * x), w, x)[1]


def carried_along(w, x):
    """A loop that hands its weights from step to step as they are."""
    step = lambda c, x: ((c[0], jnp.sin(c[0] @ c[1] + x)), None)  # noqa: E731
    same, state = lax.scan(step, (w, x[0]), x)[0]
    return same.T @ state


def given_on(w, x):
    """From the second step on the state is the parameter."""
    return lax.scan(lambda c, x: (-w, jnp.sin(c * x)), x[0], x)[1]


def slices_given_on(w, x):
    """Each step meets the last step's slice."""
    return lax.scan(lambda c, w: (w, jnp.sin(c * x)), x, w)[1]


def carried_and_given_on(w, x):
    """Turned at every step; met again behind the loop."""
    turned, y = lax.scan(lambda c, x: (c[::-1], jnp.sin(c * x)), w, x)
    return turned * y


CASES = {
    # Use, shape of the parameter, of its data, kinds.
    "cond": (in_cond, (3,), (3,), ["vjp"]),
    "switch": (in_switch, (3, 3), (3,), ["vjp"]),
    "custom_vjp": (lambda w, x: w * x + doubled(w[::-1], x), (3,), (3,), ["scale", "vjp"]),
    "custom_vjp_of_an_integer": (lambda w, x: counted(w, 3, x), (3,), (3,), ["vjp"]),
    "custom_jvp": (lambda w, x: slope(w, jnp.sin(x)), (3,), (3,), ["vjp"]),
    "attention": (attention, (3, 3), (2, 3), None),
    "sort": (lambda w, x: jnp.sort(w * x), (3,), (3,), ["scale"]),
    "clamp": (lambda w, x: lax.clamp(-jnp.ones(3), x, jnp.exp(w)) * x, (3,), (3,), None),
    "solve": (
        lambda w, x: lax.linalg.triangular_solve(w, x, left_side=True),
        (3, 3), (3, 2), ["vjp"],
    ),
    "atan2": (lambda w, x: jnp.atan2(w, x), (3,), (3,), ["vjp"]),
    "complex": (lambda w, x: jnp.real((x + 1j * x**2) * w) ** 2, (3,), (3,), None),
    "maximum": (lambda w, x: jnp.maximum(w, x), (3,), (3,), ["vjp"]),
    "select": (lambda w, x: jnp.where(x > 0, w, x), (3,), (3,), ["vjp"]),
    "two operands": (
        lambda w, x: lax.cond(x[0] > 0, lambda a, b: a * b * x, lambda a, b: a - b, w[0], w[1]),
        (2, 3), (3,), ["vjp", "vjp"],
    ),
    "one operand twice": (
        lambda w, x: lax.cond(x[0, 0] > 0, lambda a, b: a * b.T, lambda a, b: a - 2 * b, w, w.T),
        (3, 3), (3, 3), ["vjp", "vjp"],
    ),
    "twice in one equation": (
        lambda w, x: lax.select(x > 0, w, w[::-1]) * x, (3,), (3,), ["vjp", "vjp"],
    ),
    "carried": (carried, (3,), (2, 3), ["vjp"]),
    "carried_along": (carried_along, (3, 3), (2, 3), ["contraction", "contraction"]),
    "given_on": (given_on, (3,), (3, 3), ["vjp"]),
    "slices_given_on": (slices_given_on, (2, 3), (3,), ["vjp"]),
    "carried_and_given_on": (carried_and_given_on, (3,), (3, 3), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_use(name):
    use, parameter, data, kinds = CASES[name]
    ghost = kinds is not None and set(kinds) == {"contraction"}
    check(use, normal(*parameter), examples(*data), kinds=kinds, ghost=ghost)


def step(w, x):
    return jnp.sin(lax.cond(x[0] > 0, lambda w, x: w @ x, lambda w, x: x - w[0], w, x))


def over_slices(body):
    return lambda w, x: lax.scan(lambda x, w: (body(w, x), None), x, w)[0]


def over_time(body):
    return lambda w, x: lax.scan(lambda x, now: (body(w, jnp.tanh(x + now)), x), x[0], x)[1]


SCANS = {
    "slices": (over_slices(step), (2, 3, 3), (3,)),
    "time": (over_time(step), (3, 3), (4, 3)),
    "slices_time": (over_slices(over_time(step)), (2, 3, 3), (3, 3)),
    "time_slices": (over_time(over_slices(step)), (2, 3, 3), (3, 3)),
    "time_of_a_slice": (over_slices(lambda w, x: over_time(step)(w.T, x)), (2, 3, 3), (3, 3)),
    "checkpoint": (jax.checkpoint(over_time(jax.checkpoint(step))), (3, 3), (4, 3)),
    "jit": (over_time(jax.jit(step)), (3, 3), (2, 3)),
}


@pytest.mark.parametrize("name", SCANS)
def test_in_scans(name):
    use, parameter, data = SCANS[name]
    check(use, normal(*parameter), examples(*data), kinds=["vjp"], ghost=False)


def test_everything_else_keeps_its_way():
    """A branch takes one parameter; the others are used as ever."""

    def loss(model, x):
        y = jnp.tanh(model["in"] @ x)
        y = lax.cond(y[0] > 0, lambda a, y: a * y, lambda a, y: a + y, model["a"], y)
        return jnp.sum(jnp.sin(model["out"] @ y + model["bias"]))

    model = {"a": normal(3), "in": normal(3, 3), "out": normal(4, 3), "bias": normal(4)}
    case = models.Case("branch", jax.tree.map(jnp.float32, model), loss, draw)
    agreement.check(case, by_leaf=True)


def test_parameters_that_meet_in_a_rule():
    """Both have their gradient from one backward pass."""

    def loss(model, x):
        y = doubled(model["a"], jnp.sin(model["b"]) * x)
        y = lax.cond(x[0] > 0, lambda a, b: a * b * y, lambda a, b: y - a, model["a"], model["b"])
        return jnp.sum(jnp.sin(y) * x)

    model = {"a": jnp.array([0.4, -0.7, 1.1]), "b": jnp.array([0.4, 0.7, -1.1])}
    case = models.Case("met", model, loss, draw)
    agreement.check(case, by_leaf=True)


def loops(kind):
    """A custom rule that closes over parameters, and one more parameter behind it."""

    def loss(model, x):
        state = eqx.internal.while_loop(
            lambda state: jnp.sum(state**2) > 0.1,
            lambda state: jnp.sin(model["a"] @ state + x),
            x,
            max_steps=4,
            kind=kind,
        )
        return jnp.sum(jnp.cos(model["b"] @ state) * x)

    return loss


def ode(adjoint):
    """A field with a weight matrix, solved by diffrax; one more parameter behind it."""

    def loss(model, x):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, weight: jnp.tanh(weight @ y)),
            diffrax.Heun(),
            0.0,
            1.0,
            0.5,
            x,
            model["a"],
            adjoint=adjoint,
            max_steps=4,
        )
        return jnp.sum(jnp.cos(model["b"] @ solution.ys[-1]) * x)

    return loss


LOOPS = {
    "bounded": loops("bounded"),
    "checkpointed": loops("checkpointed"),
    "recursive adjoint": ode(diffrax.RecursiveCheckpointAdjoint()),
    "direct adjoint": ode(diffrax.DirectAdjoint()),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_libraries(name):
    model = {"a": jnp.float32(normal(3, 3)), "b": jnp.float32(normal(3, 3, seed=1))}
    case = models.Case("loops", model, LOOPS[name], draw)
    agreement.check(case, size=4, by_leaf=True)


def test_a_shard_map_in_the_loss():
    """Devices share each example; no method takes what they exchange for examples that meet."""
    mesh = jax.make_mesh((2,), ("part",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("part"), P()), out_specs=P("part")
    )

    def loss(model, x):
        return jnp.sum(jnp.sin(model["b"] @ rows(lambda w, x: jnp.tanh(w @ x))(model["a"], x)))

    model = {"a": jnp.float32(normal(4, 3)), "b": jnp.float32(normal(3, 4))}
    case = models.Case("shard_map", model, loss, draw)
    agreement.check(case, by_leaf=True)


def mixed(model, x):
    """A branch, a custom rule in a loop, and a contraction."""
    step = lambda y, x: (jnp.sin(doubled(model["a"], y) + x), None)  # noqa: E731
    y, _ = lax.scan(step, x, jnp.stack([x, 2 * x]))
    y = lax.cond(x[0] > 0, lambda a, y: a * y, lambda a, y: a + y, model["c"], y)
    return jnp.sum(jnp.sin(model["b"] @ y))


def mixed_case():
    model = {"a": jnp.float32(normal(3)), "b": jnp.float32(normal(3, 3)), "c": jnp.ones(3)}
    return models.Case("mixed", model, mixed, draw)


@pytest.mark.parametrize("method", ["book_keeping", "ghost", "per_example"])
def test_an_example_that_is_not_finite(method):
    """It adds nothing, and no other example changes by it."""
    case = mixed_case()
    grad_fn = dp.filter_value_and_clipped_grad(case.loss, l2_clip_norm=0.5, method=method)
    (batch,) = case.batch(4)
    bad = batch.at[2].set(jnp.array([1.0, jnp.nan, 0.5]))
    per_example, found = uses.freshly_jitted(grad_fn, case.model)(bad)
    rest = jnp.array([0, 1, 3])
    truth = oracle.clipped_gradients(case.loss, case.model, batch[rest], l2_clip_norm=0.5)
    assert not jnp.isfinite(per_example.grad_norm[2])
    assert oracle.relative_error(found, truth.grads) < 1e-5


@pytest.mark.parametrize("size", [1, 2])
def test_microbatches(size):
    agreement.check(mixed_case(), size=4, by_leaf=True, microbatch_size=size)


def draw(rng, size):
    return (jnp.asarray(rng.normal(size=(size, 3)), jnp.float32),)
