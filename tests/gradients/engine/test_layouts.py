"""Where the entries of a rearranged array stand: against NumPy, which moves indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqx_dp.gradients.layouts import Layout, layout_of, through

SHAPE = (4, 6)


def layout_after(function, shape, over=0):
    """The layout of what a function makes of an array, None where it is no regular one."""
    seen = shape[over:]
    program = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(seen, jnp.float32)).jaxpr
    layouts = {program.invars[0]: layout_of(shape)}
    for equation in program.eqns:
        results = through(equation, layouts[equation.invars[0]], over)
        if results is None:
            return None
        layouts.update(zip(equation.outvars, results, strict=True))
    return layouts[program.outvars[0]]


def check(layout, indices, shape, sign=1):
    """A gradient goes back to the entries that the indices name."""
    assert layout.shape == indices.shape
    gradient = np.random.default_rng(0).integers(-9, 9, indices.shape).astype(np.float32)
    expected = np.zeros(np.prod(shape), np.float32)
    np.add.at(expected, indices, sign * gradient)
    found = layout.pulled_back(jnp.asarray(gradient), shape)
    np.testing.assert_array_equal(found, expected.reshape(shape))
    is_once = len(np.unique(indices)) == indices.size
    assert layout.is_isometric == is_once


STEPS = {
    "transpose": lambda x: x.T,
    "tall": lambda x: x.reshape(-1, 2),
    "wide": lambda x: x.reshape(2, -1),
    "first_rows": lambda x: x[: max(1, len(x) // 2)],
    "last_rows": lambda x: x[len(x) // 2 :],
    "every_other": lambda x: x[::2],
    "backwards": lambda x: x[::-1],
    "columns_backwards": lambda x: x[:, ::-1],
    "inner": lambda x: x[:, 1:],
}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5))
def test_rearrangements(names):
    def function(x):
        for name in names:
            if x.shape[1] < 2 and name == "inner":
                continue
            if x.size % 2 and name in ("tall", "wide"):
                continue
            x = STEPS[name](x)
        return x

    layout = layout_after(function, SHAPE)
    if layout is not None and layout.is_regular(24):
        check(layout, function(np.arange(24).reshape(SHAPE)), SHAPE)


REGULAR = {
    "part": lambda x: x[1:3, 2:],
    "split": lambda x: (np if isinstance(x, np.ndarray) else jnp).split(x, 2, 1)[1],
    "steps": lambda x: x[:, 1::2],
    "middle": lambda x: x.reshape(4, 3, 2)[:, 1],
    "turned": lambda x: x.T[::-1].reshape(3, 2, 4)[1:],
}


@pytest.mark.parametrize("name", REGULAR)
def test_these_are_regular(name):
    layout = layout_after(REGULAR[name], SHAPE)
    assert layout is not None
    assert layout.is_regular(24)
    check(layout, REGULAR[name](np.arange(24).reshape(SHAPE)), SHAPE)


def test_a_negative():
    check(layout_after(lambda x: -x.T, SHAPE), np.arange(24).reshape(SHAPE).T, SHAPE, sign=-1)


def test_what_is_repeated_adds_up():
    layout = layout_after(lambda x: jnp.broadcast_to(x[:, None], (4, 5, 6)), SHAPE)
    check(layout, np.broadcast_to(np.arange(24).reshape(4, 1, 6), (4, 5, 6)), SHAPE)


def test_axes_in_front_that_are_not_seen():
    """A scan sees one slice; the layout is that of all."""
    layout = layout_after(lambda x: x.T[1:], (3, 4, 6), over=1)
    check(layout, np.arange(72).reshape(3, 4, 6).transpose(0, 2, 1)[:, 1:], (3, 4, 6))


@pytest.mark.parametrize("function", [lambda x: x.T.reshape(4, 6), lambda x: jnp.sin(x)])
def test_no_layout(function):
    assert layout_after(function, SHAPE) is None


def test_steps_that_do_not_divide_an_axis_are_not_regular():
    layout = layout_after(lambda x: x[:, ::2], (4, 5))
    assert layout.axes == (((4, 5),), ((3, 2),))
    assert not layout.is_regular(20)
    assert Layout(((), ())).is_regular(1)
