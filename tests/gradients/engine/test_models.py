"""Whole models by book-keeping, with the ways that the engine chooses."""

import pytest

from tests.gradients.engine import agreement, models, uses

pytestmark = pytest.mark.sampled(6)


@pytest.mark.sampled(12)
@agreement.EACH_METHOD
@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_agrees_with_the_oracle(make, method):
    agreement.check(make(), size=4, methods=[method])


@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_nothing_is_whole(make):


def test_what_a_solver_loops_over():
    """Its own backward pass gives the gradients of all parameters in it; the rest is as ever."""
    kinds = uses.kinds(models.neural_ode())
    of_field = {path for path, its in kinds.items() if "vjp" in its}
    assert of_field == {
        f".field.layers[{i}].{name}" for i in range(2) for name in ("weight", "bias")
    }


def test_tied_weights_have_two_uses():


def test_what_is_frozen_has_no_uses():
    kinds = uses.kinds(models.low_rank_gpt())
    assert len(kinds) == 4
    assert set(map(tuple, kinds.values())) == {("contraction",)}
