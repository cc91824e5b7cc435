"""Values that are computed where they are needed: only products, entry by entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients.computed_again import MOST_ROUNDINGS, again_or_held
from eqx_dp.gradients.weighted_products import weighted_products
from eqx_dp.programs import equations

MASK = np.random.default_rng(0).random(5) > 0.5


def gradient_of(penalty):
    return jax.grad(lambda x: jnp.sum(penalty(x)))


AGAIN = {
    "mask": lambda x: jnp.where(MASK, jnp.ones_like(x), 0),
    "mask of numbers": lambda x: jnp.ones_like(x) * MASK,
    "squares": gradient_of(lambda x: 0.1 * x**2),
    "product with itself": jax.jit(lambda x: 0.1 * x),
}
HELD = {
    "sum": lambda x: 2 * x + jnp.ones_like(x),
    "function": jnp.exp,
    "quotient": lambda x: 1 / x,
    "many products": lambda x: x**3 * x**3,
    "where it is rounded": lambda x: jnp.where(0.3 * x > 1, x, 0),
    "narrow": lambda x: (x.astype(jnp.bfloat16) * 3).astype(jnp.float32),
    "over entries": jnp.cumsum,
    "down and up again": jax.jit(lambda x: 1e-30 * x * 1e30),
}


@pytest.mark.parametrize("name", [*AGAIN, *HELD])
def test_what_is_computed_again(name):
    function = {**AGAIN, **HELD}[name]
    x = jnp.arange(1.0, 6.0)

    def count(times):
        def program(x):
            (value,) = again_or_held(lambda: [function(x)], np.dtype(np.float32))
            return [value() for _ in range(times)]

        np.testing.assert_array_equal(program(x)[0], function(x))
        return len(list(equations(jax.make_jaxpr(program)(x))))

    assert (count(3) > count(1)) == (name in AGAIN)


def test_bounds_have_room_for_both():
    ones = jnp.ones((1, 1, 1))
    norm, bound, _ = weighted_products(ones, ones, ones)
    room = np.float64(bound[0]) / np.float64(norm[0]) - 1
    assert room >= (2 * MOST_ROUNDINGS + 3) * 2.0**-24


def loss_of(name):
    def loss(model, x):
        for weight in model:
            x = jnp.tanh((weight**2 if name == "squared" else weight) @ x)
        squares = sum(jnp.sum(weight**2) for weight in model)
        return jnp.sum(x) + (0.1 * squares if name == "penalised" else 0)

    return loss


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "weights"), [("squared", 2), pytest.param("penalised", 5, marks=pytest.mark.slow)]
)
def test_nothing_as_large_as_the_model_is_held(name, weights):
    """Else there were three more of them."""
    model, x = list(jnp.ones((3, 128, 128))), jnp.ones((8, 128))
    grad_fn = dp.filter_clipped_grad(loss_of(name), l2_clip_norm=1.0, method="book_keeping")
    memory = jax.jit(grad_fn).lower(model, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < weights * 4 * 128**2
