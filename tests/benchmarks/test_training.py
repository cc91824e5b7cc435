"""The command that measures a trainer."""

import numpy as np
import pytest

from tests.benchmarks import training
from tests.benchmarks.rows import TINY, mlp


@pytest.mark.slow
def test_command(tmp_path):
    path = tmp_path / "table.md"
    told = ["--rows", "small", "--tiny", "--rounds", "2"]
    training.main([*told, "--markdown", str(path)])
    written = path.read_text()
    assert "| small | 4 |" in written
    assert f"at least {training.GOAL} of the loop's" in written


@pytest.mark.slow
def test_trainer_and_loop_take_the_same_steps(monkeypatch):
    """From the same start, over the same batches: after every turn they have the same model."""
    ends = []

    class Clock(training.Clock):
        def __call__(self, model):
            of_trainer = weights(model)
            super().__call__(model)
            ends.append((of_trainer, weights(self._state.model)))
            return {}

    monkeypatch.setattr(training, "Clock", Clock)
    clock = training.measured(mlp(**TINY["mlp"]), turn=2, rounds=3)
    assert (len(clock.trainer), len(clock.bare)) == (3, 3)
    assert len(ends) == 4
    for of_trainer, of_loop in ends:
        np.testing.assert_array_equal(of_trainer, of_loop)
    assert not np.array_equal(ends[0][0], ends[1][0])


def weights(model):
    """A copy: the next step uses up the model's own arrays."""
    return np.concatenate([np.array(layer.weight).ravel() for layer in model.layers])
