"""Arrays that go side by side, and come apart as they were."""

import jax.numpy as jnp
import pytest

from eqx_dp.rewrites import apart, side_by_side, together


def test_those_of_one_kind_go_together_up_to_a_size():
    assert together(["a", "a", "b", "a", "a"], [2, 2, 9, 2, 2], 4) == [[0, 1], [2], [3, 4]]


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2, 3)] * 3, [(), (4,), (0, 2)], [(0,), (0,)], [()]])
def test_what_is_joined_comes_apart(shapes):
    arrays = [jnp.full(shape, i) for i, shape in enumerate(shapes)]
    for found, given in zip(apart(side_by_side(arrays), shapes), arrays, strict=True):
        assert found.shape == given.shape
        assert jnp.array_equal(found, given)
