"""Whitening by a second moment that is measured privately, by steps of the run's own plan.

The loss of an example is -x^T M x, so its gradient is -x x^T, of norm 1 where x has norm 1. The sum
of the noisy gradients of a few steps, with the rate 1 / steps, is an estimate of the mean of x x^T.
Sampling, noise and accounting are those of any step: where `steps` of a plan are spent here, the
rest may train (`mnist.py`), and the plan's epsilon covers both.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import eqx_dp as dp

Views = Float[np.ndarray, "n views features"]


class Moment(eqx.Module):
    """An estimate of the mean of x x^T."""

    matrix: Float[Array, "features features"]


def moment_loss(moment: Moment, x: Float[Array, " features"]) -> Float[Array, ""]:
    """The gradient is -x x^T, whatever the estimate is."""
    x = x.astype(jnp.float32)
    return -x @ (moment.matrix @ x)


def second_moment(
    plan: dp.PrivacyPlan, rows: Float[np.ndarray, "n features"], seed: int | None
) -> Float[np.ndarray, "features features"]:
    """Spends a plan on the mean of x x^T over rows of norm 1, which it clips to norm 1."""
    step = dp.make_step(
        moment_loss,
        optax.sgd(1 / plan.steps),
        plan,
        num_examples=len(rows),
        l2_clip_norm=1.0,
        seed=seed,
    )
    first = Moment(jnp.zeros(2 * rows.shape[1:]))
    found = np.asarray(dp.Trainer(step, rows, progress=False).run(first).model.matrix)
    return (found + found.T) / 2


def privately_whitening(
    plan: dp.PrivacyPlan, views: Views, seed: int | None
) -> Callable[[Views], Views]:
    """Spends a plan on the second moment of the first views; they have norm 1.

    Returns:
        What whitens views, and gives each the norm 1 again.
    """
    variances, directions = np.linalg.eigh(second_moment(plan, views[:, 0], seed))
    # The noise of each entry; the largest eigenvalue of symmetric noise is sqrt(2 n) times that.
    # Half of it served best on held-out images.
    noise = plan.noise_multiplier / (plan.sampling_prob * len(views) * plan.steps**0.5)
    floor = noise * np.sqrt(len(variances) / 2)
    matrix = (directions * (np.maximum(variances, 0) + floor) ** -0.5).astype(np.float32)

    def white(views: Views) -> Views:
        def part(some: Views) -> Views:
            turned = some.astype(np.float32) @ matrix
            return (turned / np.linalg.norm(turned, axis=2, keepdims=True)).astype(np.float16)

        return np.concatenate([part(x) for x in np.array_split(views, 1 + len(views) // 5000)])

    return white
