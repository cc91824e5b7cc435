"""A product with a constant one is its other factor."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_dp.programs import equations
from eqx_dp.rewrites import without_ones

# Whether anything is left to compute.
CASES = {
    "before": (lambda x: 1.0 * x, False),
    "quotient": (lambda x: x / 1.0, False),
    "in_a_scan": (lambda x: jax.lax.scan(lambda c, row: (c, row * 1.0), 0.0, x)[1], False),
    "minus_one": (lambda x: x * -1.0, True),
    "inverse": (lambda x: 1.0 / x, True),
    "array": (lambda x: x * jnp.ones((3, 1)), True),
    "larger": (lambda x: x[0, 0] * jnp.float32(1.0) * jnp.ones(2), True),
}


@pytest.mark.parametrize("case", CASES)
def test_multiplications_by_one_are_gone(case):
    function, is_left = CASES[case]
    x = jnp.array([[1.0, jnp.inf], [-0.0, jnp.nan], [1e-30, 3.0]])
    program = without_ones(jax.make_jaxpr(function)(x))
    primitives = {equation.primitive.name for equation in equations(program)}
    assert bool({"mul", "div"} & primitives) == is_left
    (found,) = jex_core.jaxpr_as_fun(program)(x)
    np.testing.assert_array_equal(found, function(x))
