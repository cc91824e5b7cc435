"""Sizes of compiled programs: what each method needs of memory."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp

from .rows import Row, gpt_stacked

pytestmark = pytest.mark.slow

SIZES = {"batch": 8, "length": 32, "width": 32, "depth": 3, "vocabulary": 64}


def ordinary(row):
    return eqx.filter_grad(
        lambda model, *batch: jnp.sum(jax.vmap(functools.partial(row.loss, model))(*batch))
    )


def private(row, method):
    return dp.filter_clipped_grad(row.loss, l2_clip_norm=1.0, method=method)


def temporary_bytes(grad, row):
    params, static = eqx.partition(row.model, eqx.is_array)
    of_params = jax.jit(lambda params, *batch: grad(eqx.combine(params, static), *batch))
    compiled = of_params.lower(params, *row.batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("method", "most"), [("book_keeping", 2.8), ("ghost", 1.5)])
def test_a_model_under_scan_and_remat_takes_little_more_than_in_ordinary_training(method, most):
    """By book-keeping, cotangents of biases and norm layers, stacked by the scan, would make it
    3.7 x.

    The goal is 2 x. It is 1.8 x without the conditional that keeps the compiler from computing
    values twice (`computed_once`), which the clip bound needs, and 2.7 x with it.
    """
    row = gpt_stacked(**SIZES)
    assert temporary_bytes(private(row, method), row) <= most * temporary_bytes(ordinary(row), row)


def test_ghost_holds_the_patches_of_one_convolution_at_a_time():
    """Kernels are formed from patches; with those of all nine layers at once it is 4.5 x."""

    def loss(kernels, x):
        for kernel in kernels:
            x = jax.nn.relu(jax.lax.conv(x[None], kernel, (1, 1), "SAME")[0])
        return jnp.mean(x**2)

    kernels = [jnp.ones((8, channels, 3, 3)) for channels in (3, *[8] * 8)]
    row = Row("convolutions", kernels, loss, (jnp.ones((8, 3, 16, 16)),))
    ghost = temporary_bytes(private(row, "ghost"), row)
    assert ghost <= 2 * temporary_bytes(ordinary(row), row)
