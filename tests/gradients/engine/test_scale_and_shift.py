"""Products and sums, entry by entry."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.gradients.engine.kinds import check, examples, normal

PRODUCTS = {
    "mul": lambda w, x: w * x,
    "mul_right": lambda w, x: x * w,
    "div": lambda w, x: w / (2 + jnp.abs(x)),
    "frozen": lambda w, x: (w * np.arange(12.0).reshape(3, 4)) * jnp.sin(x),
}
SUMS = {
    "sub": lambda w, x: jnp.sin(w - x),
    "sub_right": lambda w, x: jnp.sin(x - w),
    "number": lambda w, x: jnp.sin((w + 1.5) * x),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_scale(name):
    check(PRODUCTS[name], normal(3, 4), examples(3, 4), kinds=["scale"], ghost=False)


@pytest.mark.parametrize("name", SUMS)
def test_shift(name):
    check(SUMS[name], normal(3, 4), examples(3, 4), kinds=["shift"], ghost=False)


@pytest.mark.parametrize("shape", [(4,), (3, 1), ()], ids=str)
def test_stretched(shape):
    check(PRODUCTS["div"], normal(*shape), examples(3, 4), kinds=["scale"], ghost=False)
    check(SUMS["sub_right"], normal(*shape), examples(3, 4), kinds=["shift"], ghost=False)


def test_scale_and_shift_by_one_parameter():
    check(
        lambda w, x: jnp.sin(w * x + w),
        normal(4),
        examples(3, 4),
        kinds=["scale", "shift"],
        ghost=False,
    )
