"""Sizes of compiled programs: what ghost needs of memory, and that depth costs no code."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp
from tests.benchmarks.rows import gpt_stacked

pytestmark = [pytest.mark.optimized, pytest.mark.sampled(2)]

SIZES = {"batch": 8, "length": 32, "width": 32, "depth": 3, "vocabulary": 64}


def ordinary(row):
    return eqx.filter_grad(
        lambda model, *batch: jnp.sum(jax.vmap(row.loss, (None, 0, 0))(model, *batch))
    )


def private(row, method):
    return dp.filter_clipped_grad(row.loss, l2_clip_norm=1.0, method=method)


def lowered(grad, row):
    params, static = eqx.partition(row.model, eqx.is_array)
    of_params = jax.jit(lambda params, *batch: grad(eqx.combine(params, static), *batch))
    return of_params.lower(params, *row.batch)


def temporary_bytes(grad, row):
    return lowered(grad, row).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_book_keeping_holds_no_more_than_it_needs():
    """Cotangents of biases and norm layers, stacked by the scan, would make it 3.7 x.

    The goal is 2 x. It is 1.8 x without the conditional that keeps the compiler from computing
    values twice (`computed_once`), which the clip bound needs, and 2.7 x with it.
    """
    row = gpt_stacked(**SIZES)
    book_keeping = temporary_bytes(private(row, "book_keeping"), row)
    assert book_keeping <= 2.8 * temporary_bytes(ordinary(row), row)


@pytest.mark.slow
def test_ghost_has_little_more_than_the_memory_of_ordinary_training():
    """With its layers under scan and rematerialised."""
    row = gpt_stacked(**SIZES)
    ghost = temporary_bytes(private(row, "ghost"), row)
    assert ghost <= 1.5 * temporary_bytes(ordinary(row), row)


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("book_keeping", 4),
        ("per_example", None),
        pytest.param("ghost", None, marks=pytest.mark.exhaustive),
    ],
)
def test_a_leaf_that_the_loss_does_not_use_is_not_held_for_each_example(method, size):
    """And it changes nothing, whatever is in it."""
    entries, examples = 100_000, 16
    model = {"used": jnp.ones((3, 2)), "unused": jnp.full(entries, jnp.nan)}
    grad_fn = dp.filter_value_and_clipped_grad(
        lambda model, x: jnp.sum(jnp.tanh(x @ model["used"])),
        l2_clip_norm=1.0,
        method=method,
        microbatch_size=size,
    )
    x = jnp.arange(3.0 * examples).reshape(examples, 3)
    program = jax.jit(grad_fn).lower(model, x).compile()
    # The sum itself, and with microbatches the total that it is added to.
    assert program.memory_analysis().temp_size_in_bytes < 3 * 4 * entries
    per_example, grads = program(model, x)
    assert not jnp.any(grads["unused"])
    alone, expected = jax.jit(grad_fn)({"used": model["used"], "unused": jnp.ones(1)}, x)
    assert jnp.array_equal(grads["used"], expected["used"])
    assert jnp.array_equal(per_example.grad_norm, alone.grad_norm)
