"""Properties over shapes, trees, clip norms, masks, microbatches and hostile values (hypothesis).

The loss is a dot product, so that an example's gradient is the example: hypothesis chooses the
gradients themselves, NaN, infinities, 1e30 and 1e-30 among them. What decides a compilation
(structure, batch and microbatch size, options) is drawn from short lists, what does not is free.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_dp as dp
from tests import models, oracle

pytestmark = pytest.mark.optimized


class Setting(NamedTuple):
    """A tree of shapes, and how its gradients are clipped."""

    shapes: Any
    clip_norm: Any
    rescale: bool


FLAT = {"a": (2,), "b": (), "c": (1, 2)}
DEEP = [(2, 2), {"x": (1,), "y": (4,)}]
SETTINGS = (
    Setting((3,), 1.0, False),
    Setting((3,), 0.0, True),
    Setting((3,), np.inf, False),
    Setting(FLAT, 0.5, True),
    Setting(FLAT, {"a": 0.1, "b": 2.0, "c": 1.0}, False),
    Setting(DEEP, [0.3, {"x": np.inf, "y": 0.0}], False),
    Setting(DEEP, [2.0, 1e-3], True),
)
SIZES = ((4, None), (5, 2))  # of every other setting: each is one program

NUMBERS = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, 1e-30, -1e-30, 1e-15, 1e15, 1e30, -1e30, 3e19, 1e-20]),
)
HOSTILE = st.one_of(NUMBERS, st.sampled_from([np.nan, np.inf, -np.inf]))


@st.composite
def setups(draw):
    index = draw(st.integers(0, len(SETTINGS) - 1))
    size, microbatch_size = SIZES[index % 2]
    x = examples(draw, SETTINGS[index].shapes, size)
    padding = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
    return index, size, microbatch_size, x, padding


def is_shape(node):
    return isinstance(node, tuple)


def examples(draw, shapes, size):
    def leaf(shape):
        count = size * int(np.prod(shape))
        values = draw(st.lists(HOSTILE, min_size=count, max_size=count))
        return np.array(values, np.float32).reshape(size, *shape)

    return jax.tree.map(leaf, shapes, is_leaf=is_shape)


def model_and_options(index):
    shapes, clip_norm, rescale = SETTINGS[index]
    model = jax.tree.map(np.zeros, shapes, is_leaf=is_shape)
    options = {"l2_clip_norm": clip_norm, "rescale_to_unit_norm": rescale, "normalize_by": 2.0}
    return model, options


@functools.cache
def engine(index, microbatch_size):
    model, options = model_and_options(index)
    grad_fn = dp.filter_clipped_grad(models.dot, microbatch_size=microbatch_size, **options)
    model = jax.tree.map(jnp.float32, model)
    return eqx.filter_jit(lambda x, mask: grad_fn(model, x, is_padding_example=mask))


@settings(max_examples=12, deadline=None)
@given(setups())
def test_the_sum_is_that_of_the_oracle(setup):
    index, size, microbatch_size, x, padding = setup
    grads = engine(index, microbatch_size)(x, padding)
    model, options = model_and_options(index)
    truth = oracle.clipped_gradients(models.dot, model, x, is_padding_example=padding, **options)
    parts = truth.contributions
    # Each leaf may be off by its float32 roundings, a few for every example: a part of what the
    # examples add in absolute value, not of the sum, in which they may cancel.
    for found, part in zip(jax.tree.leaves(grads), jax.tree.leaves(parts), strict=True):
        assert np.isfinite(found).all()
        error = np.abs(np.asarray(found, np.float64) - part.sum(0))
        assert (error <= (4e-6 + oracle.room(size)) * np.abs(part).sum(0) + 1e-37).all()
