"""check_privacy says of every honest step that it is fine, and of every misused one that it is not.

Steps are written from the definition of differential privacy, and know nothing of how they are
checked.
"""

import pytest

import eqx_dp as dp
from tests.checks.attacked_steps import ATTACKED
from tests.checks.honest_steps import HONEST as STEPS
from tests.checks.honest_visits import VISITS
from tests.checks.misused_steps import MISUSED

pytestmark = pytest.mark.sampled(12)

HONEST = STEPS | VISITS


def report_on(case):
    given = {"disclose": case.disclose, **case.more}
    if case.private is not None:
        given |= {"private": case.private, "plan": case.plan}
    return dp.check_privacy(case.fn, *case.args, **given, **case.kwargs)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_step_passes(name):
    case = HONEST[name]()
    report = report_on(case)
    assert report.ok, str(report)
    if case.noise_multiplier is not None:
        least = min(release.noise_multiplier for release in report.releases)
        assert least == pytest.approx(case.noise_multiplier, rel=1e-3)


@pytest.mark.parametrize("name", MISUSED)
def test_a_misuse_is_found(name):
    case = MISUSED[name]()
    report = report_on(case)
    text = str(report)
    if not (case.kept and report.kept):
        assert not report.ok, text
        found = report.violations if case.decided else (*report.violations, *report.undecided)
        assert {finding.rule for finding in found} & set(case.rules), text
    assert case.says.casefold() in text.casefold()


@pytest.mark.parametrize("name", ATTACKED)
def test_an_attack_is_found(name):
    case = ATTACKED[name]()
    report = report_on(case)
    assert not report.ok, str(report)
    found = (*report.violations, *report.undecided)
    assert {finding.rule for finding in found} & set(case.rules), str(report)
