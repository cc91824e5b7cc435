"""What the check says of single calls of the engine and of noise, given facts about operands.

The rules are internal: a whole step meets few of them, and mostly several at once.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import jit_p

import eqx_dp as dp
from eqx_dp.checks import marked
from eqx_dp.checks.facts import ANY, CONSTANT, DATA, EVEN, Fact, Reach, Row, Sum, Term
from eqx_dp.checks.privacy_flow import PrivacyFlow
from eqx_dp.checks.roles import MASK
from eqx_dp.checks.streams import Given, Key, Stream
from eqx_dp.checks.sums import Source
from eqx_dp.programs import Context, in_marked_equation
from tests.checks.privacy_steps import SECRET

PRIVATE, RANDOM = Reach(DATA, "", True), Reach(is_random=True)
ROW, STACKED = Row(6, 0), Row(6, 1, turns=("scan",))
PART = Row(6, 0, (2, 3, 1), ("scan",))


def walked(function, *known):
    """The facts about a function's results, and the record of the walk."""
    arguments, facts = zip(*known, strict=True)
    flow = PrivacyFlow([])
    program = jax.make_jaxpr(function)(*arguments)
    return flow.program(program, [*facts], Context()), flow.record


def findings(record):
    return [(one.rule, one.is_decided) for one in record.found]


# Which rows the engine's examples are.


def rows(*places, reach=PRIVATE, turns=(), token=None):
    return Fact(reach, places, frozenset(turns), token=token)


