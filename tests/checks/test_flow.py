"""How facts go through equations, branches and loops: single programs, given facts.

The rules are internal: a whole step meets few of them, and mostly several at once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqx_dp.checks.facts import DATA, EVEN, Fact, Reach, Row, Sum, Term
from eqx_dp.checks.privacy_flow import SECRET
from eqx_dp.checks.record import is_door
from eqx_dp.checks.streams import CALL, EVERY, Key, Stream
from tests.checks.test_marked import STATE, STREAM, engine, findings, noisy, operands, walked

PROVEN, PERHAPS = Fact(Reach(DATA, "", True)), Fact(Reach(DATA))
PUBLIC, TURNING = Fact(), Fact(turns=frozenset("t"))
LEAF = Fact(sum=Sum((Term(("a", 0), 1.0),)))
KEY = jax.random.key(0)
ROWS = Fact(PROVEN.reach, (Row(6, 0), Row(6, 1)))


def of_numbers(function, *facts):
    """The facts about results of a function of numbers, and findings."""
    found, record = walked(function, *((jnp.float32(1 + i), fact) for i, fact in enumerate(facts)))
    assert not any("the check failed" in one.found for one in record.found)
    return found, findings(record)


# Equations.


def test_a_barrier_changes_nothing():
    facts = [LEAF, PROVEN, STREAM[0]]
    assert of_numbers(lambda *x: lax.optimization_barrier(x), *facts)[0] == facts


@pytest.mark.parametrize(("part", "is_secret"), [(0, True), (1, False), (3, True)])
def test_a_stream_that_is_read(part, is_secret):
    (found,), _ = of_numbers(lambda x: x + 1, Fact(token=Stream(7, part, loops=("around",))))
    assert found.reach == (Reach(SECRET, found.reach.where, True) if is_secret else Reach())
    assert found.turns == (frozenset() if is_secret else {CALL, "around"})
    (found,), _ = of_numbers(lambda x: checkpoint_name(x, "part"), STREAM[0])
    assert found == STREAM[0]


@pytest.mark.parametrize(
    ("fact", "doors"),
    [(PROVEN, [("side door", True)]), (PERHAPS, [("side door", False)]), (PUBLIC, [])],
)
def test_doors(fact, doors):
    assert of_numbers(lambda x, y: jax.debug.print("{}", x), fact, PUBLIC)[1] == doors
    returned = lambda x: jax.pure_callback(np.abs, x, x)  # noqa: E731
    (found,), doors_of_callback = of_numbers(returned, fact)
    assert doors_of_callback == doors
    assert "a host function or a mutable array" in found.reach.why


def test_a_mutable_array_and_parts_of_a_sum():
    (found,), _ = of_numbers(lambda x: jax.new_ref(x)[...], PUBLIC)
    assert "a mutable array returns it" in found.reach.why
    parts, _ = walked(lambda x: lax.split(x, (1, 1)), (np.ones(2), LEAF))
    assert [fact.is_public for fact in parts] == [False, False]


def test_doors_in_programs():
    def kernel(ref, out):
        out[...] = ref[...]

    printing = jax.jit(lambda x: (jax.debug.print("{}", x), x)[1])
    copied = pallas.pallas_call(kernel, jax.ShapeDtypeStruct((8,), jnp.float32))
    for function, is_so in ((printing, True), (jax.jit(jnp.sin), False), (copied, False)):
        (equation,) = jax.make_jaxpr(function)(jnp.ones(8, jnp.float32)).eqns
        assert is_door(equation) == is_so


def test_what_is_random():
    key, of_key = jax.random.key(0), Fact(token=Key(4))
    (found,), _ = of_numbers(lambda x: lax.rng_uniform(x, 2 * x, (3,)), PUBLIC)
    assert not found.is_public
    for function, is_random in ((jax.random.bits, True), (lambda k: jnp.ones(3), False)):
        (found,), _ = walked(function, (key, of_key))
        assert (found.reach.is_random, found.is_public) == (is_random, True)
    (found,), _ = of_numbers(
        lambda x, y: x + y, PROVEN._replace(reach=Reach(is_random=True)), PROVEN
    )
    assert (found.reach.is_random, found.reach.is_proven) == (True, True)


def test_what_uses_a_key():
    for use, count in (
        (lambda k: checkpoint_name(k, "k"), 0),
        (jax.random.bits, 1),
        (jax.random.split, 0),
    ):
        _, record = walked(use, (KEY, Fact(token=Key(4))))
        assert len({one.key for one in record.uses}) == count


def test_a_sum_beside_private_data_is_none():
    (found,), _ = of_numbers(lambda x, y: x + y, LEAF, PROVEN)
    assert (found.sum, found.reach.why) == (None, DATA)
    (found,), _ = of_numbers(lambda x, y: x + y, LEAF, TURNING)
    assert (found.sum, found.turns) == (LEAF.sum, frozenset("t"))
    # A number keeps its value where it is spread, and not where it is added up.
    three = lambda: lax.broadcast(np.float32(3), (2,))  # noqa: E731
    named = lambda: checkpoint_name(three(), "three")  # noqa: E731
    times = LEAF.sum.scaled(3.0)
    for number, expected in ((three, times), (named, times), (lambda: lax.cumsum(three()), None)):
        (found,), _ = walked(lambda x: x * number(), (np.ones(2, np.float32), LEAF))  # noqa: B023
        assert found.sum == expected


def test_of_a_shard_map_by_hand_nothing_private_is_known():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    spread = jax.shard_map(lambda *values: values, mesh=mesh, in_specs=P(), out_specs=P())
    (first, second, *others), _ = of_numbers(spread, ROWS, TURNING, STREAM[0], LEAF)
    assert "shard_map by hand" in first.reach.why
    assert (first.places, second.is_public, second.turns) == ((), True, frozenset("t"))
    assert not any(fact.is_public or isinstance(fact.token, Stream) for fact in others)


# Branches.


def test_a_branch_that_public_values_choose():
    choose = lambda p, x, y: lax.cond(p > 0, lambda: x, lambda: y)  # noqa: E731
    for one, other in ((TURNING, PROVEN), (PROVEN, TURNING)):
        (found,), doors = of_numbers(choose, Fact(turns=frozenset("p")), one, other)
        assert not doors
        assert (found.reach.why, found.turns) == (DATA, frozenset("tp"))
    (found,), _ = of_numbers(choose, PUBLIC, LEAF, LEAF)
    assert found == LEAF
    (found,), _ = of_numbers(choose, PUBLIC, LEAF, PUBLIC)
    assert "one of several values" in found.reach.why
    (found,), _ = of_numbers(lambda x: lax.platform_dependent(x, default=jnp.sin), PUBLIC)
    assert found.is_public  # a choice of one
    for fact, is_decided in ((PROVEN, True), (PERHAPS, False)):
        (found,), doors = of_numbers(choose, fact, PUBLIC, PUBLIC)
        assert doors == [("side door", is_decided)]
        assert found.reach.why == DATA
    decided = lambda p, x: lax.cond(p, lambda: x, lambda: 2 * x)  # noqa: E731
    (found,), record = walked(decided, (np.bool_(True), LEAF), (jnp.ones(()), PUBLIC))
    assert findings(record) == [("side door", True)]
    assert "a clipped sum decides" in found.reach.why


def test_a_key_that_may_be_another_is_used():
    choose = lambda p, k, m: lax.cond(p > 0, lambda: k, lambda: m)  # noqa: E731
    known = (jnp.ones(()), PUBLIC), (KEY, Fact(token=Key(4))), (KEY, Fact(token=Key(5)))
    (found,), record = walked(choose, *known)
    assert found.token is None
    assert {use.key for use in record.uses} == {Key(4), Key(5)}


# Loops.

SLICES = {  # a fact about what a loop goes over, and whether the parts of two turns may differ
    "even": (Fact(places=(EVEN, None)), False),
    "public": (Fact(places=(None, EVEN)), True),
    "private": (ROWS, False),
}


@pytest.mark.parametrize("name", SLICES)
def test_what_a_loop_goes_over(name):
    fact, is_other = SLICES[name]
    fact, rows = fact._replace(turns=frozenset("t")), np.ones((6, 6), np.float32)
    (last, stacked), _ = walked(
        lambda x: lax.scan(lambda _, r: (2 * r, 2 * r), x[0], x), (rows, fact)
    )
    assert last.reach.why == stacked.reach.why == fact.reach.why
    assert (stacked.places, stacked.turns) == ((), frozenset("t"))  # rows may have met
    assert len(last.turns) == 2  # from turn to turn it changes in any case
    printed = lambda c, r: (c, jax.debug.print("{}", r))  # noqa: E731
    _, record = walked(lambda x: lax.scan(printed, 0.0, x)[0], (rows, fact))
    assert bool(record.found) == (name == "private")
    # A total of parts that differ is no function of a clipped sum alone.
    total = lambda c, r: (c + r[0], None)  # noqa: E731
    (found,), _ = walked(lambda x: lax.scan(total, np.float32(0), x)[0], (rows, fact))
    assert len(found.turns - frozenset("t")) == is_other


def test_rows_of_batches_of_indices():
    def epoch(w, y, x, indices):
        return lax.map(lambda i: engine()(w, y[i], x[i], None), indices)

    fact = Fact(PROVEN.reach, (Row(5, 0), Row(5, 1)), token=("index", "i"))
    _, record = walked(epoch, *operands()[:3], (np.zeros((5, 5), np.int32), fact))
    assert [*record.assumed] == ["entries of i are different rows, except those of padding"]
    assert not record.found


def turned(*known, turn, length=3):
    """The facts after a loop over what it carries, and the record."""
    return walked(
        lambda *carry: lax.scan(lambda c, _: (turn(*c), None), carry, None, length)[0], *known
    )


def added_in_turns(start, w, y, x, mask, changed=lambda part, i: part):
    """The sum over two microbatches."""
    parts = jax.tree.map(lambda a: a.reshape(2, 3, *a.shape[1:]), (y, x, mask))

    def turn(carry, batch):
        i, total = carry
        return (i + 1, total + changed(engine()(w, *batch), i)), None

    return lax.scan(turn, (0, start), parts)[0][1]


def test_a_total_is_the_sum_over_all_turns():
    """If it began with public values, and each turn adds the same function of its part."""
    zeros = np.zeros(3, np.float32)
    (found,), record = walked(added_in_turns, (zeros, PUBLIC), *operands())
    assert not record.found
    assert ([term.gain for term in found.sum.terms], found.sum.over) == ([1.0], None)
    (found,), _ = walked(added_in_turns, (zeros, PROVEN), *operands())
    assert (found.sum, found.reach.why) == (None, DATA)
    by_turn = lambda part, i: lax.cond(i > 0, lambda: 2.0 * part, lambda: -2.0 * part)  # noqa: E731
    for changed in (jnp.multiply, by_turn):
        changing = functools.partial(added_in_turns, changed=changed)
        (found,), _ = walked(changing, (zeros, PUBLIC), *operands())
        assert found.sum is None
    # A whole sum is added in each turn.
    one, add = jnp.ones(()), lambda total, x: (total + x, x)
    (found, _), _ = turned((one, PUBLIC), (one, LEAF), turn=add)
    assert "a loop carries a clipped sum" in found.reach.why
    (found, _), _ = turned((one, PUBLIC), (one, PUBLIC), turn=add)
    assert found.is_public


def test_what_a_loop_carries():
    one = jnp.ones(())
    swapped = lambda a, b: (b, a)  # noqa: E731
    (first, second), _ = turned((one, PROVEN), (one, PUBLIC), turn=swapped)
    assert first.reach.why == second.reach.why == DATA
    assert len(second.turns) == 1
    (found, _), _ = turned((one, PUBLIC), (one, PUBLIC), turn=lambda a, b: (a, b))
    assert found.is_public
    key = KEY, Fact(token=Key(4))
    until = lambda k: lax.while_loop(  # noqa: E731
        lambda c: c[0] < 3, lambda c: (c[0] + 1, checkpoint_name(c[1], "k")), (0, k)
    )[1]
    (kept,), record = walked(until, key)
    assert (kept, [*record.uses]) == (Fact(token=Key(4)), [])
    (kept,), record = walked(until, (jax.random.split(KEY), Fact(token=Key(4, (EVERY,)))))
    assert (kept.token, len(record.uses)) == (None, 1)
    for other, known in ((KEY, Fact(token=Key(5))), (jax.random.key(1), PUBLIC)):
        (found, _), record = turned(key, (other, known), turn=swapped)
        assert (found.token, len(found.turns)) == (None, 1)
        assert Key(4) in {use.key for use in record.uses}
    (found,), _ = turned(key, turn=lambda k: (jax.random.fold_in(k, 1),))
    assert found.token is None


def streams_of(turn, states=(STREAM,)):
    arrays = jax.tree.leaves(STATE)
    known = [(array, fact) for state in states for array, fact in zip(arrays, state, strict=True)]
    facts, record = turned(*known, turn=turn)
    return [fact.token for fact in facts], findings(record), [*record.drawn], facts


def test_streams_that_a_loop_carries():
    tokens, found, states, _ = streams_of(lambda *state: state)
    assert (tokens, found, states) == ([fact.token for fact in STREAM], [], [])
    tokens, found, states, _ = streams_of(
        lambda *state: noisy(jnp.ones(3), jnp.ones(2), *state)[2:]
    )
    assert [token.part for token in tokens] == [0, 1, 2]
    assert {token.at[0] for token in tokens} == {"after"}
    assert not found
    assert (7, "argument") in states

    # A turn ends with the state before its draw, or with that before its second draw.
    def first(state, _):
        return state, noisy(jnp.ones(3), jnp.ones(2), *state)[0]

    def second(state, _):
        one, _, *after = noisy(jnp.ones(3), jnp.ones(2), *state)
        return tuple(after), noisy(one, jnp.ones(2), *after)[0]

    known = [*zip(jax.tree.leaves(STATE), STREAM, strict=True)]
    for turn, words in ((first, "another turn"), (second, "does not end with the state after")):
        _, record = walked(lambda *state: lax.scan(turn, state, length=3), *known)  # noqa: B023
        assert any(words in one.found for one in record.found)
    # Two streams change places, or two parts of one.
    other = [Fact(token=Stream(8, part)) for part in range(3)]
    *_, facts = streams_of(lambda *both: (*both[3:], *both[:3]), (STREAM, other))
    assert {fact.reach.why for fact in facts} == {SECRET}
    exchanged = lambda c, _: ((c[0], c[2], c[1]), c[1] + 1)  # noqa: E731
    (*_, read), _ = walked(lambda *state: lax.scan(exchanged, state, length=2), *known)
    assert read.reach.why == SECRET
    *_, facts = streams_of(lambda a, b, c: (a, c, b))
    assert [fact.reach.why for fact in facts] == ["", SECRET, SECRET]
