"""The methods that work on uses, against the oracle."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_dp as dp
from tests import oracle
from tests.gradients.engine.uses import freshly_jitted
from tests.models import Case


def clip_norms(case: Case, size: int, by_leaf: bool) -> Any:
    """The median norm of the batch's gradients: some are clipped, some are not."""
    params = eqx.filter(case.model, case.filter_spec)
    everywhere = jax.tree.map(lambda _: np.inf, params) if by_leaf else np.inf
    truth = oracle.clipped_gradients(
        case.loss,
        case.model,
        *case.batch(size),
        l2_clip_norm=everywhere,
        filter_spec=case.filter_spec,
    )
    # A gradient that is zero but for rounding (a bias before a softmax) is not to be blown up.
    return jax.tree.map(lambda norms: max(float(np.median(norms)), 1e-3), truth.grad_norm)


METHODS = ("book_keeping", "ghost")

# Where the uses of a parameter are in question: both methods find them with the same code.
EACH_METHOD = pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.exhaustive)]
)


def check(
    case: Case,
    size: int = 3,
    by_leaf: bool = False,
    methods: Sequence[str] = METHODS,
    **options: Any,
) -> None:
    """Asserts that gradients, norms and losses are the oracle's, to 1e-5."""
    clip_norm = clip_norms(case, size, by_leaf)
    batch = case.batch(size)
    truth = oracle.clipped_gradients(
        case.loss, case.model, *batch, l2_clip_norm=clip_norm, filter_spec=case.filter_spec
    )
    largest = max(float(np.max(norms)) for norms in jax.tree.leaves(truth.grad_norm))
    assert largest > 1e-3
    for method in methods:
        grad_fn = dp.filter_value_and_clipped_grad(
            case.loss,
            l2_clip_norm=clip_norm,
            filter_spec=case.filter_spec,
            method=method,
            **options,
        )
        per_example, grads = freshly_jitted(grad_fn, case.model)(*batch)
        assert oracle.relative_error(grads, truth.grads) < 1e-5, method
        assert oracle.relative_error(per_example.loss, truth.loss) < 1e-5, method
        found = zip(*map(jax.tree.leaves, (per_example.grad_norm, truth.grad_norm)), strict=True)
        for norms, true_norms in found:
            np.testing.assert_allclose(
                norms, true_norms, rtol=1e-5, atol=1e-6 * largest, err_msg=method
            )
