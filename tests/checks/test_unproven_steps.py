"""`check_privacy` calls no step fine that leaks, whatever proof it lacks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.checks.test_privacy_corpus import report_on
from tests.checks.unproven_steps import LEAKING


@pytest.mark.parametrize("name", LEAKING)
def test_a_step_that_leaks_is_not_fine(name):
    report = report_on(LEAKING[name]())
    assert not report.ok, f"{LEAKING[name].__doc__}\n{report}"
    assert report.violations or report.undecided


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKING)
def test_a_step_that_leaks_is_a_step_that_runs(name):
    """It is not refused for what JAX would refuse, too."""
    case = LEAKING[name]()
    eqx.filter_eval_shape(case.fn, *case.args, **case.kwargs)


if hasattr(dp, "add_noise"):

    def test_leaves_whose_paths_read_alike_have_noise_of_their_own():
        zeros = jnp.zeros(8)
        tree = {"a": {"b": zeros}, "a.b": zeros, "['a']['b']": zeros, "a/b": zeros, "": [zeros]}
        noises = map(np.asarray, jax.tree.leaves(dp.add_noise(tree, jax.random.key(0), 1.0)))
        noises = list(noises)
        assert len({noise.tobytes() for noise in noises}) == len(noises)

    def test_leaves_of_other_shapes_and_dtypes_have_noise_of_their_own():
        tree = {"a": jnp.zeros(8), "b": jnp.zeros((2, 4)), "c": jnp.zeros((8, 1))}
        noises = map(np.asarray, jax.tree.leaves(dp.add_noise(tree, jax.random.key(0), 1.0)))
        noises = list(noises)
        assert len({noise.tobytes() for noise in noises}) == 3
