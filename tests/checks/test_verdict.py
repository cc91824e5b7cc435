"""What is said of a walk through a step: of results, releases, streams and keys, one by one.

The records are made by hand. A whole step meets few of these rules, and mostly several at once.
"""

import math

import jax.numpy as jnp
import pytest

import eqx_dp as dp
from eqx_dp.checks.arguments import Argument
from eqx_dp.checks.facts import DATA, Fact, Reach, Sum, Term
from eqx_dp.checks.privacy_flow import SECRET
from eqx_dp.checks.record import Record
from eqx_dp.checks.streams import CALL, Key, Stream
from eqx_dp.checks.sums import Release, Source
from eqx_dp.checks.verdict import Result, report_on
from eqx_dp.programs import Context, Loop
from tests.checks.privacy_steps import plan_under

PLAN = dp.PrivacyPlan(0.5, steps=10, noise_multiplier=2.0, delta=1e-5)
MODEL, STREAM, KEY = 0, 1, 4  # where arguments stand
ARGUMENTS = (
    Argument(("0", "model"), None, jnp.zeros(3)),
    *(Argument((f"1.{part}", f"stream.{part}"), (7, part), jnp.zeros(2)) for part in range(3)),
    Argument(("2", "key"), None, jnp.zeros(2)),
)


def released(leaf="a", stddev=2.0, loops=(), batches=(), correlation=None, gain=1.0):
    """Noise on one leaf of a clipped sum."""
    context = Context(line=f"noise of {leaf}", loops=tuple(Loop(*loop) for loop in loops))
    sums = (Sum((Term((leaf, 0), gain),)),)
    return Release(sums, stddev, correlation or dp.Banded(), frozenset(batches), context)


def record_of(*releases, unit=None, batches=()):
    record = Record(ARGUMENTS)
    record.releases = dict(enumerate(releases))
    leaves = {one.sums[0].terms[0].leaf[0] for one in releases}
    record.sources = {leaf: Source(1.0, frozenset(batches), unit, "engine") for leaf in leaves}
    record.drawn = {(7, "argument"): ("place", "the draw")} if releases else {}
    return record


def stream(root=7, at="draw", parts=range(3)):
    """The parts of a stream as results, each at the place of its argument."""
    return [
        Result(f"stream.{part}", Fact(token=Stream(root, part, at)), STREAM + part, False)
        for part in parts
    ]


def said(record, results=None, plan=PLAN):
    """The report, and its findings: a rule, whether it is broken for certain, where, and words."""
    report = report_on(record, stream() if results is None else results, plan)
    findings = [*report.violations, *report.undecided]
    return report, [(one.rule, one.is_decided, one.where, one.found) for one in findings]


# Results.

PRIVATE = Reach(DATA, "", True)
LEAVING = {  # a fact about a result, its place in the next call, whether it is disclosed, the rule
    "public": (Fact(), None, False, None),
    "private": (Fact(PRIVATE), None, False, True),
    "private and kept": (Fact(PRIVATE), KEY, False, False),
    "private and of the model": (Fact(PRIVATE), MODEL, False, True),
    "disclosed": (Fact(PRIVATE), None, True, None),
    "disclosed, public": (Fact(), None, True, None),
    "a disclosed secret": (Fact(Reach(SECRET, "", True)), None, True, True),
    "with noise of another kind": (Fact(PRIVATE._replace(is_random=True)), None, False, False),
    "a clipped sum": (Fact(sum=Sum(())), None, False, True),
    "a clipped sum that is kept": (Fact(sum=Sum(())), KEY, False, False),
}


@pytest.mark.parametrize("name", LEAVING)
def test_a_result_that_leaves(name):
    fact, returns, is_disclosed, is_decided = LEAVING[name]
    record = record_of(released())
    record.trained = {MODEL}
    report, findings = said(record, [*stream(), Result("loss", fact, returns, is_disclosed)])
    assert report.disclosed == (("loss",) if is_disclosed and name != "disclosed, public" else ())
    if is_decided is None:
        assert report.ok
        return
    ((rule, was_decided, where, found),) = findings
    assert (rule, was_decided, where) == ("release", is_decided, "the results")
    assert found.startswith(f"result loss: {fact.reach.why or 'a clipped sum is in it, without'}")
    assert found.endswith(", and it stays in the state") == (returns == KEY)


