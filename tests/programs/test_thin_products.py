"""Products of stacks of thin matrices become sums: the same results, and XLA compiles them."""

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_dp as dp
from eqx_dp.programs import equations, thin_products_summed
from tests import oracle

pytestmark = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="nothing is rewritten: this JAX has no such error"
)

THIN = [
    ("bij,bik->bjk", (5, 3, 4), (5, 3, 6)),
    ("bji,bki->bjk", (5, 4, 2), (5, 6, 2)),
    ("bij,bik->bjk", (5, 8, 3), (5, 8, 2)),
    ("abijc,abkij->abck", (2, 3, 1, 3, 4), (2, 3, 5, 1, 3)),
    ("ibj,ikb->bkj", (2, 5, 4), (2, 6, 5)),
]
OTHERS = [
    ("bij,bik->bjk", (5, 4, 2), (5, 4, 4)),
    ("bij,bik->bjk", (1, 3, 4), (1, 3, 4)),
    ("bi,bik->bk", (5, 3), (5, 3, 4)),
    ("ij,ik->jk", (3, 4), (3, 6)),
    ("bj,bk->bjk", (5, 3), (5, 2)),
]


def numbers(shape, dtype):
    """Small whole numbers: their products and sums are exact."""
    return jnp.asarray(np.random.default_rng(len(shape)).integers(-2, 3, shape), dtype)


def has_product(program):
    return any(equation.primitive.name == "dot_general" for equation in equations(program))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.complex64])
@pytest.mark.parametrize(("spec", "first", "second"), THIN)
def test_thin_products_are_sums(spec, first, second, dtype):
    factors = numbers(first, dtype), numbers(second, dtype)
    program = jax.make_jaxpr(lambda x, y: jnp.einsum(spec, x, y))(*factors)
    written = thin_products_summed(program)
    assert has_product(program)
    assert not has_product(written)
    (found,) = jex_core.jaxpr_as_fun(written)(*factors)
    (expected,) = jex_core.jaxpr_as_fun(program)(*factors)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("spec", "first", "second"), OTHERS)
def test_others_stay(spec, first, second):
    factors = jnp.ones(first), jnp.ones(second)
    program = jax.make_jaxpr(lambda x, y: jnp.einsum(spec, x, y))(*factors)
    assert thin_products_summed(program) is program


@pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 32, 32), (8, 3, 3)])
def test_what_is_transposed_twice_goes_into_a_conditional(sizes):
    """Written as it is, this program ends the process."""
    added, rows, columns = sizes

    @jax.jit
    def twice(x, y):
        product = jnp.einsum("bij,bik->bjk", x, y)
        return product, product.mT

    def branched(x, y, choice):
        product, there = twice(x, y)
        return lax.cond(choice, jnp.multiply, lambda a, b: jnp.tanh(a) + b, there, product.mT)

    x, y = numbers((5, added, rows), np.float32), numbers((5, added, columns), np.float32)
    written = thin_products_summed(jax.make_jaxpr(branched)(x, y, True))
    (found,) = jax.jit(jex_core.jaxpr_as_fun(written))(x, y, True)
    np.testing.assert_array_equal(found, np.einsum("bij,bik->bkj", x, y) ** 2)


def attention(model, x):
    q, k, v = (jax.vmap(model[name])(x) for name in "qkv")
    return jax.nn.softmax(q @ k.T) @ v


@pytest.mark.parametrize("method", ["book_keeping", "ghost", "per_example"])
@pytest.mark.parametrize("within", [lambda f: f, jax.jit, jax.checkpoint])
def test_attention_of_three_tokens(method, within):
    """The weight and the bias of `v` both meet a product of thin matrices, one its transpose."""
    keys = jax.random.split(jax.random.key(0), 4)
    model = {name: eqx.nn.Linear(4, 4, key=key) for name, key in zip("qkv", keys, strict=False)}

    def loss(model, x):
        return jnp.mean(jnp.square(within(attention)(model, x)))

    xs = jax.random.normal(keys[3], (5, 3, 4))
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=0.1, method=method)
    truth = oracle.clipped_gradients(loss, model, xs, l2_clip_norm=0.1)
    assert oracle.relative_error(eqx.filter_jit(grad_fn)(model, xs), truth.grads) < 1e-5
