"""What a parameter may go through before it meets data."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.gradients.engine.kinds import check, examples, normal

# Each makes a (3, 4) matrix of a parameter; whether a gradient keeps its norm on the way back.
VIEWS = {
    "reshape": ((2, 6), lambda w: w.reshape(3, 4), True),
    "transpose": ((4, 3), lambda w: w.T, True),
    "both": ((2, 2, 3), lambda w: w.transpose(2, 0, 1).reshape(3, 4), True),
    "squeeze": ((1, 3, 1, 4), lambda w: w.squeeze((0, 2)), True),
    "rev": ((3, 4), lambda w: w[::-1, ::-1], True),
    "neg": ((3, 4), lambda w: -w, True),
    "slice": ((5, 6), lambda w: w[1:4, 2:], True),
    "strided": ((6, 8), lambda w: w[::2, 1::2], True),
    "row": ((2, 12), lambda w: w[-1].reshape(3, 4), True),
    "split": ((9, 4), lambda w: jnp.split(w, 3)[1], True),
    "cast": ((3, 4), lambda w: w.astype(jnp.float32).astype(jnp.float64), True),
    "broadcast": ((4,), lambda w: jnp.broadcast_to(w, (3, 4)), False),
    "broadcast_column": ((3, 1), lambda w: jnp.broadcast_to(w, (3, 4)), False),
    "broadcast_scalar": ((), lambda w: jnp.full((3, 4), w), False),
    "expand": ((3, 4), lambda w: jnp.expand_dims(w, 0)[0], True),
    "many": ((4, 9), lambda w: jnp.split(-w.reshape(2, 18).T[::-1], 3)[2].reshape(3, 4), True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view(name):
    shape, view, isometric = VIEWS[name]
    # A number that float32 holds: the cast there and back is then exact.
    parameter = normal(*shape).astype(np.float32).astype(np.float64)
    check(
        lambda w, x: x @ view(w), parameter, examples(2, 3), kinds=["contraction"], ghost=isometric
    )


@pytest.mark.parametrize("name", ["reshape", "slice", "broadcast", "split"])
def test_view_of_a_shift(name):
    shape, view, _ = VIEWS[name]
    check(
        lambda w, x: jnp.sin(view(w) + x),
        normal(*shape),
        examples(3, 4),
        kinds=["shift"],
        ghost=False,
    )


def test_all_parts_of_a_split():
    """Three projections in one parameter: their gradients lie side by side."""

    def use(w, x):
        q, k, v = jnp.split(w, 3)
        return jnp.tanh(x @ q) * (x @ v) + jnp.sin(x @ k)

    check(use, normal(9, 4), examples(2, 3), kinds=["contraction"] * 3, ghost=False)


def test_overlapping_slices():
    check(
        lambda w, x: jnp.sin(x @ w[:3]) * (x @ w[1:]),
        normal(4, 2),
        examples(2, 3),
        kinds=["contraction"] * 2,
        ghost=False,
    )


def test_a_cast_rounds_the_parameter_and_not_its_gradient():
    """float32 on the way there, the dtype of the sums on the way back."""
    check(
        lambda w, x: x.astype(jnp.float32) @ w.astype(jnp.float32),
        normal(3, 4).astype(np.float32).astype(np.float64),
        np.ones((3, 2, 3)),
        kinds=["contraction"],
        ghost=True,
    )


def test_a_cast_to_integers_has_no_gradient():
    check_no_gradient = check(
        lambda w, x: w * x + w.astype(jnp.int32).astype(jnp.float64) * x,
        3 * normal(4),
        examples(4),
        kinds=["scale"],
        ghost=False,
    )
    assert check_no_gradient.whole == {}


def test_a_kernel_in_another_layout():
    check(
        lambda w, x: lax.conv(x, w.T[:, :, 1:], (1,), "VALID"),
        normal(3, 2, 4),
        examples(1, 2, 5),
        kinds=["convolution"],
        ghost=True,
    )


def test_rows_of_a_part_of_a_table():
    rows = np.array([[0, 1, 1], [2, 2, 0], [1, 0, 2]], np.int32)
    check(
        lambda w, t: w.T[1:][t], normal(5, 4), rows, kinds=["lookup"], ghost=True
    )
