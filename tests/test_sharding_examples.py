"""The examples of sharding: what they print, and whether it is true."""

import contextlib
import functools
import io
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests import oracle
from tests.test_examples import load, run

pytestmark = pytest.mark.slow

PLAIN = ["train_plainly", "train_plainly_by_shard_map"]
PRIVATE = ["train_privately", "train_privately_by_shard_map"]
CASES = ("mean, data", "mean, residual", "GPT")

losses, tour = load("sharded_loss"), load("data_parallel")


# examples/sharded_loss.py


@pytest.fixture(scope="module")
def cases():
    return {case.name: case for case in losses.make_cases()}


@pytest.fixture(scope="module")
def measured(cases):
    """What main returns and prints, and every gradient that it computes."""
    runs, output = [], io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        plain = losses.run
        patch.setattr(losses, "run", lambda *a: runs.append(plain(*a)) or runs[-1])
        figures = losses.main()
    # For every case one device, silent, Auto, Explicit.
    grads = {name: [r.grads for r in runs[4 * i : 4 * i + 4]] for i, name in enumerate(cases)}
    return SimpleNamespace(figures=figures, output=output.getvalue(), grads=grads)


def test_all_cases_stay_within_their_limits_and_are_printed(measured):
    found = {(figures.case, figures.axis_type) for figures in measured.figures}
    assert found == {(name, axes) for name in CASES for axes in ("Auto", "Explicit")}
    lines = measured.output.splitlines()[2:]
    for figures, line in zip(measured.figures, lines, strict=True):
        assert figures.error <= 1e-5 + oracle.room(16), figures
        assert figures.flops <= 1.1 * figures.silent_flops, figures
        assert figures.temporary_bytes <= 1.2 * figures.silent_temporary_bytes, figures
        assert figures.flops <= 1.3 * figures.flops_share, figures
        assert line.startswith(figures.case)
        assert line.split()[-5:] == [str(round(figure)) for figure in figures[3:]]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_clipping_by_hand(measured, cases, name):
    case, options = cases[name], {"l2_clip_norm": cases[name].l2_clip_norm, "keep_batch_dim": True}
    options["normalize_by"] = len(case.batch[0])
    loss = functools.partial(case.loss, losses.SILENT)
    truth = oracle.clipped_gradients(loss, case.model, *case.batch, **options)
    assert name != "GPT" or np.max(truth.grad_norm) > 1.1 * case.l2_clip_norm  # some are clipped
    for grads in measured.grads[name]:
        for found, right in zip(*map(jax.tree.leaves, (grads, truth.grads)), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)


# examples/data_parallel.py


def test_the_tour_runs_and_says_what_it_should():
    output = run("data_parallel.py")
    for way in ("sharded jit", "shard_map"):
        assert f"on 8 devices, by {way}: (8, 2), equal to the flat vector: True" in output
    assert output.count("the same on all 8 devices: True") == 4
    assert output.count(" in ENTRY ") == output.count("all-reduce: ") == 4
    assert "False" not in output


@pytest.fixture(scope="module")
def trained():
    """Every method of training, on eight devices."""
    return {name: getattr(tour, name)(tour.rules_on(8)) for name in PLAIN + PRIVATE}


@pytest.mark.parametrize("names", [PLAIN, PRIVATE], ids=["plain", "private"])
def test_all_devices_end_with_the_parameters_of_one(trained, names):
    alone = tour.parameters(getattr(tour, names[0])(tour.rules_on(1)).model)
    for name in names:
        copies = tour.parameters_by_device(trained[name].model)
        assert len(copies) == 8
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
            np.testing.assert_allclose(copy, alone, atol=1e-6)


def test_privacy_changes_three_lines_and_devices_meet_in_one_reduction(trained):
    changed = tour.changed_lines(tour.train_plainly, tour.train_privately)
    signs = [line[0] for line in changed]
    assert (signs.count("-"), signs.count("+")) == (3, 3)
    for result in trained.values():
        (place,) = tour.all_reduces(result.program)
        assert " in ENTRY " in place