A_MASK = rows(ROW._replace(chosen_by=ANY), token=MASK)
CHOSEN = ROW._replace(chosen_by="i")
A_MASK_OF_TURNS = rows(STACKED, turns=("scan",), token=MASK)
CHANGING = rows(EVEN, reach=Reach(), turns=("scan",))
EXAMPLES = {  # facts about arguments, and about the mask: the rows, or a word of what is wrong
    "rows": ([rows(ROW)], [A_MASK], ROW),
    "rows without a mask": ([rows(ROW), rows(ROW, None)], [], ROW),
    "beside what is even": ([rows(ROW), rows(EVEN, None, reach=Reach())], [A_MASK], ROW),
    "with an even mask": ([rows(ROW)], [rows(EVEN, reach=Reach())], ROW),
    "chosen": ([rows(CHOSEN), rows(CHOSEN)], [A_MASK], CHOSEN),
    "a batch of a stack": ([rows(STACKED)], [rows(STACKED, token=MASK)], STACKED),
    "a microbatch": ([rows(PART)], [rows(PART, token=MASK)], PART),
    "beside other values": ([rows(ROW), rows(None, reach=Reach())], [], "not private has other"),
    "a public row": ([rows(ROW), rows(ROW, reach=Reach())], [], "not private has other"),
    "a number": ([rows(ROW), rows()], [], "apart before"),
    "columns": ([rows(None, ROW)], [], "apart before"),
    "half a stack": ([rows(STACKED._replace(turns=()))], [], "apart before"),
    "other rows": ([rows(ROW), rows(Row(5, 0))], [], "hold other rows"),
    "chosen and not": ([rows(ROW), rows(CHOSEN)], [], "hold other rows"),
    "chosen by two": ([rows(CHOSEN), rows(ROW._replace(chosen_by="j"))], [], "hold other rows"),
    "a mask alone": ([rows(EVEN, reach=Reach())], [A_MASK], "is private but its mask"),
    "a mask of numbers": ([rows(ROW)], [rows(ROW)], "mask is not proven"),
    "a mask of others": ([rows(ROW)], [rows(Row(5, 0), token=MASK)], "mask is not proven"),
    "a mask of an index": ([rows(ROW)], [rows(CHOSEN, token=MASK)], "mask is not proven"),
    "in turns of a loop around": ([rows(STACKED, turns=("around",))], [], STACKED),
    "two turns": ([rows(STACKED, turns=("scan",))], [], "of another turn"),
    "a mask of two turns": ([rows(STACKED)], [A_MASK_OF_TURNS], "of another turn"),
    "what changes": ([rows(STACKED), CHANGING], [], STACKED),
    "what changes with parts": ([rows(PART), CHANGING], [], "meet other values"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_of_examples(name):
    batch, mask, said = EXAMPLES[name]
    found = marked._rows_of([], batch, mask)
    assert said in found if isinstance(said, str) else found == said


def test_a_model_that_changes_meets_parts_of_a_batch():
    changing = Fact(turns=frozenset({"scan"}))
    assert "meet other values" in marked._rows_of([changing], [rows(PART)], [])
    assert marked._rows_of([changing], [rows(STACKED)], []) == STACKED


# Over how many models a call is mapped.


def told(function, shapes, alike=slice(0)):
    program = jax.make_jaxpr(function)(*map(jnp.ones, shapes))
    (equation,) = (one for one in program.eqns if one.primitive is jit_p)
    return marked.models_of(equation, alike)


def call(w, x):
    return in_marked_equation("call", None, lambda both: both[0] * both[1].sum(), (w, x))


COPIES = {
    "as it is": (call, [(3,), (6,)], 1),
    "of one": (jax.vmap(call, (0, None)), [(4, 3), (6,)], 4),
    "behind": (jax.vmap(call, (1, None)), [(3, 4), (6,)], 4),
    "of both": (jax.vmap(call), [(4, 3), (4, 6)], 4),
    "twice": (jax.vmap(jax.vmap(call, (0, None)), (None, 0)), [(4, 3), (5, 6)], None),
    "twice, of one": (jax.vmap(jax.vmap(call, (0, None)), (0, None)), [(1, 1, 3), (6,)], None),
    "once and twice": (jax.vmap(jax.vmap(call, (None, 0))), [(4, 3), (4, 1, 6)], None),
    "twice alike": (jax.vmap(jax.vmap(call, (0, None)), (0, None)), [(4, 4, 3), (6,)], None),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_call(name):
    function, shapes, count = COPIES[name]
    assert told(function, shapes) == count
    is_mapped = name in ("of both", "twice")
    assert told(function, shapes, slice(1, 2)) == (None if is_mapped else count)


# Calls of the engine.


def loss(w, y, x):
    return jnp.sum((w * x) ** 2) * y


def engine(loss=loss, **options):
    """The clipped sum of a loss of two numbers."""
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=0.5, **options)
    return lambda w, y, x, mask: grad_fn(w, y, x, is_padding_example=mask)


PUBLIC, MODEL, LABELS, ROWS = Fact(), Fact(token=Given(3)), rows(ROW), rows(ROW, None)


def operands(w=MODEL, y=LABELS, x=ROWS, mask=A_MASK):
    arrays = [np.ones(shape, np.float32) for shape in (3, 6, (6, 3))]
    return [*zip([*arrays, np.zeros(6, bool)], (w, y, x, mask), strict=True)]


def test_a_call_gives_sums_of_its_bound():
    (found,), record = walked(engine(), *operands())
    assert (record.found, record.trained) == ({}, {3})
    ((name, source),) = record.sources.items()
    assert source.bound == pytest.approx(0.5)
    assert (source.batches, source.unit) == (frozenset(), None)
    assert found == Fact(sum=Sum((Term((name, 0), 1.0),)))
    _, record = walked(engine(), *operands(y=rows(Row(5, 0))))
    assert findings(record) == [("examples apart", False)]


def test_calls_on_public_values_and_with_private_models():
    public = [Fact(places=(None,) * n, turns=frozenset("t" * n)) for n in (0, 1, 2, 0)]
    (found,), record = walked(engine(), *operands(*public))
    assert found.is_public
    assert found.turns == frozenset("t")
    assert not any((record.found, record.sources, record.trained))
    for reach, is_decided in ((PRIVATE, True), (PRIVATE._replace(is_random=True), False)):
        (found,), record = walked(engine(), *operands(w=Fact(reach)))
        assert findings(record) == [("release", is_decided)]
        assert not any((found.is_public, found.sum, record.sources))


def test_models_side_by_side():
    arrays = operands()
    arrays[0] = np.ones((2, 3), np.float32), arrays[0][1]
    (found,), record = walked(jax.vmap(engine(), (0, None, None, None)), *arrays)
    assert [term.gain for term in found.sum.terms] == [math.sqrt(2)]
    assert not record.found
    # With other examples for each model nothing is known, nor with other masks.
    for at, shape in ((2, (2, 6, 3)), (3, (2, 6))):
        others = [*arrays]
        fact = others[at][1]
        others[at] = np.ones(shape, others[at][0].dtype), fact._replace(places=(None, *fact.places))
        axes = [0 if i in (0, at) else None for i in range(4)]
        (found,), record = walked(jax.vmap(engine(), axes), *others)
        assert not any((found.is_public, found.sum, record.sources))
        assert findings(record) == [("release", False)] * (at == 2)
    one = [(np.ones((1, 3), np.float32), MODEL), *arrays[1:3]]
    even = np.zeros((1, 6), bool), rows(EVEN, EVEN, reach=Reach())
    (found,), record = walked(jax.vmap(engine(), (0, None, None, 0)), *one, even)
    assert (found.sum is not None, [*record.unmasked.values()]) == (True, [False])
    twice = jax.vmap(jax.vmap(engine(), (0, *[None] * 3)), (1, *[None] * 3))
    arrays[0] = np.ones((4, 5, 3), np.float32), arrays[0][1]
    (found,), record = walked(twice, *arrays)
    assert not any((found.is_public, found.sum, record.sources))
    assert findings(record) == [("release", False)]


def test_batches_of_a_stack():
    def over(w, *stacks):
        return lax.map(lambda batch: engine()(w, *batch), stacks)

    model, *arrays = operands()
    places = Row(6, 0), Row(6, 1)
    marked_by = tuple(place._replace(chosen_by=ANY) for place in places)
    for i, its in enumerate((places, (*places, None), marked_by)):
        arrays[i] = np.stack([arrays[i][0]] * 6), arrays[i][1]._replace(places=its)
    _, record = walked(over, model, *arrays)
    (source,) = record.sources.values()
    assert len(source.batches) == 1
    assert not record.found


def test_what_a_call_is_given():
    """A missing mask, one that is public, an index, keys."""
    for mask, expected in ((None, [True]), (rows(EVEN, reach=Reach()), [False]), (A_MASK, [])):
        arrays = operands(mask=mask)
        call = engine() if mask else lambda *a: engine()(*a, None)
        _, record = walked(call, *(arrays if mask else arrays[:3]))
        assert [*record.unmasked.values()] == expected
    _, record = walked(engine(), *operands(x=rows(CHOSEN, None), y=rows(CHOSEN)))
    assert ["entries of i are different rows" in one for one in record.assumed] == [True]


def drawing(w, y, x, *, key):
    return loss(w, y, x) * jax.random.normal(key)


def test_a_key_that_a_call_is_given():
    grad_fn = dp.filter_clipped_grad(drawing, l2_clip_norm=0.5)
    call = lambda w, y, x, mask, key: grad_fn(w, y, x, key=key, is_padding_example=mask)  # noqa: E731
    key = jax.random.key(0)
    for fact, is_known in ((Fact(token=Key(4)), True), (Fact(), False)):
        _, record = walked(call, *operands(), (key, fact))
        assert findings(record) == ([] if is_known else [("fresh noise", False)])
        assert [use.of_loss is not None for use in record.uses] == [True] * is_known
    lost = Fact(PRIVATE._replace(is_random=True))
    _, record = walked(call, *operands(w=Fact(PRIVATE)), (key, lost))
    assert findings(record) == [("release", True)]
    again = lambda *a: lax.map(lambda _: call(*a), jnp.arange(2))  # noqa: E731
    _, record = walked(again, *operands(), (key, Fact(token=Key(4))))
    assert ("fresh noise", False) in findings(record)


STATE = dp.noise_stream(key=SECRET)
LOOKED = {
    "a print": (lambda w, y, x: (jax.debug.print("{}", y), loss(w, y, x))[1], "side door"),
    "a key": (lambda w, y, x: loss(w, y, x) * jax.random.normal(jax.random.key(0)), "fresh noise"),
    "nothing": (loss, None),
}


@pytest.mark.parametrize("name", LOOKED)
def test_what_is_within_a_loss(name):
    function, rule = LOOKED[name]
    _, record = walked(engine(function, method="per_example"), *operands())
    assert {*findings(record)} == ({(rule, False)} if rule else set()), record.found


def test_a_key_among_the_models_arrays():
    keyed = lambda w, y, x: loss(w[0], y, x) * jax.random.normal(w[1])  # noqa: E731
    grad_fn = dp.filter_clipped_grad(keyed, l2_clip_norm=0.5)
    call = lambda w, y, x, mask, key: grad_fn((w, key), y, x, is_padding_example=mask)  # noqa: E731
    _, record = walked(call, *operands(), (jax.random.key(0), Fact(token=Key(4))))
    assert ("fresh noise", False) in findings(record)


# Noise.

LEAF = Fact(sum=Sum((Term(("a", 0), 1.0),)))
STREAM = [Fact(token=Stream(7, part)) for part in range(3)]


def noisy(leaf, other, *state):
    state = jax.tree.unflatten(jax.tree.structure(STATE), state)
    both, state = dp.add_noise((leaf, other), state, 2.0)
    return *both, *jax.tree.leaves(state)


def of_noise(function=noisy, leaf=LEAF, other=PUBLIC, state=STREAM, copied=()):
    """The facts about noisy leaves and the next state, and the record."""
    arrays = [jnp.ones(3), jnp.ones(2), *jax.tree.leaves(STATE)]
    arrays = [jnp.stack([a] * 4) if i in copied else a for i, a in enumerate(arrays)]
    flow = PrivacyFlow([])
    flow.record.sources["a"] = Source(1.0, frozenset("b"), None, "")
    program = jax.make_jaxpr(function)(*arrays)
    return flow.program(program, [leaf, other, *state], Context()), flow.record


def test_noise_releases_clipped_sums_and_public_values():
    (first, second, *after), record = of_noise()
    assert first == second == Fact(RANDOM)
    assert not record.found
    (release,) = record.releases.values()
    assert (release.sums, release.stddev, release.batches) == ((LEAF.sum,), 2.0, frozenset("b"))
    assert [fact.token.part for fact in after] == [0, 1, 2]
    assert {(fact.token.root, fact.token.at == "argument") for fact in after} == {(7, False)}
    assert [*record.drawn] == [(7, "argument")]


def test_noise_on_other_values_does_not_release_them():
    part = Fact(sum=LEAF.sum._replace(over="scan"))
    for other in (rows(None), part):
        (first, second, *_), record = of_noise(other=other)
        assert first == Fact(RANDOM)
        assert second.reach.why == "noise was added to something without a known bound"
        assert second.reach.is_random
        assert len(record.releases) == 1
    _, record = of_noise(leaf=Fact())
    assert not any((record.releases, record.found))


def in_a_branch(leaf, other, *state):
    return lax.cond(
        other[0] > 0, lambda: noisy(leaf, other, *state), lambda: noisy(leaf, other, *state)
    )


OF_STREAMS = jax.vmap(noisy, (None, None, 0, 0, 0))
LOST = {
    "a constant key": ({"state": [Fact(token=CONSTANT), *STREAM[1:]]}, True),
    "no stream": ({"state": [Fact()] * 3}, False),
    "of two streams": ({"state": [*STREAM[:2], Fact(token=Stream(8, 2))]}, False),
    "data for a counter": ({"state": [STREAM[0], Fact(PRIVATE), STREAM[2]]}, False),
    "in another order": ({"state": [STREAM[0], STREAM[2], STREAM[1]]}, False),
    "in a branch": ({"function": in_a_branch}, False),
    "several of one sum": ({"function": OF_STREAMS, "copied": (2, 3, 4)}, False),
}


@pytest.mark.parametrize("name", LOST)
def test_noise_that_is_lost(name):
    options, is_decided = LOST[name]
    facts, record = of_noise(**options)
    assert {*findings(record)} == {("fresh noise", is_decided)}
    assert not record.releases
    assert all(fact.reach.why for fact in facts[:2])
    assert ("the same in each call" in next(iter(record.found)).found) == is_decided


def test_several_noises_of_public_values():
    facts, record = of_noise(OF_STREAMS, leaf=PUBLIC, copied=(2, 3, 4))
    assert facts[0] == Fact(RANDOM)
    assert not record.found


def test_copies_of_noise_on_copies_of_a_sum():
    copies = {"function": jax.vmap(noisy), "copied": range(5)}
    facts, record = of_noise(**copies)
    assert facts[0] == Fact(RANDOM)
    assert not record.found
    assert len(record.releases) == 1


def test_noise_in_each_turn_of_a_loop():
    def turns(leaf, other, *state):
        def turn(state, _):
            first, _, *state = noisy(leaf, other, *state)
            return tuple(state), first

        state, found = lax.scan(turn, tuple(state), length=3)
        return found, *state

    (found, *after), record = of_noise(turns)
    assert not record.found
    assert found.reach == RANDOM
    (release,) = record.releases.values()
    assert [loop.length for loop in release.context.loops] == [3]
    assert [fact.token.part for fact in after] == [0, 1, 2]
    assert all(fact.token.at[0] == "after" for fact in after)


def test_noise_on_what_becomes_private_in_a_later_turn_releases_nothing():
    def later(leaf, x, *state):
        def turn(carry, _):
            more, *state = carry
            _, _, *state = noisy(leaf + more, jnp.ones(2), *state)
            return (jnp.zeros(3) + x[0], *state), None

        return lax.scan(turn, (jnp.zeros(3), *state), length=3)[0][1:]

    _, record = of_noise(later, other=rows(None))
    assert not record.releases
