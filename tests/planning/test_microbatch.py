"""The search for the largest microbatch, against a table of bytes."""

import math

import pytest

from eqx_dp.planning import largest_microbatch


class Bytes:
    """Counts how often it is asked."""

    def __init__(self, fixed, each, bend=0.0):
        self.fixed, self.each, self.bend, self.asked = fixed, each, bend, []

    def __call__(self, size):
        self.asked.append(size)
        return int(self.fixed + self.each * size * (1 + self.bend * math.sin(size)))


@pytest.mark.parametrize("most", [1, 2, 7, 24, 1000])
@pytest.mark.parametrize("limit", [115, 129, 130, 400, 5000])
@pytest.mark.parametrize("guess", [None, lambda n: 90 + 12 * n, lambda n: 10**9, lambda n: 1])
def test_finds_the_largest_in_a_handful_of_looks(most, limit, guess):
    found = Bytes(fixed=100, each=15)
    expected = min(most, (limit - 100) // 15)
    assert largest_microbatch(found, limit, most, guess) == expected
    assert len(found.asked) <= 8


@pytest.mark.parametrize("bend", [0.2, 0.9])
@pytest.mark.parametrize("compiles", [1, 3, 8])
@pytest.mark.parametrize("limit", [200, 700, 3000])
def test_never_picks_what_does_not_fit(bend, compiles, limit):
    found = Bytes(fixed=100, each=10, bend=bend)
    size = largest_microbatch(found, limit, 500, lambda n: 10 * n, compiles)
    assert size in found.asked
    assert found(size) <= limit
    assert len(found.asked) <= compiles + 2


def test_says_so_when_not_even_one_example_fits():
    with pytest.raises(ValueError, match=r"takes 2,147,483,653 bytes a device \(2\.00 GiB\)"):
        largest_microbatch(Bytes(2**31, 5), 2**30, 64)
    for limit, most in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be at least 1, found 0"):
            largest_microbatch(Bytes(1, 1), limit, most)
