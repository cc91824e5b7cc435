"""Programs after their convolutions are channels last: the same results, from another layout.

Entries are small whole numbers, so that results are exact in every dtype and any order.
"""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from eqx_dp.programs import equations
from eqx_dp.rewrites import channels_last
from tests.sharding.losses import mesh_of


def numbers(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def conv(images, kernel, strides=None, padding="SAME", **options):
    strides = strides or (1,) * (images.ndim - 2)
    return lax.conv_general_dilated(images, kernel, strides, padding, **options)


def is_channels_last(equation):
    numbers = equation.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    images, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
    return tuple(map(tuple, numbers)) == (images, kernel, images)


def convolutions(program):
    return [e for e in equations(program) if e.primitive.name == "conv_general_dilated"]


def check(function, *args, is_moved=True):
    """Both programs give the same, one operation after the other and compiled."""
    program = jax.make_jaxpr(function)(*args)
    found = channels_last(program)
    before, after = convolutions(program), convolutions(found)
    assert len(before) == len(after) > 0
    assert all(map(is_channels_last, after)) == is_moved
    assert (found.in_avals, found.out_avals) == (program.in_avals, program.out_avals)
    expected, results = (jex_core.jaxpr_as_fun(p) for p in (program, found))
    for run in (results, jax.jit(results)):
        for one, other in zip(run(*args), expected(*args), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# Shapes of images and kernel, options, and whether the convolution is moved.
LAYOUT = {"dimension_numbers": ("CHWN", "IHWO", "HWNC")}
DILATED = {"lhs_dilation": (2, 3), "rhs_dilation": (1, 2), "padding": ((2, 1), (0, 3))}
KINDS = {
    "2-D": ((2, 3, 7, 6), (4, 3, 3, 2), {}, True),
    "another layout": ((3, 7, 6, 2), (3, 3, 2, 4), LAYOUT, True),
    "dilated": ((2, 3, 7, 6), (4, 3, 3, 2), DILATED, True),
    "groups": ((2, 6, 7, 6), (4, 3, 3, 2), {"feature_group_count": 2}, True),
    "depthwise": ((2, 3, 7, 6), (3, 1, 3, 2), {"feature_group_count": 3}, False),
    "groups of images": ((6, 3, 7, 6), (9, 3, 3, 2), {"batch_group_count": 3}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind):
    images, kernel, options, is_moved = KINDS[kind]
    run = lambda x, w: conv(x, w, **options)  # noqa: E731
    check(run, numbers(*images), numbers(*kernel, seed=1), is_moved=is_moved)


def same(x):
    """A convolution from an array to one of its shape."""
    return jnp.sign(conv(x, numbers(3, 3, 3, 3, seed=1)))


@jax.custom_vjp
def with_backward_rule(x):
    return same(x)


with_backward_rule.defvjp(lambda x: (same(x), None), lambda _, g: (7 * same(g),))

ELSEWHERE = {
    "jit": jax.jit(jax.jit(same)),
    "scan": lambda x: lax.scan(lambda c, y: (same(c), same(y)), x, jnp.stack([x, -x])),
    "while": lambda x: lax.fori_loop(0, jnp.int32(x[0, 0, 0, 0]) + 3, lambda _, x: same(x), x),
    "cond": lambda x: lax.cond(x[0, 0, 0, 0] > 0, same, lambda x: -same(same(x)), x),
    "gradient of remat": jax.grad(lambda x: jnp.sum(jax.checkpoint(same)(x) * x)),
    "custom_vjp": with_backward_rule,
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ELSEWHERE)
def test_wherever_they_are(where):
    check(ELSEWHERE[where], numbers(2, 3, 5, 4))


def test_what_is_on_explicit_axes_stays():
    with jax.set_mesh(mesh_of("explicit", data=2)):
        x = jax.sharding.reshard(numbers(4, 3, 8), P("data"))
        check(lambda x, w: conv(x, w, out_sharding=P("data")), x, numbers(4, 3, 3), is_moved=False)
