"""A fixed part of `tests.hostile_losses`, which has the description."""

import pytest

from tests import hostile_losses


@pytest.mark.slow
@pytest.mark.optimized
def test_no_example_adds_more_than_the_clip_norm():
    found = hostile_losses.measure(6, 30, seed=2)
    assert len(found) == 3 * 3
    for combination, its in found.items():
        assert 0.999 < max(share for share, _ in its) <= 1, combination  # something is clipped
        assert not all(zero for _, zero in its), combination
