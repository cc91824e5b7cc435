"""What is said of keys holds for JAX's own: paths that part give other keys, others may not."""

import itertools

import jax
import numpy as np
import pytest

from eqx_dp.checks.key_paths import independent, is_new_each_turn, paths_part
from eqx_dp.checks.terms import (
    UNKNOWN,
    Affine,
    Again,
    Each,
    Key,
    Listed,
    Root,
    Span,
    Turns,
    number,
    plus,
)

STEP = Root(("argument", "step"), frozenset({"calls"}))
COUNTERS = {STEP.name: Turns("calls", None, 1, None)}
ROOT = Root(("argument", "key"))


def drawn(path):
    """Keys by all choices of numbers that stand for several, as data."""
    choices = [range(s.start, s.stop) if isinstance(s, Span) else s.values for s in path]
    for numbers in itertools.product(*choices):
        key = jax.random.key(7)
        for folded in numbers:
            key = jax.random.fold_in(key, folded)
        yield tuple(np.asarray(jax.random.key_data(key)).tolist())


PATHS = [
    (),
    (number(0),),
    (number(1),),
    (Span(0, 3),),
    (Span(3, 5),),
    (Listed((1, 4)),),
    (number(0), number(1)),
    (number(1), Span(0, 2)),
    (Span(2, 4), number(0)),
]


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(PATHS, 2)))
def test_keys_whose_paths_part_are_other_keys(a, b):
    shared = set(drawn(a)) & set(drawn(b))
    parted = paths_part(a, b, {})
    if parted:
        assert not shared
    elif len(a) == len(b):
        assert shared


def test_a_split_is_a_fold():
    key = jax.random.key(3)
    split = jax.random.key_data(jax.random.split(key, 4))
    folded = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_array_equal(split, np.stack(folded))


@pytest.mark.parametrize(
    ("a", "b", "parted"),
    [
        (STEP, plus(STEP, 1, 1), False),  # the next call draws again what this one drew
        (plus(STEP, 2, 0), plus(STEP, 2, 1), True),
        (plus(STEP, 2, 0), plus(STEP, 2, 4), False),
        (STEP, plus(STEP, 1, 2**32), False),
        (STEP, number(3), None),
        (STEP, UNKNOWN, None),
        (Each("loop", Span(0, 4)), number(5), True),
        (Each("loop", Span(0, 4)), number(3), False),
    ],
)
def test_numbers_that_count(a, b, parted):
    assert paths_part((a,), (b,), COUNTERS) is parted


@pytest.mark.parametrize(
    ("path", "is_new"),
    [
        ((STEP,), True),
        ((number(1), Affine(STEP, 3, 7)), True),
        ((Affine(STEP, 2**31, 0),), None),  # two values
        ((number(4),), False),
        ((), False),
        ((UNKNOWN,), None),
        ((Root("made", frozenset({"calls"})),), None),
    ],
)
def test_keys_of_each_call(path, is_new):
    assert is_new_each_turn(Key(ROOT, path), "calls", COUNTERS) is is_new


@pytest.mark.parametrize(
    ("carried", "drawn", "is_new"),
    [
        (number(0), (number(1),), True),
        (number(0), (number(0),), False),
        (number(0), (), False),  # drawn from, and split
        (number(0), (number(0), number(1)), False),
    ],
)
def test_a_key_that_a_loop_carries(carried, drawn, is_new):
    path = (Again("loop", (carried,), False), *drawn)
    assert is_new_each_turn(Key(ROOT, path), "loop", {}) is is_new


def test_other_roots_are_other_keys_where_they_are_known():
    key, other = Key(ROOT, (number(1),)), Key(Root(("constant", b"1")), (number(1),))
    assert independent(key, other, {}) is True
    assert independent(key, Key(UNKNOWN, (number(2),)), {}) is None
    assert independent(key, key, {}) is False