def test_results_of_one_cause_are_one_finding_and_what_follows_from_another_is_none():
    known = Fact(Reach("of data", "a line", is_proven=True))
    results = [Result(name, known, None, False) for name in ("loss", "aux")]
    _, findings = said(record_of(released()), [*stream(), *results])
    assert findings == [("release", True, "a line", "results loss, aux: of data")]
    record = record_of(released())
    record.add("side door", "found before", "a line")
    unproven = Result("other", Fact(Reach("perhaps")), None, False)
    _, findings = said(record, [*stream(), *results[:1], unproven])
    assert [one[3] for one in findings] == ["result loss: of data", "found before"]
    assert not said(record_of(released()), [*stream(), unproven])[0].ok


# Releases, and the plan.

REPLACED = plan_under(dp.NeighboringRelation.REPLACE_ONE)


@pytest.mark.parametrize(("plan", "moved"), [(PLAN, 1), (None, 1), (REPLACED, 2)])
def test_each_release_and_all_together(plan, moved):
    releases = released(gain=0.25), released("b", 4.0, gain=2.0)
    report, _ = said(record_of(*releases), plan=plan)
    first, second = report.releases
    assert first == (0.25 * moved, 2.0, 8 / moved, 1, ("noise of a",))
    assert second == (2.0 * moved, 4.0, 2 / moved, 1, ("noise of b",))
    assert report.noise_multiplier == pytest.approx(1 / math.hypot(1 / 8, 1 / 2) / moved)


def test_a_release_of_something_without_a_bound():
    report, _ = said(record_of(released(loops=[("x", None)])))
    assert (report.releases[0].sensitivity, report.noise_multiplier) == (math.inf, 0)


@pytest.mark.parametrize(
    ("first", "second", "steps"), [("", "", 1), ("x", "", 9), ("x", "y", 13), ("xy", "xy", 40)]
)
def test_steps_of_a_call(first, second, steps):
    loops = [("x", 8), ("y", 5)]
    releases = released("a", 1e6, loops, first), released("b", 1e6, loops, second)
    report, findings = said(record_of(*releases))
    assert report.steps == steps
    words = f"a call takes {steps} steps, and the plan accounts for 10"
    assert [one[1::2] for one in findings] == [(True, words)] * (steps > 10)
    assert said(record_of(released("a", 1e6, [("x", PLAN.steps)], "x")))[0].ok


def test_noise_that_is_less_than_the_plan_has():
    less = "the noise multiplier is {}1.9, and the plan accounts for 2"
    _, findings = said(record_of(released(stddev=1.9)))
    assert findings == [("noise", True, "noise of a", less.format(""))]
    assert not said(record_of(released(stddev=2 - 1e-4)))[1]
    assert said(record_of(released(stddev=2 - 3e-4)))[1]
    # Of several draws from a stream nobody knows that all are as little.
    record = record_of(released(stddev=1.9))
    record.drawn[7, "draw"] = ("another place", "another draw")
    _, findings = said(record, stream(at="another draw"))
    assert findings == [("noise", False, "noise of a", less.format("at least "))]
    _, findings = said(record_of(released(stddev=1.9), released("b", 1e6)))
    assert [one[:2] for one in findings] == [("noise", False)]


def test_correlation_unit_and_padding_are_the_plans():
    _, findings = said(record_of(released(correlation=dp.Banded.bisr(2))))
    ((rule, is_decided, _, found),) = findings
    assert (rule, is_decided) == ("noise", True)
    assert found.startswith("noise is correlated by Banded(")
    _, findings = said(record_of(released(), unit=dp.Users(None, 2)))
    assert [one[:3] for one in findings] == [("release", False, "engine")]
    for prob, expected in ((0.5, [("padding", True, "a"), ("padding", False, "b")]), (1.0, [])):
        record = record_of(released())
        record.unmasked = {"a": True, "b": False}
        _, findings = said(record, plan=dp.PrivacyPlan(prob, 10, 2.0, 1e-5))
        assert [one[:3] for one in findings] == expected


