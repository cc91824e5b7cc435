"""Whole models by book-keeping, with the ways that the engine chooses."""

import pytest

from tests.gradients.engine import agreement, models, surveys


@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_agrees_with_the_oracle(make):
    agreement.check(make(), size=4)


@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_what_is_whole(make):
    """Only what a vision transformer puts in front of its patches has no site."""
    expected = {".token"} if make is models.vision_transformer else set()
    assert set(surveys.whole(make())) == expected


def test_tied_weights_have_two_sites():
    assert surveys.kinds(models.stacked_gpt())[".embedding.weight"] == ["lookup", "contraction"]


def test_what_is_frozen_has_no_sites():
    kinds = surveys.kinds(models.low_rank_gpt())
    assert len(kinds) == 4
    assert set(map(tuple, kinds.values())) == {("contraction",)}
