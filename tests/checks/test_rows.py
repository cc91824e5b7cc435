"""What the check says of rows, against what moves when one row of an argument is changed.

The rules are internal. A whole step that is checked meets few of them, and says only whether it is
fine.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from eqx_dp.checks.facts import ANY, CONSTANT, DATA, EVEN, Fact, Reach, Row, met, of_array
from eqx_dp.checks.privacy_flow import PrivacyFlow
from eqx_dp.checks.rows import sliced
from eqx_dp.programs import Context

SHAPE = 4, 6
PLACES = Row(4, 0), Row(4, 1)
ONES = jnp.ones((4, 5, 3))
MANY = jnp.ones((3, 2, 5, 7))
PUBLIC = np.arange(24.0, dtype=np.float32).reshape(SHAPE) / 7
ROWS, COLUMNS = PLACES
CODES = {"-": None, "=": EVEN, "r": ROWS, "c": COLUMNS}
for codes, whole, lengths in (("RS", ROWS, (2, 2)), ("CD", COLUMNS, (2, 3)), ("EF", ROWS, (1, 4))):
    CODES |= {code: whole._replace(part=(*lengths, i)) for i, code in enumerate(codes)}


def convolved(image, kernel, spec=("NCW", "OIW", "NCW"), **groups):
    return lax.conv_general_dilated(image, kernel, (1,), "VALID", dimension_numbers=spec, **groups)


def batched(left, right, over=((2,), (2,)), batch=((0,), (0,))):
    return lax.dot_general(left, right, (over, batch))


# A function of private rows and a public array, and the places of what it returns.
CASES = {
    "x + p": (lambda x, p: x + p, "--"),
    "x + x": (lambda x, p: x + x * 2.0, "rc"),
    "private number": (lambda x, p: jnp.ones(SHAPE) * x[0, 0], "--"),
    "public number": (lambda x, p: x * p[0, 0], "rc"),
    "private numbers select": (lambda x, p: lax.select_n(x[0, 0] > 0, x, 2 * x), "--"),
    "named": (lambda x, p: checkpoint_name(x, "x"), "rc"),
    "integers": (lambda x, p: x.astype(int) ^ 1, "rc"),
    "transpose": (lambda x, p: x.T, "cr"),
    "transpose of three": (lambda x, p: x.reshape(2, 2, 6).transpose(2, 0, 1), "-RS"),
    "symmetric": (lambda x, p: x[:, :4] + x[:, :4].T, "--"),
    "new dimensions": (lambda x, p: x[:, None, :], "r-c"),
    "broadcast": (lambda x, p: jnp.broadcast_to(x[:, :1], SHAPE), "r-"),
    "broadcast row": (lambda x, p: jnp.broadcast_to(x[:1], SHAPE), "-c"),
    "public broadcast": (lambda x, p: jnp.broadcast_to(p[:1], (3, 6)), "=-"),
    "left slice": (lambda x, p: x[:, 1:], "r-"),
    "lower slice": (lambda x, p: x[1:], "-c"),
    "dynamic slice": (lambda x, p: lax.dynamic_slice(x, (0, 1), (4, 3)), "r-"),
    "dynamic slice, private": (lambda x, p: lax.dynamic_slice(x, (0, jnp.argmax(x)), (4, 3)), "--"),
    "pad": (lambda x, p: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 0))), "r-"),
    "pad below": (lambda x, p: lax.pad(x, 0.0, ((0, 1, 0), (0, 0, 0))), "-c"),
    "pad within": (lambda x, p: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1))), "r-"),
    "pad by private": (lambda x, p: lax.pad(x, x.sum(), ((0, 0, 0), (1, 0, 0))), "--"),
    "concatenate": (lambda x, p: jnp.concatenate([x, x], 1), "r-"),
    "concatenate rows": (lambda x, p: jnp.concatenate([x[:2], x[2:]]), "-c"),
    "stack": (lambda x, p: jnp.stack([x, -x], 1), "r-c"),
    "stack in front": (lambda x, p: jnp.stack([x, -x]), "-rc"),
    "product": (lambda x, p: x @ p[0, :2].reshape(1, 2).repeat(6, 0), "r-"),
    "product from the left": (lambda x, p: p[:, :4] @ x, "-c"),
    "product with private": (lambda x, p: x @ x.T, "--"),
    "products": (lambda x, p: batched(x.reshape(4, 2, 3), ONES), "rC-"),
    "products from the left": (lambda x, p: batched(ONES, x.reshape(4, 2, 3)), "r-C"),
    "products of private": (lambda x, p: batched(x.reshape(4, 2, 3), x.reshape(4, 2, 3)), "r--"),
    "products over other dimensions": (
        lambda x, p: batched(x.reshape(4, 2, 3), MANY, ((1,), (1,)), ((2,), (0,))), "Dr--"
    ),
    "products over others from the left": (
        lambda x, p: batched(MANY, x.reshape(4, 2, 3), ((1,), (1,)), ((0,), (2,))), "D--r"
    ),
    "convolution": (lambda x, p: convolved(x[:, None], p[None, :1, :3]), "r--"),
    "convolution, other layout": (
        lambda x, p: convolved(x.T[None], p[:1, None, :2], ("CWN", "OIW", "CNW")), "-r-"
    ),
    "convolution, kernel": (lambda x, p: convolved(p[:, None], x[None, :1, :3]), "---"),
    "convolution by groups of the batch": (
        lambda x, p: convolved(x[:, None], p[:2, None, :3], batch_group_count=2), "---"
    ),
    "cumulative sum of rows": (lambda x, p: lax.cumsum(x, 0), "-c"),
    "sorted": (lambda x, p: jnp.sort(x, 1), "r-"),
    "rows turned round": (lambda x, p: x[::-1], "-c"),
    "sum": (lambda x, p: x.sum(1), "r"),
    "largest": (lambda x, p: jnp.argmax(x, 0), "c"),
    "sum of three": (lambda x, p: x.reshape(4, 2, 3).sum((0, 2)), "C"),
    "squeeze": (lambda x, p: lax.squeeze(x[:, :1, None], (1, 2)), "r"),
    "split": (lambda x, p: jnp.split(x, 2, 1)[1], "r-"),
    "reshape, the same": (lambda x, p: x.reshape(4, 6, 1), "rc-"),
    "reshape in front": (lambda x, p: x.reshape(1, 4, 6), "EF-"),
    "reshape behind": (lambda x, p: x.reshape(4, 2, 3), "rCD"),
    "reshape rows": (lambda x, p: x.reshape(2, 2, 6), "RS-"),
    "reshape rows and more": (lambda x, p: x.reshape(2, 2, 2, 3), "RS--"),
    "reshape across": (lambda x, p: x.reshape(2, 12), "--"),
    "reshape together": (lambda x, p: x.reshape(24), "-"),
    "reshape apart and together": (lambda x, p: x.reshape(2, 2, 6).reshape(4, 6), "--"),
    "reshape of parts": (lambda x, p: x.sum(1).reshape(2, 2).reshape(2, 2, 1), "RS-"),
    "reshape of what is even": (lambda x, p: jnp.ones((4, 6)).reshape(3, 8), "=="),
    "reshape of what is not": (lambda x, p: p.reshape(4, 2, 3), "---"),
    "reshape of a private number": (lambda x, p: x[0, 0].reshape(1), "-"),
    "unknown": (lambda x, p: jnp.fft.rfft(x).real, "--"),
    "unknown, of private and public": (
        lambda x, p: lax.linalg.triangular_solve(x[:1, :1], p[:1, :1]), "--"
    ),
    "unknown, public": (lambda x, p: jnp.fft.rfft(p[:, :1]).real, "-="),
}  # fmt: skip


def moved(function, x, index):
    """Where a result changes if one row, or one column, is another one."""
    other = x.copy()
    other[index] = np.random.default_rng(5).normal(size=other[index].shape)
    return np.argwhere(np.asarray(function(x) != function(other)))


def hit(row, place):
    """The entry along a dimension that a row of the argument is in, by what is said of it."""
    if not place.part:
        return row
    outer, inner, which = place.part
    return np.unravel_index(row, (outer, inner))[which]


def claims_hold(places, function, x):
    """A row that is changed moves no entries but those that are said to depend on it."""
    for dim, place in enumerate(places):
        if isinstance(place, Row):
            for row in range(x.shape[place.dim]):
                index = (row,) if place.dim == 0 else (slice(None), row)
                assert {*moved(function, x, index)[:, dim]} <= {hit(row, place)}
        if place == EVEN:
            out = np.asarray(function(x))
            np.testing.assert_array_equal(out, np.broadcast_to(out.take([0], dim), out.shape))


@pytest.mark.parametrize("name", CASES)
def test_entries_depend_on_the_rows_that_are_said(name):
    function, said = CASES[name]
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    program = jax.make_jaxpr(function)(x, PUBLIC)
    private = Fact(Reach(DATA, "", True), PLACES)
    (fact,) = PrivacyFlow([]).program(program, [private, Fact(places=(None, None))], Context())
    assert fact.places == tuple(CODES[code] for code in said)
    claims_hold(fact.places, lambda x: function(jnp.asarray(x), PUBLIC), x)


MASKED = ROWS._replace(chosen_by=ANY)
CHOSEN = ROWS._replace(chosen_by="index")
MET = [
    ([], EVEN),
    ([EVEN, EVEN], EVEN),
    ([ROWS, EVEN], ROWS),
    ([ROWS, COLUMNS], None),
    ([ROWS, None], None),
    ([MASKED, EVEN], MASKED),
    ([ROWS, MASKED], ROWS),
    ([MASKED, CHOSEN, EVEN], CHOSEN),
    ([ROWS, CHOSEN], None),
    ([ROWS, CHOSEN, MASKED], None),
    ([COLUMNS, MASKED], None),
    ([ROWS, MASKED, None], None),
]


@pytest.mark.parametrize(("places", "together"), MET)
def test_what_depends_on_two_rows_depends_on_anything(places, together):
    assert met(places) == met(places[::-1]) == together


def test_rows_along_one_dimension():
    for code, turns, is_so in (("r", 0, True), ("c", 0, False), ("c", 1, True), ("R", 0, False),
                               ("R", 1, True), ("C", 1, False), ("C", 2, True)):  # fmt: skip
        assert CODES[code]._replace(turns=("loop",) * turns).is_one_dimension == is_so


TURNS = {
    "rc": ["c"],  # a batch of a stack
    "rc-": ["c", None],
    "RS-": ["S", None],  # a microbatch of a batch
    "CD": ["D"],
    "R=": ["="],
    "-r": ["r"],
    **{apart: [None] for apart in ("rr", "cr", "RC", "CS", "RR", "rS", "Rr")},
}


@pytest.mark.parametrize("places", TURNS)
def test_rows_of_one_turn_of_a_loop(places):
    def turned(code):
        if code not in CODES or not isinstance(place := CODES[code], Row) or places[0] in "-=":
            return CODES.get(code or "-")
        return place._replace(turns=("loop",))

    found = sliced([CODES[code] for code in places], "loop")
    assert found == tuple(map(turned, TURNS[places]))


def test_rows_of_one_turn_of_two_loops():
    """Batches of a stack, and their microbatches; what two loops take from one dimension."""
    parts = [CODES[code]._replace(turns=("outer",)) for code in "CD"]
    assert sliced(parts, "loop") == (parts[1]._replace(turns=("outer", "loop")),)
    assert sliced([], "loop") == ()
    outer = [place._replace(turns=("outer",)) for place in PLACES]
    alike = [place._replace(part=(2, 2, 1)) for place in PLACES]
    for apart in ([ROWS, outer[1]], outer, alike, [CODES["R"], alike[1]]):
        assert sliced(apart, "loop") == (None,)


@pytest.mark.parametrize("shape", [(), (3,), (1, 4), (3, 2, 2)])
def test_what_a_constant_is_the_same_along(shape):
    rng = np.random.default_rng(2)
    for over in itertools.product([False, True], repeat=len(shape)):
        drawn = rng.integers(1, 9, [1 if one else n for one, n in zip(over, shape, strict=True)])
        array = np.broadcast_to(drawn, shape)
        fact = of_array(jnp.asarray(array))
        same = [bool((array == array.take([0], d)).all()) for d in range(len(shape))]
        assert fact.places == tuple(EVEN if one else None for one in same)
        assert fact.value == (array.flat[0] if all(same) else None)


@pytest.mark.parametrize("constant", [jax.random.key(0), np.ones((0, 2)), np.ones(2**20 + 1)])
def test_constants_of_which_nothing_is_known(constant):
    """Keys, arrays without entries, and those that are large."""
    assert of_array(constant) == Fact(places=(None,) * constant.ndim, token=CONSTANT)
