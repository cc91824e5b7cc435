"""Replay sees leaks of each kind, and none in honest steps; the check calls no leak fine."""

import itertools

import pytest

from tests.benchmarks.checks import ACCUSED, LEAK, PLANS, judged
from tests.benchmarks.generated.grammar import made
from tests.benchmarks.generated.replay import truth
from tests.tiers import curated


def first(layout, *operations, kind="leak"):
    """The first step with these operations of a kind, and no others of that kind."""
    programs = (made(seed) for seed in itertools.count())
    return next(
        program
        for program in programs
        if program.layout == layout
        and [used for of, used in program.used if of == kind] == [*operations]
        and (operations or program.is_simple)
    )


@pytest.mark.parametrize("layout", curated(["batch", "device", "fixed", "users"], ["batch"]))
def test_honest_steps_are_fine(layout):
    program = first(layout)
    found = truth(program, PLANS[program.plan], seeds=2)
    assert found.breaks(PLANS[program.plan].noise_multiplier) is None
    assert 0 < found.noise_multiplier < 10, "the example moved nothing"


LEAKS = {
    "rows meet": ("batch", "x = x - x.mean(0)"),
    "padding counts": ("batch", "mask = jnp.zeros(8, bool)"),
    "slots differ": ("batch", "x = x * (jnp.arange(8.0) - 3.5)[:, None]"),
    "two rows of one index": ("device", "x, y, mask = table[index], labels[other], padding"),
    "a user counts twice": ("users", "rows of users, one by one"),
    "a key leaves": ("batch", "metrics['key'] = jax.random.key_data(STREAM.key)"),
    "a stream is used twice": ("batch", "noisy, _ = dp.add_noise(grads, state, STDDEV)"),
    "a loop shows a count": (
        "batch",
        "turns = jax.lax.while_loop(lambda i: i < jnp.sum(~padding), lambda i: i + 1, 0)",
    ),
}


@pytest.mark.parametrize("name", curated(LEAKS, ["a key leaves", "slots differ"]))
def test_leaks_are_seen(name):
    program = first(*LEAKS[name])
    assert truth(program, PLANS[program.plan]).breaks(PLANS[program.plan].noise_multiplier)


@pytest.mark.slow
def test_no_leak_is_called_fine_and_no_step_of_the_language_a_violation():
    found = [judged(seed) for seed in range(150)]
    assert [one for one in found if one.finding == LEAK] == []
    assert [one for one in found if one.finding == ACCUSED and one.kind == "honest"] == []
    assert sum(one.said == "certified" for one in found) > 20
