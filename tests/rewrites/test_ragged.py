"""Products of rows in groups, against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_dp as dp
from eqx_dp.programs import equations
from eqx_dp.rewrites import with_masked_products
from tests import oracle
from tests.gradients.cases.tables import of_arrays
from tests.tiers import METHODS, curated

RAGGED = "ragged_dot_general"
ROWS, MATRICES = (
    np.random.default_rng(seed).normal(size=size) for seed, size in enumerate([(6, 4), (3, 4, 2)])
)


@pytest.mark.parametrize(
    "sizes", [(2, 1, 3), (0, 6, 0), (1, 0, 2), (0, 0, 0)], ids=["all", "one", "not all", "none"]
)
def test_groups(sizes):
    """What is in no group is zero."""
    check(lambda x, w: lax.ragged_dot(x, w, jnp.array(sizes)), ROWS, MATRICES)


def primitives(program):
    return {equation.primitive.name for equation in equations(program)}


def check(function, *operands):
    with jax.enable_x64(True):
        program = jax.make_jaxpr(function)(*operands)
        new = with_masked_products(program)
        assert RAGGED in primitives(program)
        assert RAGGED not in primitives(new)
        (found,) = jax.core.eval_jaxpr(new.jaxpr, new.consts, *operands)
        np.testing.assert_allclose(found, function(*operands), rtol=1e-13, atol=1e-13)


def test_nothing_of_another_group_comes_in():
    """A row that is not finite stays in its own result."""
    program = jax.make_jaxpr(lambda x, w: lax.ragged_dot(x, w, jnp.array([2, 1, 3])))
    rows = np.float32(ROWS)
    rows[1] = np.nan
    new = with_masked_products(program(rows, np.float32(MATRICES)))
    (found,) = jax.core.eval_jaxpr(new.jaxpr, new.consts, rows, np.float32(MATRICES))
    np.testing.assert_array_equal(np.isnan(found).any(1), np.arange(6) == 1)

    def total(matrices):
        return jnp.sum(jax.core.eval_jaxpr(new.jaxpr, new.consts, rows, matrices)[0])

    gradient = jax.grad(total)(np.float32(MATRICES))
    np.testing.assert_array_equal(np.isnan(gradient).any((1, 2)), np.arange(3) == 0)


def experts(model, x):
    """Every row goes to the expert that it likes best."""
    liked = x @ model["r"]
    expert = jnp.argmax(liked, -1)
    x, sizes = x[jnp.argsort(expert)], jnp.bincount(expert, length=3)
    hidden = jnp.tanh(lax.ragged_dot(x, model["u"], sizes))
    return jnp.sin(lax.ragged_dot(hidden, model["d"], sizes)), jax.nn.softmax(liked)[:, 0]


def loss(model, x):
    y, gates = experts(model, x)
    return jnp.sum(y) + jnp.sum(gates**2)


@pytest.mark.parametrize("method", curated(METHODS, ["book_keeping"]))
def test_a_mixture_of_experts(method):
    case = of_arrays(loss, "r53 u354 d345", (6, 5), loss=True)("experts")
    batch = case.batch(4)
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=0.5, method=method)
    truth = oracle.clipped_gradients(loss, case.model, *batch, l2_clip_norm=0.5)
    assert oracle.relative_error(jax.jit(grad_fn)(case.model, *batch), truth.grads) < 1e-5
    rows = dp.explain(grad_fn, case.model, *batch).rows
    assert {row.uses for row in rows} == {("contraction",)}
