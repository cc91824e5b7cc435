"""`gather` and `dynamic_slice` of rows: repeated, negative, and out of bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.gradients.engine import agreement
from tests.gradients.engine.kinds import check, normal
from tests.models import Case

# For three examples: repeated rows, negative ones, and rows that are not there (a table of four).
ROWS = np.array([[0, 2, 2, 2, 1], [-1, 3, -4, 0, 3], [1, -9, 7, 4, 1]], np.int32)


def lookup(use, table, rows, ghost=True):
    return check(use, table, rows, kinds=["lookup"], ghost=ghost)


@pytest.mark.parametrize("mode", ["clip", "wrap"])
def test_take(mode):
    lookup(lambda w, t: jnp.take(w, t, axis=0, mode=mode), normal(4, 3), ROWS)


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
def test_at_get(mode):
    rows = ROWS % 4 if mode == "promise_in_bounds" else ROWS
    lookup(lambda w, t: w.at[t].get(mode=mode, fill_value=0), normal(4, 3), rows)


def test_rows_that_are_not_there_add_nothing():
    """What is filled in is no parameter; the norm is that of the rows that are there."""
    everywhere = np.full((3, 5), 7, np.int32)
    lookup(lambda w, t: w.at[t].get(mode="fill", fill_value=2.0), normal(4, 3), everywhere)


@pytest.mark.parametrize("shape", [(4,), (4, 2, 3)], ids=str)
def test_shapes_of_tables(shape):
    lookup(lambda w, t: w[t], normal(*shape), ROWS % 4)


def test_an_index_that_was_promised_to_be_there():
    """Plain indexing: forward reads the last row; backward, as in jax.grad, finds none."""
    lookup(lambda w, t: w[t], normal(4, 3), ROWS)


def test_shapes_of_lookups():
    rows = np.arange(3 * 2 * 3 * 2).reshape(3, 2, 3, 2).astype(np.int32) % 4
    lookup(lambda w, t: w[t], normal(4, 3), rows)
    lookup(lambda w, t: w[t[0, 0, 0]], normal(4, 3), rows)
    lookup(lambda w, t: jax.vmap(jax.vmap(lambda t: w[t], 1), 1)(t), normal(4, 3), rows)


def test_offset_dimensions_in_front():
    """A gather may put the row's dimensions before those of the lookups."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0, 2), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    lookup(
        lambda w, t: lax.gather(w, t[:, None], numbers, (1, 2, 3), mode="clip"),
        normal(4, 2, 3),
        ROWS,
    )


def test_dynamic_slice_of_one_row():
    rows = np.array([0, -2, 9], np.int32)
    lookup(lambda w, t: lax.dynamic_slice(w, (t, 0 * t), (1, 3)), normal(4, 3), rows)
    lookup(lambda w, t: lax.dynamic_index_in_dim(w, t), normal(4, 3), rows)


def test_two_lookups_of_one_table():
    check(
        lambda w, t: w[t] * jnp.sin(w[t[::-1]]),
        normal(4, 3),
        ROWS % 4,
        kinds=["lookup", "lookup"],
        ghost=True,
    )


def test_a_table_with_one_row():
    lookup(lambda w, t: jnp.take(w, t, axis=0, mode="clip"), normal(1, 3), ROWS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32])
def test_narrow_indices(dtype):
    """Bytes as tokens; a table with more rows than a byte can count is no lookup site."""
    # JAX itself refuses a table that is too long for signed indices.
    modes = () if dtype is np.int8 else ("clip", "fill")
    rows = (ROWS % 100).astype(dtype)
    lookup(lambda w, t: jnp.take(w, t, axis=0, mode="clip"), normal(100, 2), rows)
    lookup(lambda w, t: w.at[t].get(mode="fill", fill_value=0), normal(100, 2), rows)
    for mode in modes:
        agreement.check(
            Case(
                f"narrow {mode}",
                jnp.asarray(normal(300, 2), jnp.float32),
                lambda w, t, mode=mode: jnp.sum(jnp.sin(w.at[t].get(mode=mode, fill_value=0))),
                lambda rng, size: (jnp.asarray(rng.integers(0, 100, (size, 5)), dtype),),
            )
        )


def test_a_second_index_out_of_bounds():
    """The row is there, the column is not: nothing is looked up."""
    agreement.check(
        Case(
            "second index",
            jnp.asarray(normal(4, 1), jnp.float32),
            lambda w, t, c: jnp.sum(jnp.sin(w.at[t, c].get(mode="fill", fill_value=0))),
            lambda rng, size: (
                jnp.asarray(rng.integers(0, 4, (size, 5)), jnp.int32),
                jnp.asarray(rng.integers(0, 2, (size, 5)), jnp.int32),
            ),
        )
    )
