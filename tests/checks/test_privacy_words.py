"""What check_privacy says: the user's own lines, and what to do about each finding."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp
from eqx_dp.checks import privacy_flow
from tests.checks.leaking_noise_steps import NOISE
from tests.checks.leaking_steps import STEPS
from tests.checks.privacy_steps import (
    by_hand,
    cases,
    chained,
    made,
    mlp,
    noised_by,
    report_on,
    with_noise,
    with_normals,
)

LEAKING = cases([*STEPS, *NOISE])

pytestmark = pytest.mark.sampled(4)


@pytest.mark.parametrize(
    "name",
    [
        "no_noise",
        "adam_before_the_noise",  # in optax
        "multi_steps_before_the_noise",  # in a branch, of which JAX forgets the calls
        "mask_for_one_of_two_losses",  # the engine is called
        "loss_checked",  # in Equinox
    ],
)
def test_lines_are_those_of_the_user(name):
    report = report_on(LEAKING[name]())
    lines = [finding.where for finding in (*report.violations, *report.undecided)]
    lines += [line for release in report.releases for line in release.where]
    assert any("/tests/checks/" in line for line in lines)
    for line in lines:
        assert "/tests/checks/" in line or line == "the results"


def test_a_release_is_where_the_user_calls_the_optimizer():
    (release,) = report_on(chained()).releases
    assert ["privacy_steps.py" in line and "chained" in line for line in release.where] == [True]


def test_a_library_is_named_where_no_line_is_the_users():
    (release,) = report_on(made()).releases
    assert all("eqx_dp/" in line for line in release.where)


def test_callers_of_the_check_are_not_named():
    """A step of `make_step` is not to be found where it is checked."""
    assert "test_privacy_words.py" not in str(report_on(made()))


def test_a_solver_that_throws_is_told_not_to():
    def loss(model, x, y):
        value = jnp.sum((model(x) - y) ** 2)
        return eqx.error_if(value, value > 10, "too large")

    report = report_on(chained(loss=loss, method="per_example"))
    assert {finding.rule for finding in report.violations} == {"side door"}
    assert all("eqx.error_if" in finding.found for finding in report.violations)
    assert all("throw=False" in finding.advice for finding in report.violations)
    assert all("test_privacy_words.py" in finding.where for finding in report.violations)


def test_a_print_is_not_taken_for_a_check_of_a_solver():
    def loss(model, x, y):
        jax.debug.print("{}", x)
        return jnp.sum((model(x) - y) ** 2)

    (finding,) = report_on(chained(loss=loss, method="per_example")).violations
    assert "error_if" not in finding.found + finding.advice


def test_a_key_that_is_closed_over_is_said_to_be_a_constant():
    constant = jax.random.key(0)
    case = noised_by(lambda grads, key: with_noise(grads, constant))
    (finding,) = report_on(case).violations
    assert finding.rule == "fresh noise"
    assert "constant of the program" in finding.advice


def test_too_little_noise_is_shown_with_its_numbers():
    case = noised_by(lambda grads, key: with_noise(grads, key, 0.1))
    (finding,) = report_on(case).violations
    assert "standard deviation 0.1, sensitivity of all releases of a step together 0.2" in (
        finding.found
    )


def test_without_a_plan_nothing_is_as_planned():
    case = chained()
    report = dp.check_privacy(case.fn, *case.args, private=case.private)
    assert str(report).startswith("no violation; no plan")


def test_noise_by_hand_is_told_of_add_noise():
    report = report_on(noised_by(with_normals))
    assert not report.violations
    assert all("dp.add_noise" in finding.advice for finding in report.undecided)


def test_an_error_of_the_check_is_undecided_with_its_line(monkeypatch):
    def fails(*args):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(privacy_flow, "dimensions", fails)
    report = report_on(chained())
    assert not report.violations
    assert any("IndexError" in finding.found for finding in report.undecided)
    assert any("/tests/checks/" in finding.where for finding in report.undecided)


def test_json_is_json_with_infinities_as_texts():
    def step(model, state, x, y, mask):
        return model, state, jnp.mean(x)

    found = json.loads(report_on(by_hand(step, model=mlp())).to_json())
    assert found["noise_multiplier"] == "inf"
    assert not found["ok"]
    assert all("test_privacy_words.py" in finding["where"] for finding in found["violations"])
