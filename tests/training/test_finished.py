"""A run whose steps are all taken gives its state without its seed; no other run does."""

import re

import pytest

from tests.training.runs import assert_same, make, plan_of, small_model, trainer

PLAN = plan_of(2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    return folder, trainer(folder, make(PLAN)).run(small_model())


def test_its_state_needs_no_seed(finished):
    folder, state = finished
    bound = sorted(folder.glob("released_at_most.*"))
    again = trainer(folder, make(PLAN, seed=None)).run(small_model())
    assert_same(again.model, state.model)
    assert int(again.step) == PLAN.steps
    assert sorted(folder.glob("released_at_most.*")) == bound
    # What its seed can do is not lost.
    assert_same(trainer(folder, make(PLAN)).run(small_model()), state)


@pytest.mark.parametrize("options", [{"l2_clip_norm": 2.0}, {"plan": plan_of(1)}])
def test_another_run_is_refused_all_the_same(finished, options):
    step = make(**({"plan": PLAN, "seed": None} | options))
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        trainer(finished[0], step).run(small_model())
    assert "seed:" not in str(caught.value)


def test_a_run_that_is_not_finished_needs_its_seed(tmp_path):
    trainer(tmp_path, make(PLAN)).run(small_model(), steps=1)
    found = re.escape("saved up to step 1 of 2, and cannot go on without its seed")
    with pytest.raises(ValueError, match=rf"{found}.*dp\.load_model"):
        trainer(tmp_path, make(PLAN, seed=None)).run(small_model())


def test_no_run_begins_in_a_directory_without_a_seed(tmp_path):
    with pytest.raises(ValueError, match=r"There is no run in .*dp\.kept_secret"):
        trainer(tmp_path, make(PLAN, seed=None)).run(small_model())
    assert not (tmp_path / "run.json").exists()


def test_without_a_directory_each_run_has_a_secret_of_its_own():
    one, other = (make(PLAN, seed=None).init(small_model()) for _ in range(2))
    with pytest.raises(AssertionError):
        assert_same(one.opt_state, other.opt_state)
