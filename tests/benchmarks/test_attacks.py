"""The attacks find what is there to find, and nothing where nothing is."""

import numpy as np
import pytest

from tests.benchmarks import attacks, audit, recorded


def test_the_image_is_the_direction_of_its_gradient():
    rng = np.random.default_rng(0)
    image, cotangent = rng.random(784), rng.normal(size=64)
    gradient = np.outer(cotangent, [*image, 1.0])
    inverted = attacks.inverted(gradient).ravel()
    np.testing.assert_allclose(inverted / np.linalg.norm(inverted), image / np.linalg.norm(image))
    noisy = attacks.inverted(gradient + 100 * rng.normal(size=gradient.shape)).ravel()
    assert abs(np.corrcoef(noisy, image)[0, 1]) < 0.2


@pytest.mark.parametrize("learned", [0.0, 2.0])
def test_likelihood_ratios_find_members_among_images_of_all_kinds(learned):
    """Images differ in difficulty far more than training changes any of them."""
    rng = np.random.default_rng(0)
    is_in = rng.integers(2, size=(12, 400)).astype(bool)
    difficulty = 2 * rng.normal(size=400) - 8
    losses = np.exp(difficulty + 0.5 * rng.normal(size=is_in.shape) - learned * is_in)
    share, advantage = attacks.found(attacks.likelihood_ratios(is_in, losses), is_in)
    by_loss, _ = attacks.found(-losses, is_in)
    if learned:
        assert by_loss < 0.2
        assert share > 0.6
        assert advantage > 0.8
    else:
        assert share < 0.025
        assert advantage < 0.06


def test_what_is_found_of_perfect_and_useless_scores():
    is_in = np.arange(1000) % 2 == 1
    assert attacks.found(is_in.astype(float), is_in) == (1.0, 1.0)
    assert attacks.found(np.zeros(1000), is_in) == (0.0, 0.0)


def test_shares_of_audits_are_of_what_each_bound_is_for():
    made = audit.canaries.CanaryAudit("gradient", 100, 50, 0.95, 1e-5, 1.0, 4.0, 2.0, 5.0)
    found = audit.cells(made)
    assert (found["over stated"], found["over Gaussian"]) == ("0.25", "0.40")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("Trainer", []), ("FAULT: twice the clip norm that noise is for", ["moves too far"])],
)
def test_recorded_runs_tell_a_fault_from_a_correct_run(name, wrong):
    found = recorded.audited(recorded.rows()[name])
    assert found.wrong == wrong
    assert found.calls == 36
    assert found.largest > 0.99, "the bound was not tested"