def test_a_plan_without_a_release():
    for multiplier in (PLAN.noise_multiplier, 0.5):
        (finding,) = said(record_of(), plan=dp.PrivacyPlan(0.5, 10, multiplier, 1e-5))[1]
        assert finding[:3] == ("noise", False, "the step")
    assert said(record_of(), plan=None)[0].ok
    assert said(record_of(), plan=dp.PrivacyPlan(0.5, 10, 0.0, 1e-5))[0].ok
    for record, rule in ((record_of(), "side door"), (record_of(released(stddev=0.1)), "noise")):
        record.add(rule, "found before", "a line")
        assert [one[3] for one in said(record)[1]] == ["found before"]


def test_stacks_of_batches_beside_batches():
    record = record_of(released("a", 1e6), batches=["x"])
    report, findings = said(record)
    assert not findings
    assert any("read as stacks of batches" in note for note in report.notes)
    record.sources["b"] = Source(1.0, frozenset(), None, "engine")
    report, findings = said(record)
    assert ("examples apart", False, "the step") in [one[:3] for one in findings]
    assert any("read as stacks of batches" in note for note in report.notes)
    assert not said(record_of(released()))[0].notes


# Streams, and keys of losses.

BACK = {
    "after its draw": (stream(), None),
    "as it came": (stream(at="argument"), True),
    "not at all": ([], False),
    "another stream": (stream(root=8), False),
    "a part of another": ([*stream(parts=(0, 1)), *stream(root=8, parts=(2,))], False),
}


@pytest.mark.parametrize("name", BACK)
def test_a_stream_that_comes_back(name):
    results, is_decided = BACK[name]
    _, findings = said(record_of(released()), results)
    lost = [one for one in findings if one[0] == "fresh noise"]
    assert len(lost) == (0 if is_decided is None else 1 if "part" in name else 3)
    assert all(one[1:3] == (is_decided, "the draw") for one in lost)


def test_a_stream_without_a_draw_may_go_and_its_secrets_may_not():
    for part, is_secret in ((0, True), (1, False), (3, True)):
        record = record_of(released())
        record.drawn = {}
        assert said(record, [])[0].ok
        elsewhere = [Result("copy", Fact(token=Stream(7, part)), at, False) for at in (None, KEY)]
        _, findings = said(record, elsewhere[:1])
        assert findings == [("release", True, "the results", f"result copy: {SECRET}")] * is_secret
        assert bool(said(record, elsewhere[1:])[1]) == is_secret


ANOTHER, TOO = "is not proven to be another one in each call", "is used at a line, too"
KEYS = {  # what the loss draws with, what else is used, what comes back at its place
    "given anew": (Key(KEY), None, None, None),
    "a child, of which another comes back": (Key(KEY, (1,)), None, Key(KEY, (0,)), None),
    "it comes back": (Key(KEY), None, Key(KEY), ANOTHER),
    "another child is used": (Key(KEY, (1,)), Key(KEY, (0,)), None, None),
    "the same is used": (Key(KEY), Key(KEY), None, TOO),
    "a child is used": (Key(KEY), Key(KEY, (1,)), None, TOO),
    "another key is used": (Key(KEY), Key(KEY + 1), None, None),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_a_loss(name):
    own, other, back, words = KEYS[name]
    record = record_of(released())
    record.use(Fact(token=own), "the loss", of_loss=("engine",))
    record.use(Fact(token=other), "a line")
    results = [] if back is None else [Result("key", Fact(token=back), KEY, False)]
    report, findings = said(record, [*stream(), *results])
    assert report.notes == ("the loss's key, from key, is another one in each call",)
    assert [one[:3] for one in findings] == [("fresh noise", False, "the loss")] * bool(words)
    assert all(words in one[3] for one in findings)


def test_keys_that_are_results():
    record = record_of(released())
    counted = Fact(token=Key(KEY, (3,)), turns=frozenset({CALL}))
    record.use(counted, "the loss", of_loss=("engine",))
    kept = Result("state.key", Fact(token=Key(KEY)), KEY, False)
    assert said(record, [*stream(), kept])[0].ok
    copied = kept._replace(name="copy", returns=None)
    _, findings = said(record, [*stream(), kept, copied])
    assert [one[0] for one in findings] == ["fresh noise"]
    assert "is used at result copy, too" in findings[0][3]
