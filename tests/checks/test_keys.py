"""What is said of keys holds for JAX's own: paths that part give other keys, others may not."""

import itertools

import jax
import numpy as np
import pytest

from eqx_dp.checks.keys import CALLS, FIRST, Along, Calls, Key, Number, is_new, parted

ROOT, STEP, GIVEN = (("argument", i) for i in range(3))
CALL = Calls({STEP: 2}, {ROOT: ()}, frozenset({GIVEN}), {})
CARRIED = CALL._replace(paths={ROOT: (Number(None, 0),)})
FOUR = (Along(FIRST, 1, 4),)
PATHS = [
    (),
    (Number(None, 0),),
    (Number(None, 1),),
    (Number(None, 0, FOUR),),
    (Number(None, 3, FOUR),),
    (Number(None, 0), Number(None, 1)),
    (Number(None, 1), Number(None, 0, FOUR)),
    (Number(None, 2, FOUR), Number(None, 0)),
]


def drawn(path):
    """Keys by all choices of numbers that stand for several, as data."""
    for numbers in itertools.product(*(range(one.span[0], one.span[1] + 1) for one in path)):
        key = jax.random.key(7)
        for folded in numbers:
            key = jax.random.fold_in(key, folded)
        yield tuple(np.asarray(jax.random.key_data(key)).tolist())


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(PATHS, 2)))
def test_keys_whose_paths_part_are_other_keys(a, b):
    shared = set(drawn(a)) & set(drawn(b))
    if parted(Key(ROOT, a), Key(ROOT, b), CALL):
        assert not shared
    elif len(a) == len(b):
        assert shared


def test_a_split_is_a_fold():
    key = jax.random.key(3)
    split = jax.random.key_data(jax.random.split(key, 4))
    folded = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_array_equal(split, np.stack(folded))


@pytest.mark.parametrize(
    ("a", "b", "is_parted"),
    [
        (Number(STEP), Number(STEP, 1), False),  # another call reaches it
        (Number(STEP), Number(None, 3), False),
        (Number(STEP), None, False),
        (Number(GIVEN), Number(GIVEN, 1), False),
        (Number(None, 0, FOUR), Number(None, 4), True),
        (Number(None, 0, FOUR), Number(None, 3), False),
        (Number(None, 0), Number(None, 2**32), False),
    ],
)
def test_numbers_that_count(a, b, is_parted):
    assert parted(Key(ROOT, (a,)), Key(ROOT, (b,)), CALL) is is_parted
    # What follows is compared where the numbers are the same.
    assert parted(Key(ROOT, (a, Number(None, 1))), Key(ROOT, (a, Number(None, 2))), CALL)


@pytest.mark.parametrize(
    ("path", "loop", "calls", "is_fresh"),
    [
        ((Number(STEP),), CALLS, CALL, True),
        ((Number(STEP, 0, FOUR),), CALLS, CALL, None),  # it reaches into the next calls
        ((Number(GIVEN),), CALLS, CALL, True),
        ((Number(GIVEN, 0, FOUR),), CALLS, CALL, None),
        ((Number(None, 4),), CALLS, CALL, False),
        ((), CALLS, CALL, False),
        ((None,), CALLS, CALL, None),
        ((None, Number(STEP)), CALLS, CALL, None),
        ((Number(None, 0, (Along("loop", 1, 4),)),), "loop", CALL, True),
        ((Number(None, 0, (Along("other", 1, 4),)),), "loop", CALL, False),
        ((Number(None, 0, (Along("loop", 1, 4), Along("other", 2, 4))),), "loop", CALL, None),
        ((Number(None, 1),), CALLS, CARRIED, True),
        ((Number(None, 0), Number(None, 1)), CALLS, CARRIED, None),
        ((Number(STEP),), CALLS, CARRIED, None),  # at step 0 it is the key that is carried
    ],
)
def test_keys_of_each_turn(path, loop, calls, is_fresh):
    found = is_new(Key(ROOT, path), loop, calls)
    assert found is is_fresh or (is_fresh is None and found is not True)


def test_other_roots_are_other_keys_where_they_are_known():
    key, other = Key(ROOT, (Number(None, 1),)), Key(("constant", b"1"), (Number(None, 1),))
    assert parted(key, other, CALL)
    assert not parted(key, other, CALL._replace(same={("constant", b"1"): ROOT, ROOT: ROOT}))
    assert not parted(key, Key(None, (Number(None, 2),)), CALL)
    assert not parted(key, key, CALL)


def test_a_carried_key_parts_from_nothing_that_begins_with_it():
    one, two, carried = (Key(ROOT, (Number(None, i),)) for i in (1, 2, 0))
    assert parted(one, two, CARRIED)
    assert not parted(one, carried, CARRIED)
