"""A run whose method and microbatch are measured: once, before it begins, and never again."""

import json

import jax
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.planning import trials
from eqx_dp.training.first_model import FirstModel
from eqx_dp.training.tuned import settled
from tests.training import runs
from tests.training.runs import XS, YS, assert_same, leaves, make, small_model

pytestmark = pytest.mark.sampled(6)


class Clock(dict):
    """Seconds of candidates, 1 where nothing is said; `measured` holds what was timed."""

    def __init__(self):
        super().__init__()
        self.measured = []

    def __call__(self, runs, own, rounds, turn=None):
        self.measured.append(set(runs))
        return {name: [self.get(name, 1.0)] * rounds for name in runs}


@pytest.fixture
def clock(monkeypatch):
    """Candidates are compiled and run once, and take as long as a test says."""
    monkeypatch.setattr(trials, "timed", clock := Clock())
    return clock


CAPACITY = make().sampler().capacity


def tuned(directory, steps=None, data=(XS, YS), step=None, **options):
    """A run by a new step, as a new process would make it."""
    step = make(microbatch_size="tune") if step is None else step
    trainer = runs.trainer(directory, step, data=data, **options)
    return trainer.run(small_model(), steps=steps)


def record(directory):
    found = json.loads((directory / "run.json").read_text())
    return found["identity"]["method"], found["made_by"]["microbatch_size"]


@pytest.mark.parametrize("chosen", [("ghost", 8), ("per_example", CAPACITY)])
@pytest.mark.slow
def test_a_run_is_that_of_a_step_made_with_what_was_chosen(clock, chosen):
    clock[chosen] = 0.5
    method, size = chosen
    fixed = make(method=method, microbatch_size=size)
    assert_same(tuned(None), runs.trainer(None, fixed).run(small_model()))
    (measured,) = clock.measured
    assert {name for name, _ in measured} == {"ghost", "book_keeping", "per_example"}
    assert ("book_keeping", CAPACITY) in measured


@pytest.mark.exhaustive
def test_a_run_that_is_resumed_keeps_the_choice_bit_for_bit(clock, tmp_path):
    clock["ghost", 8] = 0.5
    whole = tuned(tmp_path / "whole")
    tuned(tmp_path / "parts", steps=4)
    assert record(tmp_path / "parts") == ("ghost", 8)
    kept = dp.Tuning.from_json((tmp_path / "parts/tuning.json").read_text())
    assert (kept.method, kept.microbatch_size) == ("ghost", 8)
    clock["per_example", 8] = 0.1  # another machine, perhaps
    (tmp_path / "parts/tuning.json").unlink()  # for people, and not needed
    assert_same(tuned(tmp_path / "parts", device_memory=1), whole)
    assert len(clock.measured) == 2
    assert record(tmp_path / "parts") == ("ghost", 8)


@pytest.mark.slow
def test_what_was_measured_for_no_recorded_run_is_measured_again(clock, tmp_path):
    (tmp_path / "tuning.json").write_text("half a")
    clock["ghost", 8] = 0.5
    tuned(tmp_path, steps=1)
    assert record(tmp_path) == ("ghost", 8)
    assert dp.Tuning.from_json((tmp_path / "tuning.json").read_text()).method == "ghost"


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, None, "auto"])
def test_a_run_that_was_not_tuned_stays_as_it_is_recorded(clock, tmp_path, size):
    step = make(microbatch_size=size)
    whole = runs.trainer(None, step).run(small_model())
    step.unrecorded.steps = 0
    runs.trainer(tmp_path, step).run(small_model(), steps=4)
    assert_same(tuned(tmp_path), whole)
    assert not clock.measured
    assert not (tmp_path / "tuning.json").exists()
    assert record(tmp_path)[0] == "auto"


@pytest.mark.slow
def test_another_choice_than_the_recorded_one_is_another_program(clock, tmp_path):
    clock["ghost", 8] = 0.5
    tuned(tmp_path, steps=2)
    with pytest.raises(ValueError, match="method: ghost in the checkpoint, auto in this run"):
        runs.trainer(tmp_path, make()).run(small_model())


def test_a_method_that_was_asked_for_stays(clock):
    tuned(None, steps=0, step=make(method="ghost", microbatch_size="tune"))
    assert {name for name, _ in clock.measured[0]} == {"ghost"}


def test_the_memory_counts(clock):
    with pytest.raises(ValueError, match="None of the methods and microbatches can be timed"):
        tuned(None, steps=0, device_memory=1)
    with pytest.raises(ValueError, match="device_memory must be at least 1"):
        tuned(None, steps=0, device_memory=0)


@pytest.mark.exhaustive
def test_on_a_mesh_with_keys_and_disclosed_figures(clock, tmp_path):
    def loss(model, x, y, *, key):
        return runs.loss(model, x + jax.random.normal(key), y)

    options = {"loss": loss, "sharding": runs.rules_of("Auto"), "disclose": ("loss",)}
    clock["ghost", 2] = 0.5
    state = tuned(tmp_path, steps=2, step=make(microbatch_size="tune", **options))
    assert record(tmp_path) == ("ghost", 2)
    fixed = make(method="ghost", microbatch_size=2, **options)
    assert_same(state, runs.trainer(None, fixed).run(small_model(), steps=2))


@pytest.mark.slow
def test_no_value_of_the_data_is_read_to_choose(clock, monkeypatch):
    class Unread:
        """A source that may be asked for one example, whose values are NaN."""

        def __init__(self, like):
            self.like = like

        def __len__(self):
            return len(self.like)

        def __getitem__(self, indices):
            return np.full_like(self.like[indices], np.nan)

    given = []
    tune = dp.planning.tune
    monkeypatch.setattr(
        "eqx_dp.training.tuned.tune", lambda *a, **k: given.extend(a) or tune(*a, **k)
    )
    tuned(None, steps=0, data=(Unread(XS), Unread(YS)))
    _, model, *batch = given
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in batch)
    for found, stored in zip(leaves(model), leaves(small_model()), strict=True):
        np.testing.assert_array_equal(found, stored)


def test_a_step_alone_says_what_to_do(unchecked):
    step = make(microbatch_size="tune")
    mask = np.zeros(4, bool)
    with pytest.raises(ValueError, match=r'microbatch_size is "tune".*with_choice'):
        step(step.init(small_model()), XS[:4], YS[:4], is_padding_example=mask)
    with pytest.raises(ValueError, match=r"microbatch_size must be .* found 'fast'"):
        make(microbatch_size="fast")


def test_several_hosts_may_not_measure(monkeypatch, clock):
    step = make(microbatch_size="tune")
    example = (XS[:1], YS[:1])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"There are 2 processes.*give make_step the method"):
        settled(step, FirstModel(small_model()), example, None, None, False)


@pytest.mark.slow
def test_a_table_that_cannot_be_written_costs_a_warning(clock, tmp_path):
    (tmp_path / "tuning.json").mkdir()
    with pytest.warns(dp.CheckpointWarning, match="table of what was measured"):
        tuned(tmp_path, steps=1)
    assert record(tmp_path)[0] in ("ghost", "book_keeping", "per_example")
