"""What is said of keys holds for JAX's own: paths that part give other keys, others may not."""

import itertools

import jax
import numpy as np
import pytest

from eqx_dp.checks.keys import CALLS, Again, Along, Calls, Key, Number, is_new, parted

ROOT, STEP, GIVEN = (("argument", i) for i in range(3))
CALL = Calls({STEP: 2}, {ROOT: ()}, frozenset({GIVEN}), {})
FOUR = (Along(0, 1, 4),)


def number(offset, along=()):
    return Number(None, offset, along)


def drawn(path):
    """Keys by all choices of numbers that stand for several, as data."""
    choices = [range(one.span[0], one.span[1] + 1) for one in path]
    for numbers in itertools.product(*choices):
        key = jax.random.key(7)
        for folded in numbers:
            key = jax.random.fold_in(key, folded)
        yield tuple(np.asarray(jax.random.key_data(key)).tolist())


PATHS = [
    (),
    (number(0),),
    (number(1),),
    (number(0, FOUR),),
    (number(3, FOUR),),
    (number(0), number(1)),
    (number(1), number(0, FOUR)),
    (number(2, FOUR), number(0)),
]


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
        (Number(STEP), Number(STEP, 1), True),  # the counter grows by two
        (Number(STEP), Number(STEP, 2), False),  # the next call draws what this one drew
        (Number(STEP), Number(STEP, 0, FOUR), False),
        (Number(STEP), number(3), False),
        (Number(STEP), None, False),
        (Number(GIVEN), Number(GIVEN, 1), False),
        (number(0, FOUR), number(4), True),
        (number(0, FOUR), number(3), False),
        (number(0), number(2**32), False),
        (Again("loop", (number(0),)), number(2), True),
        (Again("loop", (number(0),)), number(1), False),  # the first turn's begins with it
        (Again("loop", (number(0),)), number(0), False),
        (Again("loop", (number(0),)), Again("loop", (number(0),), True), False),
    ],
)
def test_numbers_that_count(a, b, is_parted):
    keys = Key(ROOT, (a, number(1))), Key(ROOT, (b, number(1)))
    found = parted(*keys, CALL)
    if isinstance(a, Again) and isinstance(b, Again):  # inside, a turn draws by 1, and not by 0
        assert found
    else:
        assert found is is_parted


@pytest.mark.parametrize(
    ("path", "loop", "is_fresh"),
    [
        ((Number(STEP),), CALLS, True),
        ((Number(STEP, 0, FOUR),), CALLS, None),  # it reaches into the next calls
        ((Number(GIVEN),), CALLS, True),
        ((Number(GIVEN, 0, FOUR),), CALLS, None),
        ((number(4),), CALLS, False),
        ((), CALLS, False),
        ((None,), CALLS, None),
        ((number(0, (Along("loop", 1, 4),)),), "loop", True),
        ((number(0, (Along("loop", 0, 4),)),), "loop", False),
        ((Again("loop", (number(0),)), number(1)), "loop", True),
        ((Again("loop", (number(0),)), number(0)), "loop", None),
        ((Again("loop", (number(0),)),), "loop", None),  # drawn from, and split
    ],
)
def test_keys_of_each_turn(path, loop, is_fresh):
    assert is_new(Key(ROOT, path), loop, CALL) is is_fresh


def test_other_roots_are_other_keys_where_they_are_known():
    key, other = Key(ROOT, (number(1),)), Key(("constant", b"1"), (number(1),))
    assert parted(key, other, CALL)
    assert not parted(key, other, CALL._replace(same={("constant", b"1"): ROOT, ROOT: ROOT}))
    assert not parted(key, Key(None, (number(2),)), CALL)
    assert not parted(key, key, CALL)


def test_a_carried_key_parts_from_what_is_drawn_and_from_nothing_that_begins_with_it():
    carried = CALL._replace(paths={ROOT: (number(0),)})
    assert is_new(Key(ROOT, (number(1),)), CALLS, carried) is True
    assert parted(Key(ROOT, (number(1),)), Key(ROOT, (number(2),)), carried)
    assert not parted(Key(ROOT, (number(1),)), Key(ROOT, (number(0),)), carried)
    assert is_new(Key(ROOT, (number(0), number(1))), CALLS, carried) is None
