"""`check_privacy` says of honest steps that they are fine and of none that leaks, and says why."""

import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_dp as dp
from eqx_dp.checks import privacy, privacy_flow
from eqx_dp.checks.arguments import Argument
from eqx_dp.checks.facts import ANY, DATA, Fact, Reach, Row
from eqx_dp.checks.roles import MASK
from eqx_dp.checks.streams import CALL, Given, Key, Stream
from tests.checks import privacy_steps as steps
from tests.checks.honest_steps import HONEST, UNDECIDED, with_optimizer_named
from tests.checks.leaking_steps import LEAKING
from tests.checks.privacy_steps import report_on
from tests.optimizers import AROUND, offered
from tests.tiers import curated


def one_of_each_frame(cases):
    """The name of a step of each kind: the others run in the slow tier."""
    names = {}
    for name, case in cases.items():
        names.setdefault(case.func, []).append(name)
    return [of_frame[0] for of_frame in names.values()]


@pytest.mark.parametrize("name", curated(HONEST, one_of_each_frame(HONEST)))
def test_an_honest_step_is_fine(name):
    case = HONEST[name]()
    report = report_on(case)
    assert report.ok, str(report)
    if case.noise_multiplier:
        least = min(release.noise_multiplier for release in report.releases)
        assert least == pytest.approx(case.noise_multiplier, rel=1e-3)


@pytest.mark.parametrize("name", UNDECIDED)
def test_an_honest_step_may_be_undecided_and_is_no_violation(name):
    report = report_on(UNDECIDED[name]())
    assert report.undecided, str(report)
    assert not report.violations, str(report)


# Plain misuses, and a rule that each breaks for certain.
VIOLATIONS = {
    "no_noise": "release",
    "noise_of_half_the_plan": "noise",
    "for_a_mean_on_a_sum": "noise",
    "of_another_relation": "noise",
    "inner_step_without_noise": "release",
    "constant_key": "fresh noise",
    "not_advanced": "fresh noise",
    "one_key_for_two_losses": "fresh noise",
    "two_privatizers_of_one_secret": "fresh noise",
    "no_mask": "padding",
    "mean_loss_returned": "release",
    "aux_returned": "release",
    "sum_without_noise_returned": "release",
    "loss_printed": "side door",
    "kept_noise_returned": "release",
    "kept_noise_printed": "side door",
    "skipped_by_the_loss": "side door",
    "stream_in_metrics": "release",
    "children_of_the_stream": "release",
}
# What is left of the plan's noise multiplier, which is 1.2.
MULTIPLIERS = {
    "noise_of_half_the_plan": 0.6,
    "for_a_mean_on_a_sum": 0.24,
    "gradient_scaled_before_the_noise": 0.12,
    "one_noise_for_four_losses": 0.3,
    "two_losses_with_the_noise_of_one": 1.2 / math.sqrt(2),
    "one_batch_four_times": 0.6,
    "without_a_clip_norm": 0.0,
}
# A step whose findings are of lines in libraries as well: each is told by the user's own line.
LINES = {"no_noise", "adam_before_the_noise", "multi_steps_before_the_noise", "loss_checked"}
# What the report says of the fault, or of what to do.
WORDS = {
    "constant_key": "its key is a constant",
    "noise_of_half_the_plan": "multiplier is 0.6, and the plan accounts for 1.2",
    "uniform_noise": "dp.add_noise",
}
KNOWN = [*VIOLATIONS, *MULTIPLIERS, *LINES, *WORDS]
assert LEAKING.keys() >= {*KNOWN}


@pytest.mark.parametrize("name", curated(LEAKING, [*KNOWN, *one_of_each_frame(LEAKING)]))
def test_a_step_that_leaks_is_not_fine(name):
    report = report_on(LEAKING[name]())
    findings = *report.violations, *report.undecided
    assert findings, str(report)
    assert not any("the check failed" in finding.found for finding in findings), str(report)
    assert WORDS.get(name, "") in str(report)
    if name in VIOLATIONS:
        assert VIOLATIONS[name] in {finding.rule for finding in report.violations}, str(report)
    if name in MULTIPLIERS:
        assert report.noise_multiplier == pytest.approx(MULTIPLIERS[name], rel=1e-3), str(report)
    if name in LINES:
        lines = {finding.where for finding in findings}
        lines |= {line for release in report.releases for line in release.where}
        assert lines != {"the results"}
        assert all("/tests/checks/" in line for line in lines - {"the results"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*offered(), *AROUND}))
def test_every_optimizer_of_optax_behind_the_noise_is_fine(name):
    report = report_on(with_optimizer_named(name))
    assert report.ok, str(report)


