"""What is said of keys holds for JAX's own: paths that part give other keys, others may not."""

import itertools

import jax
import numpy as np
import pytest

from eqx_dp.checks.keys import FIRST, Along, Calls, Key, Number, parted

ROOT = ("argument", 0)
CALL = Calls({}, {ROOT: ()}, frozenset(), {})
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
