"""A measured choice: what is tried, what decides, and what is never read."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models

CASE = models.linear_regression()
BATCH = CASE.batch(8)
FEW = {"methods": ("ghost", "per_example"), "microbatch_sizes": (2, 8), "rounds": 1}
ONE = {"methods": ("ghost",), "microbatch_sizes": (2,), "rounds": 1}
PLAN = dp.PrivacyPlan(sampling_prob=0.2, steps=10, noise_multiplier=1.0, delta=1e-5)


def grad_fn(loss=CASE.loss, **options):
    return dp.filter_clipped_grad(loss, l2_clip_norm=1.0, **options)


@functools.cache
def tuned():
    return dp.tune(grad_fn(), CASE.model, *BATCH, **FEW)


@pytest.mark.slow
def test_by_the_real_clock_the_smallest_median_is_first():
    found = tuned()
    assert {x.method for x in found.trials} == {*FEW["methods"]}
    best = min(found.trials, key=lambda x: x.seconds)
    assert (best.method, best.microbatch_size) == (found.method, found.microbatch_size)
    assert found.trials[0] is best
    assert all(0 < x.seconds < 60 and x.bytes > 0 and not x.problem for x in found.trials)


def test_on_a_mesh_with_a_plan_from_shapes_alone():
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Explicit,))
    slots = PLAN.sampler(40, seed=1, pad_to=4).capacity
    model, batch = eqx.filter_eval_shape(lambda: (CASE.model, CASE.batch(slots)))
    sharded = grad_fn(sharding=dp.ShardingRules(mesh))
    found = dp.tune(sharded, model, *batch, plan=PLAN, **ONE)
    assert not any(x.problem for x in found.trials)


def test_no_value_of_the_batch_is_read():
    def used_up(x):
        x = jnp.array(x)
        x.delete()  # shape and dtype are still there
        return x

    case = models.dropout()
    given = case.batch(4), jax.random.PRNGKey(5), np.zeros(4, bool)
    batch, key, mask = jax.tree.map(used_up, given)
    options = ONE | {"key": key, "is_padding_example": mask}
    found = dp.tune(grad_fn(case.loss), case.model, *batch, **options)
    assert not any(x.problem for x in found.trials)


@pytest.mark.slow
def test_one_that_cannot_be_timed_says_why_and_the_others_are_timed():
    most = max(tuned().trials, key=lambda x: x.bytes)
    found = dp.tune(grad_fn(), CASE.model, *BATCH, **FEW, limit=most.bytes - 1)
    problems = {(x.method, x.microbatch_size): x.problem for x in found.trials}
    assert problems.pop((most.method, most.microbatch_size)).startswith("takes more than")
    assert set(problems.values()) == {""}
    assert "takes more than" in str(found).splitlines()[-1]

    def refusing(model, x, y):
        return CASE.loss(model, eqx.error_if(x, x.sum() != 7, "no made-up numbers"), y)

    for call in (
        lambda: dp.tune(grad_fn(refusing), CASE.model, *BATCH, **FEW),
        lambda: dp.tune(grad_fn(), CASE.model, *BATCH, **FEW, limit=1),
    ):
        with pytest.raises(ValueError, match=r"(?s)None of the .* timed:.*ghost, 2: .*8: "):
            call()


def test_what_is_refused():
    for wrong, options in {
        "rounds must be at least 1; found 0": {"rounds": 0},
        "limit must be at least 1; found 0": {"limit": 0},
        "methods must be a tuple": {"methods": 3},
        "method must be one of": {"methods": ("fastest",)},
    }.items():
        with pytest.raises(ValueError, match=wrong):
            dp.tune(grad_fn(), CASE.model, *BATCH, **options)
