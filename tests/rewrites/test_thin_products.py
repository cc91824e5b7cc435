"""Products of stacks of thin matrices, whose transposed results go into a conditional.

As they are, XLA of JAX 0.10 ends the process on a CPU.
"""

import subprocess
import sys

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_dp as dp
from eqx_dp.rewrites import safe_in_conditionals
from tests import oracle
from tests.tiers import curated


@pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 32, 32), (8, 3, 3)])
def test_what_is_transposed_goes_into_a_conditional(sizes):
    added, rows, columns = sizes

    def product(x, y):
        found = lax.optimization_barrier(jnp.einsum("bij,bik->bjk", x, y))
        return found.mT, found

    def branched(x, y, choice):
        program = safe_in_conditionals(jax.make_jaxpr(product)(x, y))
        there, back = lax.optimization_barrier(jex_core.jaxpr_as_fun(program)(x, y))
        return lax.cond(choice, jnp.multiply, lambda a, b: jnp.tanh(a) + b, there, back.mT)

    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(-2, 3, (5, added, n)), jnp.float32) for n in (rows, columns))
    expected = np.einsum("bij,bik->bkj", x, y) ** 2
    np.testing.assert_array_equal(jax.jit(branched)(x, y, True), expected)


def attention(model, x):
    q, k, v = (jax.vmap(model[name])(x) for name in "qkv")
    return jax.nn.softmax(q @ k.T) @ v


@pytest.mark.parametrize("method", curated(["ghost", "book_keeping", "per_example"], ["ghost"]))
def test_attention_of_three_tokens(method):
    keys = jax.random.split(jax.random.key(0), 4)
    model = {name: eqx.nn.Linear(4, 4, key=key) for name, key in zip("qkv", keys, strict=False)}

    def loss(model, x):
        return jnp.mean(jnp.square(jax.checkpoint(attention)(model, x)))

    xs = jax.random.normal(keys[3], (5, 3, 4))
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=0.1, method=method)
    truth = oracle.clipped_gradients(loss, model, xs, l2_clip_norm=0.1)
    assert oracle.relative_error(eqx.filter_jit(grad_fn)(model, xs), truth.grads) < 1e-5


PROGRAM = """
import jax, jax.numpy as jnp, eqx_dp as dp
for weight in (
    lambda w: jax.checkpoint(lambda w: w.T)(w),
    lambda w: jax.checkpoint(jax.jit(lambda w: w.T))(w),
    lambda w: jax.checkpoint(lambda w: w)(w.T),
):
    loss = lambda model, x: jnp.sum((x @ weight(model["w"])) ** 2)
    for size in (None, 2):
        clipped = dp.filter_clipped_grad(
            loss, l2_clip_norm=1e9, method="per_example", microbatch_size=size
        )
        model, xs = dict(w=jnp.ones((4, 4))), jnp.ones((8, 3, 4))
        print(jax.jit(clipped)(model, xs)["w"].sum())
"""


@pytest.mark.slow
def test_gradients_of_weights_that_are_transposed_in_a_checkpoint():
    """In a process of its own, which XLA would end."""
    program = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(program, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert set(map(float, found.stdout.split())) == {2 * 4 * 16 * 8 * 3}
