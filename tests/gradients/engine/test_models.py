"""Whole models by book-keeping, with the ways that the engine chooses."""

import pytest

from tests.gradients.engine import agreement, models, uses


@agreement.EACH_METHOD
@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_agrees_with_the_oracle(make, method):
    agreement.check(make(), size=4, methods=[method])


@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_what_is_whole(make):
    """What a vision transformer puts in front of its patches, and what a solver loops over."""
    expected = {
        models.vision_transformer: {".token"},
        models.neural_ode: {
            f".field.layers[{i}].{name}" for i in range(2) for name in ("weight", "bias")
        },
    }
    assert set(uses.whole(make())) == expected.get(make, set())


def test_tied_weights_have_two_uses():
    assert uses.kinds(models.stacked_gpt())[".embedding.weight"] == ["lookup", "contraction"]


def test_what_is_frozen_has_no_uses():
    kinds = uses.kinds(models.low_rank_gpt())
    assert len(kinds) == 4
    assert set(map(tuple, kinds.values())) == {("contraction",)}
