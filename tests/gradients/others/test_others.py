"""Losses as others write them, by every method: clipped sums are the oracle's.

What the engine makes of their parameters is its own affair here; that is told in `engine`.
"""

import pytest

from tests.gradients.others import branches, derived, flows, networks, outcasts, penalties
from tests.gradients.others.cases import Recipe
from tests.gradients.others.outcasts import Asked

CASES = [*derived.CASES, *penalties.CASES, *branches.CASES, *flows.CASES, *networks.CASES]
OTHER_WAYS = (
    Asked("ghost", clip=0.3),
    Asked("book_keeping", clip=30.0, microbatch_size=2),
    Asked("per_example", clip=0.3, microbatch_size=2),
)


def test_names_are_different():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_oracle(case: Recipe) -> None:
    outcasts.check(case.make(), Asked("book_keeping"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_another_way_agrees_with_the_oracle(number: int) -> None:
    """Each case by one of the other ways, in turn."""
    case, asked = CASES[number], OTHER_WAYS[number % len(OTHER_WAYS)]
    outcasts.check(case.make(), asked)
