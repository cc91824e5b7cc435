"""What an error shows of what it found."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from eqx_dp.shown import shown


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "text", PartitionSpec("data"), (None, "a")])
def test_what_is_short_and_public_is_shown_as_it_is(value):
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.full((2, 3), 7.5), "an array of float64 with shape (2, 3)"),
        (jnp.ones(2), "an array of float32 with shape (2,)"),
        (jax.random.key(0), "an array of key<fry> with shape ()"),
        ((1, np.full(2, 7)), "(1, an array of int64 with shape (2,))"),
        ([np.zeros(2)] * 9, "a value of type list"),
        ("x" * 81, "a value of type str"),
        (functools.partial(print, np.full(2, 7)), "a value of type partial"),
        (eqx.nn.Linear(2, 2, key=jax.random.key(0)), "a value of type Linear"),
        (eqx.nn.Linear, "the type Linear"),
    ],
)
def test_arrays_and_what_may_hold_them_are_not(value, expected):
    assert shown(value) == expected
