"""The method and the microbatch that are chosen: everyone who asks is told the same."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_dp as dp
from eqx_dp.gradients import described
from eqx_dp.planning.step import planned_step
from eqx_dp.privacy import SampleSize, Sampling
from tests import models

PLAN = dp.PrivacyPlan(sampling_prob=0.05, steps=10, noise_multiplier=1.0, delta=1e-6)
CASE = models.mlp()
SLOTS = PLAN.sampler(1000, seed=3).capacity


def gradient(**options):
    return dp.filter_clipped_grad(CASE.loss, l2_clip_norm=1.0, **options)


def told(**options):
    return gradient(**options).of_samples(PLAN.sampling)


def test_a_gradient_that_a_plan_was_given_and_one_that_is_asked_about_with_the_plan():
    batch = CASE.batch(SLOTS)
    one = dp.explain(told(), CASE.model, *batch)
    other = dp.explain(gradient(), CASE.model, *batch, plan=PLAN)
    assert one == other
    assert str(one) == str(other)
    assert one.microbatch_size is not None
    assert one.sample == PLAN.sampling.of(SLOTS)
    # The function that was asked about is as it was: it wants no mask.
    grad_fn = gradient()
    dp.explain(grad_fn, CASE.model, *batch, plan=PLAN)
    grad_fn(CASE.model, *CASE.batch(2))
    assert dp.explain(grad_fn, CASE.model, *batch).sample is None


def sizes_run(program):
    """The lengths of the microbatches in the loops of a program."""
    return {
        variable.aval.shape[0]
        for equation in equations(program)
        if equation.primitive.name == "while"
        for inner in equations(equation.params["body_jaxpr"])
        for variable in inner.outvars
        if inner.primitive.name == "gather" and variable.aval.shape[1:] == (6,)
    }


def equations(jaxpr):
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.slow
def test_the_planner_and_the_step_that_runs():
    grad_fn, batch = told(), CASE.batch(SLOTS)
    expected = dp.explain(grad_fn, CASE.model, *batch).microbatch_size
    assert 1 < expected < SLOTS
    assert dp.plan_memory(grad_fn, CASE.model, *batch, compiled=False).microbatch_size == expected
    assert described(grad_fn, CASE.model, batch).at_once == expected
    step = planned_step(grad_fn, CASE.model, batch, optax.sgd(1.0), None)
    assert sizes_run(step.trace().jaxpr) == {expected}
    arrays, static = eqx.partition(CASE.model, eqx.is_array)
    running = jax.make_jaxpr(
        lambda arrays, mask: grad_fn(eqx.combine(arrays, static), *batch, is_padding_example=mask)
    )(arrays, np.zeros(SLOTS, bool))
    assert sizes_run(running) == {expected}
    report = dp.flop_report(grad_fn, CASE.model, *batch)
    assert f"{-(-SLOTS // expected)} microbatches of one program" in str(report)


@pytest.mark.parametrize("options", [{"microbatch_size": 7}, {"method": "ghost"}])
def test_what_was_asked_for_is_kept_with_a_plan(options):
    found = dp.explain(told(**options), CASE.model, *CASE.batch(SLOTS))
    assert found.microbatch_size == options.get("microbatch_size")
    assert found.method == options.get("method", found.method)
    assert dp.plan_memory(
        told(), CASE.model, *CASE.batch(SLOTS), microbatch_size=5, compiled=False
    ).microbatch_size == 5  # fmt: skip


def test_a_plan_that_takes_every_example():
    plan = dp.PrivacyPlan(sampling_prob=1, steps=10, noise_multiplier=1.0, delta=1e-6)
    grad_fn = gradient()
    batch = CASE.batch(37)
    asked = dp.explain(gradient(), CASE.model, *batch, plan=plan)
    known = dp.explain(grad_fn, CASE.model, *batch)
    assert asked.microbatch_size is known.microbatch_size is None
    assert asked.sample == SampleSize(37, 37, 1.0)
    assert "37 slots, of which 37.0 are expected to hold an example; 1.00 microbatches of 37" in (
        str(asked)
    )
    assert known.sample is None
    grad_fn(CASE.model, *batch)  # nothing is sampled, and no mask is wanted


@pytest.mark.parametrize("noise_multiplier", [0, 1.0])
def test_a_made_step_tells_its_gradient(noise_multiplier):
    plan = dp.PrivacyPlan(0.05, 10, noise_multiplier, 1e-6)
    step = dp.make_step(
        CASE.loss, optax.sgd(0.1), plan, num_examples=1000, seed=3, l2_clip_norm=1.0
    )
    found = dp.explain(step.grad_fn, CASE.model, *CASE.batch(SLOTS))
    assert found.sample == plan.sampling.of(SLOTS)
    assert found == dp.explain(step.grad_fn, CASE.model, *CASE.batch(SLOTS), plan=plan)
    with pytest.raises(ValueError, match="is_padding_example is missing"):
        step.grad_fn(CASE.model, *CASE.batch(4))


def test_gradients_told_of_unlike_samples_are_compiled_apart():
    traced = []

    def loss(w, x):
        traced.append(x)
        return w * x

    compiled = eqx.filter_jit(
        lambda grad_fn, *args: grad_fn(*args, is_padding_example=np.zeros(4, bool))
    )
    for prob in (0.05, 0.06):
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
        compiled(grad_fn.of_samples(Sampling(prob, 1e-12)), jnp.ones(()), jnp.ones(4))
    times = len(traced)
    for prob in (0.05, 0.06):
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
        compiled(grad_fn.of_samples(Sampling(prob, 1e-12)), jnp.ones(()), jnp.ones(4))
    assert len(traced) == times > 0
