"""What the check takes values for: masks, indices, keys, streams; against what they truly are.

The rules are internal. A whole step that is checked meets few of them, and says only whether it is
fine: many mutants of them were found by no step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.random import fold_in, split

from eqx_dp.checks import streams
from eqx_dp.checks.facts import ANY, DATA, Fact, Reach, Row, Sum, either
from eqx_dp.checks.privacy_flow import PrivacyFlow
from eqx_dp.checks.roles import MASK
from eqx_dp.checks.streams import CALL, EVERY, Given, Key, Stream, Use
from eqx_dp.programs import Context, Loop

PRIVATE = Reach(DATA, "", True)


def fact_of(function, *known):
    """The fact about a function's result, from arguments and facts about them."""
    arguments, facts = zip(*known, strict=True)
    (fact,) = PrivacyFlow([]).program(jax.make_jaxpr(function)(*arguments), [*facts], Context())
    return fact


# Masks, and other private booleans.

MASKS = {
    "as it came": (lambda m, b: m, True),
    "named": (lambda m, b: checkpoint_name(m, "mask"), True),
    "or": (lambda m, b: b | m, True),
    "and": (lambda m, b: m & b, False),
    "not": (lambda m, b: ~m, False),
    "and itself": (lambda m, b: m & m, True),
    "and True": (lambda m, b: m & np.ones(6, bool), True),
    "and False": (lambda m, b: m & np.zeros(6, bool), False),
    "chosen from two": (lambda m, b: jnp.where(b, True, m), True),
    "chosen from others": (lambda m, b: jnp.where(m, b, m), False),
    "chosen instead of others": (lambda m, b: jnp.where(b, m, ~m), False),
    "it chooses": (lambda m, b: jnp.where(m, b, b), False),
    "turned round": (lambda m, b: m[::-1], False),
    "in another shape": (lambda m, b: m.reshape(2, 3).T[None], True),
    "spread": (lambda m, b: jnp.broadcast_to(m[:, None], (6, 4)), True),
    "a part": (lambda m, b: m[:4], False),
    "numbers": (lambda m, b: m.astype(jnp.int32), False),
    "no mask at all": (lambda m, b: m | ~m, True),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_still_the_mask(name):
    function, is_mask = MASKS[name]
    m, b = np.random.default_rng(0).random((2, 6)) < 0.5
    row = Row(6, 0)
    facts = (
        Fact(PRIVATE, (row._replace(chosen_by=ANY),), token=MASK),
        Fact(PRIVATE, (row,)),
    )
    fact = fact_of(function, *zip((m, b), facts, strict=True))
    assert (fact.token == MASK) == is_mask
    if is_mask:  # where the mask is True the result is, too
        assert np.all(function(np.ones(6, bool), jnp.asarray(b)))


# Indices, and rows that are looked up by them.

INDEX = "index", "i"
NEGATIVE = "lt", INDEX, 0
LOOKUPS = {
    "as it came": (lambda x, i, n: i, INDEX),
    "another shape": (lambda x, i, n: i[:, None].reshape(1, 5).T, INDEX),
    "wider": (lambda x, i, n: n.astype(jnp.int32), ("index", "n")),
    "narrower": (lambda x, i, n: i.astype(jnp.int8), None),
    "negative": (lambda x, i, n: i < 0, NEGATIVE),
    "more": (lambda x, i, n: i + 6, ("add", INDEX, 6)),
    "from the end": (
        lambda x, i, n: jnp.where(i < 0, i + 6, i),
        ("select_n", NEGATIVE, INDEX, ("add", INDEX, 6)),
    ),
    "more by data": (lambda x, i, n: i + x[0, 0].astype(int), None),
    "twice": (lambda x, i, n: 2 * i, None),
}


def known_rows():
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    i, n = np.array([3, 1, 0, -1, 4], np.int32), np.arange(6, dtype=np.int16)
    places = (Row(6, 0), Row(6, 1)), (Row(5, 0),), (Row(6, 0),)
    tokens = None, INDEX, ("index", "n")
    facts = [Fact(PRIVATE, its, token=token) for its, token in zip(places, tokens, strict=True)]
    return [*zip((x, i, n), facts, strict=True)]


@pytest.mark.parametrize("name", LOOKUPS)
def test_what_is_still_the_index(name):
    function, said = LOOKUPS[name]
    assert (fact_of(function, *known_rows()).token or None) == said


def looked_up(x, i, sizes, *numbers):
    return lax.gather(x, i[:, None], lax.GatherDimensionNumbers(*numbers), sizes)


def at(x, i):
    return x.at[i].get(mode="clip", wrap_negative_indices=False)


CHOSEN = {
    "rows": (lambda x, i, n: x[i], 0),
    "rows, without a wrap": (lambda x, i, n: at(x, i), 0),
    "rows, with a wrap by fewer": (lambda x, i, n: at(x, jnp.where(i < 0, i + 5, i)), None),
    "rows in another shape": (lambda x, i, n: x[i[:, None]], 0),
    "rows behind": (lambda x, i, n: x[i[None]], 1),
    "columns": (lambda x, i, n: x[:, i % 4], None),
    "other rows": (lambda x, i, n: x[i + 1], None),
    "as many as there are": (lambda x, i, n: x[n], None),
    "part of the rows": (lambda x, i, n: x[:5][i], None),
    "two rows at once": (lambda x, i, n: looked_up(x, i, (2, 4), (1, 2), (), (0,)), None),
    "of one row": (lambda x, i, n: looked_up(x, i, (1, 1), (1,), (1,), (1,)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_rows_that_an_index_chooses(name):
    function, dim = CHOSEN[name]
    (x, _), (i, _), (n, _) = known = known_rows()
    fact = fact_of(function, *known)
    assert fact.reach.why == DATA
    expected = [None] * len(fact.places)
    if dim is not None:
        expected[dim] = Row(5, 0, chosen_by="i")
        for entry in range(5):  # an entry of the index moves its own rows alone
            other = np.where(np.arange(5) == entry, 2, i)
            moves = np.argwhere(
                function(jnp.asarray(x), other, n) != function(jnp.asarray(x), i, n)
            )
            assert {*moves[:, dim]} == {entry}
    assert fact.places == tuple(expected)


def test_an_index_of_pairs_or_of_columns_chooses_no_rows():
    (x, of_x), (i, of_i), _ = known_rows()
    pairs = of_i._replace(places=(Row(5, 0), Row(5, 1)))
    known = fact_of(lambda x, i: x[i], (x, of_x), (np.stack([i, i], 1), pairs))
    assert known.places == (None, None, None)
    # Of each column another row: an entry of the index has no row of its own.
    numbers = np.zeros((4, 1), np.int32), of_i._replace(places=(Row(4, 0), None))
    batching = {"operand_batching_dims": (1,), "start_indices_batching_dims": (0,)}
    dims = lax.GatherDimensionNumbers((), (0,), (0,), **batching)
    of_columns = lambda x, i: lax.gather(x, i[..., None], dims, (1, 1))  # noqa: E731
    assert fact_of(of_columns, (x, of_x), numbers).places == (None, None)
    # An index as it came, of which nothing is known.
    rows = lax.GatherDimensionNumbers((1,), (0,), (0,))
    unknown = np.zeros((5, 1), np.int32), Fact(PRIVATE, (Row(5, 0), None))
    found = fact_of(lambda x, i: lax.gather(x, i, rows, (1, 4)), (x, of_x), unknown)
    assert found.places == (None, None)


def test_a_value_that_is_one_of_two():
    row, released = Row(6, 0), Fact(Reach(is_random=True))
    mask = Fact(PRIVATE, (row,), frozenset("a"), token=MASK)
    found = either([mask, mask._replace(turns=frozenset("b"))])
    assert found == mask._replace(turns=frozenset("ab"))
    assert either([mask, Fact(PRIVATE, (row,))]).token is None
    assert either([Fact(token=MASK), Fact(token=INDEX), Fact(token=MASK)]).token is None
    assert either([mask, Fact(places=(None,))]).places == (None,)
    assert either([released, mask]).reach == PRIVATE._replace(is_random=True)
    assert either([Fact(sum=Sum(())), released]).reach.is_random
    assert either([Fact(sum=Sum(())), mask]).reach == PRIVATE
    assert not either([Fact(sum=Sum(())), Fact()]).is_public
    assert either([mask, Fact()], "here").reach.where == "here"
    known = mask._replace(reach=PRIVATE._replace(where="there"))
    assert either([known, mask], "here").reach.where == "there"
    assert either([Fact(), Fact()], "here").reach == Reach()


def test_what_is_a_violation_if_it_leaves():
    for reach, known, is_so in (
        (PRIVATE, None, True),
        (PRIVATE._replace(is_random=True), None, False),
        (PRIVATE._replace(is_proven=False), None, False),
        (Reach(), Sum(()), True),
        (Reach(is_random=True), Sum(()), False),
        (Reach(), None, False),
    ):
        assert Fact(reach, sum=known).is_proven == is_so


# Keys of losses.

KEY, NUMBER = Key(9), Given(7)
KEYS = {
    "as it came": (lambda k, n, x: k, KEY),
    "a child": (lambda k, n, x: split(k)[1], Key(9, (1,))),
    "a child of a child": (lambda k, n, x: split(split(k, 3)[2])[0], Key(9, (2, 0))),
    "children": (lambda k, n, x: split(k, 3), Key(9, (EVERY,))),
    "a child turned round": (lambda k, n, x: lax.rev(split(k, 1), (0,)), None),
    "two children": (lambda k, n, x: split(k, 3)[1:], None),
    "folded": (lambda k, n, x: fold_in(k, 3), Key(9, (3,))),
    "folded with the counter": (lambda k, n, x: fold_in(fold_in(k, n), 4), Key(9, (NUMBER, 4))),
    "folded with a wider counter": (
        lambda k, n, x: fold_in(k, n.astype(jnp.uint32)), Key(9, (NUMBER,))
    ),
    "folded with a number": (lambda k, n, x: fold_in(k, n + 1), Key(9, (EVERY,))),
    "folded with data": (lambda k, n, x: fold_in(k, x.astype(int)), None),
    "folded with many": (lambda k, n, x: jax.vmap(lambda i: fold_in(k, i))(jnp.arange(3)), None),
    "a counter": (lambda k, n, x: lax.squeeze(n[None], (0,)), None),
    "a named counter": (lambda k, n, x: checkpoint_name(n, "n"), NUMBER),
    "of nothing": (lambda k, n, x: lax.iota(jnp.int32, 3), None),
    "the next counter": (lambda k, n, x: n + 1, None),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_what_follows_from_a_key(name):
    function, said = KEYS[name]
    facts = [Fact(token=KEY), Fact(turns=frozenset({CALL}), token=NUMBER), Fact(PRIVATE)]
    given = [jax.random.key(0), np.int32(3), np.float32(1.5)]
    fact = fact_of(function, *zip(given, facts, strict=True))
    assert (fact.token or None) == said
    assert fact.is_public == (name != "folded with data")


@pytest.mark.parametrize(
    ("a", "b", "are_apart"),
    [
        ((0,), (1,), True),
        ((0,), (0,), False),
        ((), (1,), False),
        ((0,), (0, 1), False),
        ((0, 1), (0, 2), True),
        ((EVERY,), (1,), False),
        ((NUMBER,), (1,), False),
        ((NUMBER, 0), (NUMBER, 1), True),
        ((EVERY, EVERY), (EVERY, Given(8)), False),
    ],
)
def test_which_keys_are_independent(a, b, are_apart):
    assert streams.parted(Key(9, a), Key(9, b)) == streams.parted(Key(9, b), Key(9, a)) == are_apart


@pytest.mark.parametrize(
    ("path", "turns", "back", "is_so"),
    [
        ((), (), {}, True),  # the caller gives another one
        ((1,), (), {9: Key(9, (0,))}, True),  # another child comes back
        ((1,), (), {9: Key(8)}, False),
        ((1,), (), {9: None}, False),
        ((), (CALL,), {9: KEY}, True),
        ((1,), (), {9: KEY}, False),
        ((NUMBER,), (CALL,), {9: KEY}, True),
        ((NUMBER,), (CALL,), {9: KEY, 7: NUMBER}, False),  # the counter stands still
        ((NUMBER, Given(6)), (CALL,), {9: KEY, 7: NUMBER}, True),
    ],
)
def test_which_key_is_another_one_in_the_next_call(path, turns, back, is_so):
    assert streams.is_another(Use(Key(9, path), frozenset(turns), ""), back) == is_so


# Streams of noise.


def test_a_stream_is_all_its_parts_in_order():
    parts = [Stream(1, part) for part in range(4)]
    assert streams.state_of(parts, 4) == parts[0]
    others = parts[0]._replace(root=2), parts[1]._replace(at="draw")
    for first in (None, parts[1], others[0]):
        assert streams.state_of([first, *parts[1:]], 4) is None
    for wrong in ([], parts[:3], [parts[0], others[1], *parts[2:]]):
        assert streams.state_of(wrong, 4) is None
    assert [part.is_secret for part in parts] == [True, False, False, True]


def test_a_loop_takes_a_stream_on():
    loop, outer = Loop(("body",), 3), Context(loops=(Loop(("around",), 2),))
    first = Stream(1, 0)
    start = first._replace(at=("turn", loop.path), loops=(("around",), loop.path))
    assert streams.after_loop(first, start, loop, outer) == first
    drawn = start._replace(at=("draw",))
    assert streams.after_loop(first, drawn, loop, outer) == first._replace(at=("after", loop.path))
    for end in (None, drawn._replace(root=2), drawn._replace(part=1), drawn._replace(loops=())):
        assert streams.after_loop(first, end, loop, outer) is None
