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

HONEST = STEPS | VISITS


def report_on(case):
    given = {"disclose": case.disclose, **case.more}
    if case.private is not None:
        given |= {"private": case.private, "plan": case.plan}
    return dp.check_privacy(case.fn, *case.args, **given, **case.kwargs)


BY_HAND = "noise by hand is undecided: dp.add_noise is what the check knows"
IN_PARTS = "parts of a batch by hand are undecided: the engine makes microbatches"
UNDECIDED = {
    "accumulated_in_a_python_loop": IN_PARTS,
    "accumulated_by_scan": IN_PARTS,
    "accumulated_by_fori_loop": IN_PARTS,
    "accumulated_over_a_mapped_axis": IN_PARTS,
    "noise_in_both_branches": "noise in two branches counts as if both were taken",
    "turns_of_two_losses": "of sums in two branches the bound is that of both together",
    "keys_of_leaves_folded_in": BY_HAND,
    "keys_of_leaves_split_one_after_another": BY_HAND,
    "noise_as_one_flat_vector": BY_HAND,
    "noise_drawn_at_once_and_cut": BY_HAND,
    "noise_by_scan_over_stacked_layers": BY_HAND,
    "noise_in_two_parts": "each noise counts as a release of its own",
    "noise_taken_away": "noise of zeros is subtracted, and not added by dp.add_noise",
}
"""Honest steps of which the check cannot tell, and why."""


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_step_passes(name):
    case = HONEST[name]()
    report = report_on(case)
    if name in UNDECIDED:
        assert report.undecided, str(report)
        assert not report.violations, str(report)
        return
    assert report.ok, str(report)
    if case.noise_multiplier is not None:
        least = min(release.noise_multiplier for release in report.releases)
        assert least == pytest.approx(case.noise_multiplier, rel=1e-3)


@pytest.mark.parametrize("name", MISUSED)
def test_a_misuse_is_found(name):
    case = MISUSED[name]()
    report = report_on(case)
    text = str(report)
    assert not report.ok, text
    found = (*report.violations, *report.undecided)
    assert {finding.rule for finding in found} & {*case.rules, "noise"}, text
    if case.says.startswith("0."):
        assert case.says in text or report.undecided, text


@pytest.mark.parametrize("name", ATTACKED)
def test_an_attack_is_found(name):
    report = report_on(ATTACKED[name]())
    assert not report.ok, str(report)


MUST_BE_VIOLATIONS = [
    "no_noise",
    "noise_of_half_the_plan",
    "noise_for_a_mean_on_a_sum",
    "noise_of_add_or_remove_under_replace_one",
    "one_noise_for_four_gradients_of_a_batch",
    "two_losses_with_the_noise_of_one",
    "epoch_that_takes_one_batch_four_times",
    "constant_key",
    "key_of_the_state_not_advanced",
    "counter_not_advanced",
    "one_key_for_two_losses",
    "mask_not_handed_on",
    "mean_loss_returned",
    "aux_returned",
    "sum_without_noise_returned",
    "learning_rate_from_the_loss",
    "loss_printed",
    "update_skipped_when_the_loss_is_high",
    "adam_before_the_noise",
    "inner_step_without_noise",
]


@pytest.mark.parametrize("name", MUST_BE_VIOLATIONS)
def test_a_plain_misuse_is_a_violation(name):
    case = MISUSED[name]()
    report = report_on(case)
    assert {finding.rule for finding in report.violations} & set(case.rules), str(report)