# How it is called.


def honest(model, state, x, y, mask):
    at, state = steps.at_hand(model, state, x, y, mask)
    noisy = at.noised()
    return steps.updated(model, state._replace(stream=at.noise.state), noisy)


def leaking(model, state, x, y, mask):
    return *honest(model, state, x, y, mask), {"mean": x.mean(), "norm": jnp.ones(())}


ARGS = (steps.mlp(), steps.first_state(), *steps.data())


def check(step=honest, args=ARGS, private=(2, 3, 4), plan=steps.PLAN, **more):
    return dp.check_privacy(step, *args, private=private, plan=plan, **more)


def test_private_arguments_are_positions_names_or_parts_of_trees():
    assert check(private=("x", "3", "mask")).ok

    def step(model, state, batch):
        return honest(model, state, batch["x"], batch["y"], batch["mask"])

    args = *ARGS[:2], dict(zip(("x", "y", "mask"), ARGS[2:], strict=True))
    for private in ("batch", ("batch.x", "batch.y", "2.mask")):
        assert check(step, args, private).ok
    report = check(step, args, ("batch.x",))
    assert not report.ok, str(report)
    assert "public_rows=" in str(report)
    report = check(step, args, ("batch.x",), public_rows=("batch.y", "batch.mask"))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"private": None}, "found private=None"),
        ({"private": ()}, "private must say which"),
        ({"private": (7,)}, "arrays .model, state, x, y, mask. .*found private=7"),
        ({"private": ("z",)}, "found private='z'"),
        ({"private": (True, False)}, "found private=True"),
        ({"private": (1.5,)}, "found private=1.5"),
        ({"disclose": ("loss",)}, r"disclose names 'loss'.*exactly: 0\.layers"),
    ],
)
def test_what_is_private_or_disclosed_has_to_be_there(options, says):
    with pytest.raises(ValueError, match=says):
        check(**options)


# What the report holds.


def test_a_report_tells_everything():
    report = check(leaking)
    assert not report.ok
    (finding,) = report.violations
    assert finding.rule == "release"
    assert "2.mean" in finding.found
    assert "norm" not in finding.found
    with pytest.raises(ValueError, match=r"2\.mean"):
        report.raise_if_violated()
    read = json.loads(report.to_json())
    assert read["ok"] is False
    assert read["noise_multiplier"] == pytest.approx(1.2)
    assert read["violations"][0]["rule"] == "release"
    assert read["releases"][0]["stddev"] == pytest.approx(steps.STDDEV)
    assert read["plan"] == json.loads(steps.PLAN.to_json())
    assert report._repr_html_().startswith("<pre>")
    disclosed = check(leaking, disclose="2.mean")
    disclosed.raise_if_violated()
    assert disclosed.disclosed == ("2.mean",)
    assert "disclosed, without noise: 2.mean" in str(disclosed)


def test_facts_about_arguments():
    """An example in each row; or a stream, a key, an array that is the same for all examples."""
    given = lambda leaf, stream=None: Argument(("0", "x"), stream, leaf)  # noqa: E731
    rows = Row(5, 0), Row(5, 1), None
    for dtype, token in ((float, None), (int, ("index", "x"))):
        known = privacy._rowwise(given(np.zeros((5, 2, 3), dtype)), False)
        assert known == Fact(Reach(DATA, "", True), rows, token=token)
    mask = privacy._rowwise(given(np.zeros(5, bool)), True)
    assert (mask.token, mask.places) == (MASK, (rows[0]._replace(chosen_by=ANY),))
    array = privacy._public(3, given(np.zeros((5, 2))))
    assert array == Fact(places=(None, None), turns=frozenset({CALL}), token=Given(3))
    assert privacy._public(3, given(np.zeros(2), (1, 2))) == Fact(token=Stream(1, 2))
    key = jax.random.key(0)
    for leaf, token in ((key, Key(3)), (key[None], None), (jax.random.key(0, impl="rbg"), None)):
        assert privacy._public(3, given(leaf)) == Fact(places=(None,) * leaf.ndim, token=token)


def test_a_step_without_releases():
    assert "result the result" in str(dp.check_privacy(jnp.sum, jnp.ones(2), private=0))
    report = dp.check_privacy(lambda x: {"<b>": x.sum()}, jnp.ones(2), private=0)
    assert not report.ok
    assert "<b>" in str(report)
    assert "<b>" not in report._repr_html_()
    assert json.loads(report.to_json())["noise_multiplier"] == "inf"
    assert dp.check_privacy(lambda x: jnp.ones(3), jnp.ones(2), private=0).ok


