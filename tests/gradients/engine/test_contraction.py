"""`dot_general` in every arrangement of its dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_dp as dp
from tests.gradients.engine.kinds import check, examples, normal


@pytest.mark.parametrize(
    ("side", "parameter", "data", "contracted", "batch"),
    [
        (0, (3, 4), (4,), ((1,), (0,)), ((), ())),
        (1, (4, 3), (5, 4), ((0,), (1,)), ((), ())),
        (0, (2, 3, 4), (4, 5, 3), ((2, 1), (0, 2)), ((), ())),
        (1, (2, 3, 4), (5, 2, 4), ((2,), (2,)), ((0,), (1,))),
        (0, (2, 3, 4, 2), (3, 2, 5, 4, 2), ((2,), (3,)), ((3, 1), (4, 0))),
        (1, (2, 3), (2, 3), ((0, 1), (0, 1)), ((), ())),
        (0, (3,), (2,), ((), ()), ((), ())),
        (1, (2, 3), (5, 2), ((), ()), ((0,), (1,))),
    ],
    ids=str,
)
def test_dimensions(side, parameter, data, contracted, batch):
    def use(w, x):
        if side == 0:
            return lax.dot_general(w, x, (contracted, batch))
        return lax.dot_general(x, w, (contracted[::-1], batch[::-1]))

    check(use, normal(*parameter), examples(*data), kinds=["contraction"], ghost=True)


@pytest.mark.parametrize(
    ("formula", "parameter", "data"),
    [
        ("hdk,tk->thd", (2, 3, 4), (5, 4)),
        ("eio,tei->teo", (2, 3, 4), (5, 2, 3)),
    ],
)
def test_einsum(formula, parameter, data):
    check(
        lambda w, x: jnp.einsum(formula, w, x),
        normal(*parameter),
        examples(*data),
        kinds=["contraction"],
        ghost=True,
    )


def test_vmap_over_heads():
    check(
        lambda w, x: jax.vmap(lambda w, x: x @ w)(w, x),
        normal(2, 3, 4),
        examples(2, 5, 3),
        kinds=["contraction"],
        ghost=True,
    )


def test_two_uses_have_cross_terms():
    check(
        lambda w, x: jnp.sin(x @ w) @ w,
        normal(4, 4),
        examples(3, 4),
        kinds=["contraction", "contraction"],
        ghost=True,
    )


def test_opposite_uses_cancel():
    """Were the cross terms left out, the norm would not be zero."""
    check(
        lambda w, x: x @ w - (x @ w.T).T,
        normal(1, 1),
        examples(1, 1),
        kinds=["contraction", "contraction"],
        ghost=True,
    )


def test_a_table_tied_to_the_output():
    check(
        lambda w, t: jnp.tanh(w[t]) @ w.T,
        normal(5, 3),
        (examples(4) * 10).astype("int32") % 5,
        kinds=["lookup", "contraction"],
        ghost=True,
    )


@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
def test_a_parameter_in_front_with_more_dimensions_than_the_data(method):
    """The axes of its cotangent change places in a circle, and have to come back."""

    def loss(weight, x):
        return jnp.sum(jnp.tanh(lax.dot_general(weight, x, (((2,), (1,)), ((), ())))) ** 2)

    batch = jnp.sin(jnp.arange(24.0)).reshape(2, 4, 3)
    found, expected = (
        dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method=one)(normal(4, 4, 3), batch)
        for one in (method, "per_example")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
