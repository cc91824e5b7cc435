"""What a parameter may go through before it meets data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.gradients.engine import agreement
from tests.gradients.engine.kinds import check, examples, normal
from tests.models import Case


def out_of_a_scan(rows, reverse=False):
    """Slices go in, turned rows come out, stacked again."""
    return lax.scan(lambda c, row: (c, -row[::-1]), None, rows, reverse=reverse)[1]


def out_of_scans(w):
    """Of a (3, 2) parameter the slices of an outer scan, each twice by an inner one."""

    def step(c, row):
        return c, lax.scan(lambda c, _: (c, checkpoint_name(row, "row")), None, None, 2)[1]

    return lax.scan(step, None, w)[1].reshape(3, 4)


# Each makes a (3, 4) matrix of a parameter; whether a gradient keeps its norm on the way back.
VIEWS = {
    "transpose": ((4, 3), lambda w: w.T, True),
    "squeeze": ((1, 3, 1, 4), lambda w: w.squeeze((0, 2)), True),
    "rev": ((3, 4), lambda w: w[::-1, ::-1], True),
    "neg": ((3, 4), lambda w: -w, False),
    "slice": ((5, 6), lambda w: w[1:4, 2:], True),
    "split": ((9, 4), lambda w: jnp.split(w, 3)[1], True),
    "broadcast": ((4,), lambda w: jnp.broadcast_to(w, (3, 4)), False),
    "broadcast_scalar": ((), lambda w: jnp.full((3, 4), w), False),
    "checkpoint_name": ((3, 4), lambda w: checkpoint_name(w, "weight"), True),
    "out_of_checkpoint": ((4, 3), lambda w: jax.checkpoint(lambda w: -w.T)(w), False),
    "out_of_jit": ((4, 3), lambda w: jax.jit(lambda w: (w[1:], w.T))(w)[1], True),
    "out_of_scan": ((3, 4), out_of_a_scan, False),
    "out_of_scan_reversed": ((3, 4), lambda w: out_of_a_scan(w, reverse=True), False),
    "out_of_scan_repeated": (
        (4,), lambda w: lax.scan(lambda c, _: (c, w), None, None, 3)[1], False,
    ),
    "out_of_scan_of_scan": ((3, 2), out_of_scans, False),
    "many": ((4, 9), lambda w: jnp.split(w.reshape(2, 18).T[::-1], 3)[2].reshape(3, 4), False),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_view(name):
    shape, view, isometric = VIEWS[name]
    check(
        lambda w, x: x @ view(w),
        normal(*shape),
        examples(2, 3),
        kinds=["contraction"],
        ghost=isometric,
    )


@pytest.mark.parametrize("name", ["split", "broadcast"])
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

    check(use, normal(9, 4), examples(2, 3), kinds=["contraction"] * 3, ghost=True)


def test_overlapping_slices():
    check(
        lambda w, x: jnp.sin(x @ w[:3]) * (x @ w[1:]),
        normal(4, 2),
        examples(2, 3),
        kinds=["contraction"] * 2,
        ghost=False,
    )


def test_a_cast():
    check(
        lambda w, x: x.astype(jnp.float32) @ w.astype(jnp.float32),
        normal(3, 4),
        examples(2, 3),
        kinds=["contraction"],
        ghost=True,
        roundoff=1e-7,
    )


def test_a_cast_to_integers_has_no_gradient():
    """It is no view: a product with what it makes has nothing to give back."""

    def loss(w, x):
        return jnp.sum(w * x + w.astype(jnp.int32).astype(jnp.float32) * x)

    case = Case("integers", jnp.array([3.2, -1.7, 0.4]), loss, draw_vectors)
    agreement.check(case)


def test_a_complex_product():
    """The cotangent of the imaginary part must not be lost on the way back."""

    def scale(w, x):
        return jnp.sum(jnp.imag(w * (x + 1j * jnp.cos(x))))

    def contract(w, x):
        return jnp.sum(jnp.imag(w[None] @ (x + 1j * jnp.cos(x))))

    for loss in (scale, contract):
        agreement.check(Case("complex", jnp.array([3.2, -1.7, 0.4]), loss, draw_vectors))


def draw_vectors(rng, size):
    return (jnp.asarray(rng.normal(size=(size, 3)), jnp.float32),)


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
    check(lambda w, t: w.T[1:][t], normal(5, 4), rows, kinds=["lookup"], ghost=True)
