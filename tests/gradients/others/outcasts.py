"""A case held against the oracle on a batch that has outcasts: zeros, NaN, padding."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eqx_dp as dp
from tests import oracle
from tests.gradients.engine.uses import freshly_jitted
from tests.models import Case

SIZE = 5
PADDING = np.arange(SIZE) == 4


class Asked(NamedTuple):
    """How clipped gradients are asked for.

    Attributes:
        method: of the engine.
        clip: the clip norm, by the median norm.
        microbatch_size: how many examples at once.
    """

    method: str
    clip: float = 1.0
    microbatch_size: int | None = None


def batch_of(case: Case) -> tuple[Any, ...]:
    """Two ordinary examples, one of zeros, one of NaN, and one of padding."""

    def spoiled(x: Any) -> Any:
        x = x.at[2].set(0)
        return x.at[3].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(spoiled, case.batch(SIZE))


def check(case: Case, *asked: Asked, tolerance: float = 1e-5) -> None:
    """Asserts that sums, norms and losses are the oracle's."""
    batch = batch_of(case)

    def truth_at(clip_norm: float, without: np.ndarray) -> oracle.Truth:
        return oracle.clipped_gradients(
            case.loss,
            case.model,
            *batch,
            l2_clip_norm=clip_norm,
            filter_spec=case.filter_spec,
            is_padding_example=without,
        )

    plain = truth_at(np.inf, PADDING)
    lost = ~np.isfinite(plain.loss) | ~np.isfinite(plain.grad_norm)
    assert not lost.all()
    median = max(float(np.median(plain.grad_norm[~PADDING & ~lost])), 1e-3)
    for method, clip, microbatch_size in asked:
        clip_norm = clip * median
        truth = truth_at(clip_norm, PADDING | lost)
        grad_fn = dp.filter_value_and_clipped_grad(
            case.loss,
            l2_clip_norm=clip_norm,
            filter_spec=case.filter_spec,
            method=method,
            microbatch_size=microbatch_size,
        )
        found, grads = freshly_jitted(grad_fn, case.model)(*batch, is_padding_example=PADDING)
        assert oracle.relative_error(grads, truth.grads) < tolerance, method
        for values, expected in ((found.loss, plain.loss), (found.grad_norm, plain.grad_norm)):
            assert (np.isfinite(values) | lost).all(), method
            largest = np.max(np.abs(expected[~lost]))
            np.testing.assert_allclose(
                np.asarray(values)[~lost],
                expected[~lost],
                rtol=tolerance,
                atol=tolerance * largest,
                err_msg=method,
            )
