"""Steps as they are written by hand: an honest one, and its parts, for tests to get wrong."""

import jax
import jax.numpy as jnp
import optax

import eqx_dp as dp
from eqx_dp import audit
from tests import models

CASE = models.linear_regression()
MODEL, LOSS = CASE.model, CASE.loss
BATCH = CASE.batch(6)
CLIP_NORM = 0.5
MASK = jnp.array([False, False, False, True, False, False])
PLAN = dp.PrivacyPlan(sampling_prob=0.5, steps=10, noise_multiplier=2.0, delta=1e-5)
STDDEV = PLAN.noise_multiplier * CLIP_NORM
SECRET = 0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321
NOISE = dp.gaussian_privatizer(stddev=STDDEV, key=SECRET)


def rows(model, x, y):
    """The gradient of each example."""
    return jax.vmap(jax.grad(LOSS), (None, 0, 0))(model, x, y)


def norms(gradients):
    squares = [jnp.sum(leaf.reshape(len(leaf), -1) ** 2, 1) for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares))


def weighted(gradients, factors, counts):
    """The sum of the gradients that count, each times its factor."""

    def of_leaf(leaf):
        along = (-1, *[1] * (leaf.ndim - 1))
        return jnp.where(counts.reshape(along), leaf * factors.reshape(along), 0).sum(0)

    return jax.tree.map(of_leaf, gradients)


def clipped(model, x, y, mask):
    """The sum of clipped gradients, right up to rounding."""
    gradients = rows(model, x, y)
    found = norms(gradients)
    counts = jnp.isfinite(found) & ~mask
    return weighted(gradients, jnp.minimum(1, CLIP_NORM / found), counts)


def stepped(gradient, optimizer=None):
    """A step: gradient, noise, optimizer."""
    optimizer = optax.chain(NOISE, optax.adam(1e-2)) if optimizer is None else optimizer

    @jax.jit
    def step(model, state, x, y, mask):
        updates, state = optimizer.update(gradient(model, x, y, mask), state, model)
        return optax.apply_updates(model, updates), state

    return step, optimizer.init(MODEL)


def audited(step, *state, sensitivity=CLIP_NORM, **options):
    """The audit of a step that takes model, state, batch and mask."""
    place = 1 + len(state)
    options |= {"private": (place, place + 1), "padding": place + 2, "sensitivity": sensitivity}
    return audit.neighbours(step, MODEL, *state, *BATCH, MASK, **options)


def rules_of(report):
    return {violation.rule for violation in report.violations}