def test_a_step_of_make_step_knows_its_plan_and_its_examples():
    report = report_on(steps.made())
    assert report.plan == steps.PLAN
    assert report.steps == 1
    (release,) = report.releases
    assert release.noise_multiplier == pytest.approx(1.2)
    # No line is the user's, and those who call the check are not named.
    assert all("eqx_dp/" in line for line in release.where)
    assert "test_privacy.py" not in str(report)


def looked_at(look):
    """The findings on a loss that looks at its value."""

    def loss(model, x, y):
        return look(steps.squared_error(model, x, y))

    report = report_on(steps.chained(loss=loss, method="per_example"))
    findings = *report.violations, *report.undecided
    assert {finding.rule for finding in findings} == {"side door"}
    assert all("test_privacy.py" in finding.where for finding in findings)
    return [finding.found for finding in findings], findings[0].advice


def test_a_solver_that_throws_is_told_not_to_and_a_print_is_not_taken_for_it():
    found, advice = looked_at(lambda value: eqx.error_if(value, value > 10, "too large"))
    assert all("eqx.error_if" in text for text in found)
    assert "throw=False" in advice
    (text,), _ = looked_at(lambda value: (jax.debug.print("{}", value), value)[1])
    assert "error_if" not in text


def test_an_error_of_the_check_is_undecided_with_its_line(monkeypatch):
    def fails(*args):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(privacy_flow.rows, "places_of", fails)
    report = report_on(steps.chained())
    assert not report.violations
    assert any("IndexError" in finding.found for finding in report.undecided)
    assert any("/tests/checks/" in finding.where for finding in report.undecided)


def test_arrays_of_one_process_of_several_are_undecided(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    (finding,) = check().undecided
    assert "arrays of this one alone" in finding.found
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ARGS[2:])
    assert check(args=(*ARGS[:2], *shapes)).ok
    assert not check(args=(*ARGS[:2], ARGS[2], *shapes[1:])).ok


@pytest.mark.parametrize(
    ("array", "is_so"),
    [
        (jnp.arange(steps.SLOTS), True),
        (jnp.ones((steps.SLOTS, 2)), False),  # the same for all
        (jnp.arange(2.0)[:, None] * jnp.arange(steps.NUM_EXAMPLES), True),
        (jnp.arange(2.0)[:, None] * jnp.arange(steps.SLOTS), False),
    ],
    ids=["batch", "even", "data", "columns"],
)
def test_an_array_as_long_as_the_batch_or_the_data_is_undecided(array, is_so):
    def step(*args):
        model, state = honest(*args)
        return model, state._replace(kept=2 * array)

    report = check(step, sampler=steps.PLAN.sampler(steps.NUM_EXAMPLES, seed=steps.SECRET))
    assert [one.rule for one in report.undecided] == ["examples apart"] * is_so, str(report)


@pytest.mark.parametrize("private", [2, "batch", ("batch",)])
def test_a_number_among_private_arguments_is_undecided(private):
    def step(model, state, batch):
        return honest(model, state, *batch["arrays"])

    args = *ARGS[:2], {"arrays": ARGS[2:], "most": 3}
    (finding,) = check(step, args, private).undecided
    assert "batch.most" in finding.found


def test_two_streams_of_one_key_are_a_violation():
    for key, is_so in ((steps.SECRET, True), (steps.SECRET + 1, False)):
        state = ARGS[1]._replace(kept=dp.noise_stream(key=key))
        report = check(args=(ARGS[0], state, *ARGS[2:]))
        assert [one.rule for one in report.violations] == ["fresh noise"] * is_so


def test_a_sampler_draws_as_the_plan_says():
    for prob, found in ((0.5, []), (0.25, ["sampling"])):
        plan = dp.PrivacyPlan(prob, 10, 1.2, 1e-5)
        report = check(sampler=plan.sampler(steps.NUM_EXAMPLES, seed=steps.SECRET))
        assert [one.rule for one in report.violations] == found


# Loops.


@pytest.mark.parametrize(
    "turns_none",
    [
        lambda x, n: lax.while_loop(lambda c: c[1] < 0, lambda c: (0 * c[0], c[1]), (x, n))[0],
        lambda x, n: lax.fori_loop(0, n, lambda i, c: jnp.zeros_like(c), x),
        lambda x, n: lax.scan(lambda c, _: (jnp.zeros_like(c), None), x, None, length=0)[0],
    ],
)
def test_a_loop_may_take_no_turn(turns_none):
    report = report_on(steps.beside(lambda at: turns_none(at.x, at.state.step)))
    assert [finding.rule for finding in report.violations] == ["release"]
