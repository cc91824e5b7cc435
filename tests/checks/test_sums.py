"""What the check says of clipped sums, against how far linear functions and releases truly move.

The rules are internal: a whole step that is checked meets few of them.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import eqx_dp as dp
from eqx_dp.checks import sums
from eqx_dp.checks.facts import Fact, Sum, Term
from eqx_dp.checks.privacy_flow import PrivacyFlow
from eqx_dp.programs import Context, Loop

SHAPE = 2, 3
PUBLIC = np.arange(1.0, 7.0, dtype=np.float32).reshape(SHAPE)
A, OTHER, B = ("a", 0), ("a", 1), ("b", 0)  # two leaves of one clipped sum, and one of another

# A function of three leaves and a public array: how far it goes with a move of A and of B; None if
# nothing is known.
LINEAR = {
    "times a number": (lambda a, other, b, p: 2 * a, (2, 0)),
    "a number times": (lambda a, other, b, p: a * -3.0, (3, 0)),
    "times two numbers": (lambda a, other, b, p: 3.0 * (2 * a), (6, 0)),
    "divided by a number": (lambda a, other, b, p: a / 4, (0.25, 0)),
    "named": (lambda a, other, b, p: checkpoint_name(a, "a"), (1, 0)),
    "negative": (lambda a, other, b, p: -a, (1, 0)),
    "moved": (lambda a, other, b, p: a.T[::-1].reshape(SHAPE)[None], (1, 0)),
    "with a public array": (lambda a, other, b, p: p - a + p, (1, 0)),
    "twice": (lambda a, other, b, p: a + a, (2, 0)),
    "added": (lambda a, other, b, p: 2 * a + b, (2, 1)),
    "subtracted": (lambda a, other, b, p: a - 0.5 * b, (1, 0.5)),
    "side by side": (lambda a, other, b, p: jnp.concatenate([2 * a, b]), (2, 1)),
    "two leaves": (lambda a, other, b, p: a + other, None),
    "times a public array": (lambda a, other, b, p: a * p, None),
    "times an argument": (lambda a, other, b, p: a * p[0, 0], None),
    "times zero": (lambda a, other, b, p: a * 0.0, (0, 0)),
    "divided by zero": (lambda a, other, b, p: a / 0.0, None),
    "times infinity": (lambda a, other, b, p: a * math.inf, None),
    "divided by it": (lambda a, other, b, p: p / a, None),
    "quotient": (lambda a, other, b, p: a / b, None),
    "at least a number": (lambda a, other, b, p: jnp.maximum(a, 2.0), None),
    "sine": (lambda a, other, b, p: jnp.sin(a), None),
    "copies": (lambda a, other, b, p: jnp.broadcast_to(a, (2, *SHAPE)), None),
    "one of its numbers": (lambda a, other, b, p: lax.add(p, a[:1, :1].reshape(())), None),
    "narrow": (lambda a, other, b, p: a.astype(jnp.bfloat16), None),
    "complex": (lambda a, other, b, p: a.astype(jnp.complex64), (1, 0)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_function_moves_as_far_as_is_said(name):
    function, said = LINEAR[name]
    program = jax.make_jaxpr(function)(*[PUBLIC] * 4)
    facts = [Fact(sum=Sum((Term(leaf, 1.0),))) for leaf in (A, OTHER, B)]
    (fact,) = PrivacyFlow([]).program(program, [*facts, Fact(places=(None, None))], Context())
    assert not fact.is_public
    assert "the check failed" not in fact.reach.why
    assert (fact.sum is None) == bool(fact.reach.why) == (said is None)
    if said is None:
        is_proven = name in ("sine", "at least a number")  # of one entry each
        assert fact.reach.is_proven == is_proven
        return
    for argument, (leaf, gain) in zip((0, 2), ((A, said[0]), (B, said[1])), strict=True):
        assert sum(term.gain for term in fact.sum.terms if term.leaf == leaf) == gain
        slope = jax.jacobian(lambda *x: jnp.real(function(*x)), argument)(*[PUBLIC] * 4)
        assert np.linalg.norm(slope.reshape(-1, PUBLIC.size), 2) <= gain * (1 + 1e-6)


def test_parts_of_sums_over_loops_are_not_added_to_others():
    whole, part, other = (Fact(sum=Sum((Term(B, 1.0),), over)) for over in (None, "loop", "loop"))
    program = jax.make_jaxpr(jnp.add)(PUBLIC, PUBLIC)
    for facts, over in (((part, other), "loop"), ((whole, part), None)):
        (fact,) = PrivacyFlow([]).program(program, [*facts], Context())
        assert (fact.sum is None) == (over is None)
        assert fact.sum is None or fact.sum.over == over


def after_itself(total, x):
    total = total + x
    return total, total


TURNS = {
    "added": (lambda total, x: (total + x, x), True),
    "added to": (lambda total, x: (2 * x + total, x), True),
    "doubled": (lambda total, x: (total + total, x), False),
    "scaled": (lambda total, x: (total * x, x), False),
    "added twice": (lambda total, x: (total + x + x, x), False),
    "as it was": (lambda total, x: (total, x), False),
    "returned before": (lambda total, x: (total + x, total), False),
    "read before": (lambda total, x: (total + x, x * total), False),
    "added to another": (lambda total, x: (total + x, total + 2 * x), False),
    "read after": (after_itself, False),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_that_only_add(name):
    function, is_so = TURNS[name]
    assert sums.is_added_to(jax.make_jaxpr(function)(1.0, 2.0).jaxpr, 0, 0) == is_so


# Releases: each clipped sum moves within a ball, and each release by what its terms say.


def release(*arrays, stddev=1.0, loops=(), batches=()):
    """Noise on arrays; each is a list of gains of leaves."""
    terms = [Sum(tuple(itertools.starmap(Term, gains.items()))) for gains in arrays]
    context = Context(loops=tuple(itertools.starmap(Loop, loops)))
    return sums.Release(tuple(terms), stddev, dp.Banded(), frozenset(batches), context)


def furthest(releases, bounds, moves):
    """How far releases move together, in standard deviations, by unit moves of clipped sums."""
    square = 0.0
    for one in releases:
        again = math.prod(loop.length for loop in one.context.loops if loop.path not in one.batches)
        for array in one.sums:
            move = sum(term.gain * bounds[term.leaf[0]] * moves[term.leaf] for term in array.terms)
            square += again * (move / one.stddev) ** 2
    return math.sqrt(square)


def sources(bounds):
    return {name: sums.Source(bound, frozenset(), None, "") for name, bound in bounds.items()}


BOUNDS = {"a": 0.5, "b": 3.0}
TIGHT = {
    "one": [release({A: 2}, {OTHER: 3}, stddev=4)],
    "two of one leaf": [release({A: 2}), release({A: 3}, {OTHER: 1}, stddev=2)],
    "two arrays of one leaf": [release({A: 2}, {A: 3})],
    "added": [release({A: 2, B: 5})],
    "each with its noise": [release({A: 2}, stddev=3), release({B: 1}, stddev=0.1)],
    "on one batch again": [release({A: 1}, loops=[("x", 3), ("y", 5)])],
    "on other batches": [release({A: 1}, loops=[("x", 3), ("y", 5)], batches=["y"])],
}


@pytest.mark.parametrize("name", TIGHT)
def test_releases_move_as_far_as_is_said(name):
    bound = 1 / sums.noise_multiplier(TIGHT[name], sources(BOUNDS))
    moves = ({A: one, OTHER: 1 - one, B: 1} for one in (0, 1))
    assert bound == pytest.approx(max(furthest(TIGHT[name], BOUNDS, move) for move in moves))


def test_releases_move_no_further_than_is_said():
    rng = np.random.default_rng(0)
    for _ in range(100):
        made = [
            release(
                *({leaf: rng.uniform(0, 2) for leaf in (A, B) if rng.random() < 0.6} or {A: 1.0}
                  for _ in range(2)),
                *({leaf: rng.uniform(0, 2)} for leaf in (OTHER, A)),
                stddev=rng.uniform(0.5, 2),
                loops=[("x", 2)] * rng.integers(2),
            )
            for _ in range(rng.integers(1, 4))
        ]  # fmt: skip
        bound = 1 / sums.noise_multiplier(made, sources(BOUNDS))
        for angle in np.linspace(0, np.pi / 2, 20):
            moves = {A: np.cos(angle), OTHER: np.sin(angle), B: 1.0}
            assert furthest(made, BOUNDS, moves) <= bound * (1 + 1e-9)


def test_releases_of_nothing_and_of_everything():
    assert sums.noise_multiplier([], {}) == math.inf
    assert sums.noise_multiplier([release({A: 0.0})], sources({"a": math.inf})) == math.inf
    assert sums.noise_multiplier([release({A: 1.0})], sources({"a": math.inf})) == 0
    for gain, multiplier in ((1.0, 0), (0.0, math.inf)):
        endless = [release({A: gain}, loops=[("x", None)])]
        assert sums.noise_multiplier(endless, sources(BOUNDS)) == multiplier
    again = endless[0]._replace(sums=(Sum((Term(A, 0.0), Term(A, 1.0))),))
    assert sums.noise_multiplier([again], sources(BOUNDS)) == 0
    loops = [("x", 3), ("y", 5), ("z", None)]
    assert sums.turns(release({A: 1.0}, loops=loops, batches=["x", "y"])) == (15, math.inf)
    assert sums.turns(release({A: 1.0}, loops=loops, batches=["z"])) == (0, 15)


def test_what_is_certainly_no_larger():
    one, own = release({A: 1.0}, {OTHER: 1.0}), sources({"a": 1.0})
    assert sums.is_tight([one], own)
    assert not sums.is_tight([one, one], own)
    assert not sums.is_tight([one], sources(BOUNDS))
    assert not sums.is_tight([release({A: 1.0}, {A: 1.0})], own)
