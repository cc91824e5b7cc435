"""`check_privacy` calls no step fine that leaks, whatever proof it lacks."""

import equinox as eqx
import pytest

from tests.checks.test_privacy_corpus import report_on
from tests.checks.unproven_steps import LEAKING


@pytest.mark.parametrize("name", LEAKING)
def test_a_step_that_leaks_is_not_fine(name):
    case = LEAKING[name]()
    eqx.filter_eval_shape(case.fn, *case.args, **case.kwargs)  # it is a step that runs
    report = report_on(case)
    assert not report.ok, f"{LEAKING[name].__doc__}\n{report}"
    assert report.violations or report.undecided
