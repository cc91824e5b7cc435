"""Whole models by book-keeping, with the ways that the engine chooses."""

import pytest

from tests.gradients.engine import agreement, models, uses

pytestmark = pytest.mark.sampled(6)


@pytest.mark.sampled(12)
@agreement.EACH_METHOD
@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_agrees_with_the_oracle(make, method):
    agreement.check(make(), size=4, methods=[method])


def test_what_is_frozen_has_no_uses():
    kinds = uses.kinds(models.low_rank_gpt())
    assert len(kinds) == 4
    assert set(map(tuple, kinds.values())) == {("contraction",)}
