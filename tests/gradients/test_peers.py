"""jax_privacy as a second oracle: same settings, same gradients, norms and sensitivities."""

import equinox as eqx
import jax
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from jax_privacy.clipping import clipped_grad

import eqx_dp as dp
from tests import models, oracle
from tests.gradients import jitted

CASE = models.linear_regression()
X, Y = CASE.batch(6)
PADDING = np.array([False, True, False, False, True, True])


def batch_loss(model, x, y):
    return jax.vmap(CASE.loss, in_axes=(None, 0, 0))(model, x, y).mean()


SETTINGS = [
    {"l2_clip_norm": 1.0},
    {"l2_clip_norm": 0.7, "rescale_to_unit_norm": True, "normalize_by": 3.0},
    {"l2_clip_norm": 1.0, "microbatch_size": 3, "normalize_by": 32.0},
    {"l2_clip_norm": 0.0, "rescale_to_unit_norm": True},
    {"l2_clip_norm": np.inf, "rescale_to_unit_norm": True},
]


def of_jax_privacy(loss, **settings):
    return clipped_grad(
        loss, batch_argnums=(1, 2), return_values=True, return_grad_norms=True, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "padding", "keep_batch_dim"),
    [(SETTINGS[0], None, False), *((settings, PADDING, True) for settings in SETTINGS)],
    ids=str,
)
def test_gradients_and_norms(settings, padding, keep_batch_dim):
    loss = batch_loss if keep_batch_dim else CASE.loss
    settings = {**settings, "keep_batch_dim": keep_batch_dim}
    mask = {} if padding is None else {"is_padding_example": padding}
    per_example, grads = jitted.value_and_grad(loss, **settings)(CASE.model, X, Y, **mask)
    theirs, reports = eqx.filter_jit(of_jax_privacy(loss, **settings).fun)(CASE.model, X, Y, **mask)
    assert oracle.relative_error(grads, theirs) < 1e-5
    # Padding is another matter: they report the norm of what stands there, we report zero.
    real = np.ones(6, bool) if padding is None else ~padding
    np.testing.assert_allclose(per_example.grad_norm[real], reports.grad_norms[real], rtol=1e-5)
    np.testing.assert_allclose(per_example.loss[real], reports.values[real], rtol=1e-5)


@pytest.mark.parametrize("relation", NeighboringRelation)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sensitivities(settings, relation):
    ours = dp.filter_clipped_grad(CASE.loss, **settings).sensitivity(relation)
    theirs = of_jax_privacy(CASE.loss, **settings).sensitivity(relation)
    assert ours == pytest.approx(theirs, rel=1e-12)
