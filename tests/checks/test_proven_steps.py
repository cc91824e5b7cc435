"""`check_privacy` says of honest steps that they are fine, and raises on no step."""

import pytest

from tests.checks.privacy_steps import (
    SLOTS,
    added,
    by_hand,
    clipped,
    next_key,
    updated,
    with_noise,
)
from tests.checks.proven_steps import PROVEN, with_optimizer_named
from tests.checks.test_privacy_corpus import report_on
from tests.training.test_optimizers import AROUND, offered


@pytest.mark.parametrize("name", PROVEN)
def test_an_honest_step_is_fine(name):
    case = PROVEN[name]()
    report = report_on(case)
    assert report.ok, str(report)
    least = min(release.noise_multiplier for release in report.releases)
    assert least == pytest.approx(case.noise_multiplier, rel=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*offered(), *AROUND}))
def test_every_optimizer_of_optax_behind_the_noise_is_fine(name):
    report = report_on(with_optimizer_named(name))
    assert report.ok, str(report)


@pytest.mark.parametrize("stride", [2, 4, 8])
def test_strided_parts_of_a_batch_are_fine_or_undecided(stride):
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = [
            grad_fn(model, x[i::stride], y[i::stride], is_padding_example=mask[i::stride])
            for i in range(min(stride, SLOTS))
        ]
        return updated(model, state, with_noise(added(*parts), key))

    assert not report_on(by_hand(step)).violations
