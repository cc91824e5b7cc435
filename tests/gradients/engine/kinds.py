"""One parameter, used as a test likes, and its gradient from its uses in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_dp.gradients.factored import LeafForm, leaf_gradient
from eqx_dp.gradients.leaves import norm_and_bound
from eqx_dp.gradients.program import Program
from eqx_dp.gradients.taps import evaluate
from eqx_dp.gradients.uses import Uses, overlaps
from tests.gradients.engine.uses import traced

NUM_EXAMPLES = 3
FACTORS = np.array([0.5, 3.0, 2.0])
CONTRIBUTES = np.array([True, False, True])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape)


def examples(*shape: int, seed: int = 1) -> np.ndarray:
    return normal(NUM_EXAMPLES, *shape, seed=seed)


def met_at_uses(
    program: Program, found: Uses, parameter: Array, batch: list[Array]
) -> tuple[Array, list[tuple[Any, Array]]]:
    """The loss of every example, and residuals and cotangent of every use of the parameter."""
    uses = found.of[0]

    def backward(*example: Array) -> tuple[Array, Any, Any]:
        def run(taps: Any) -> tuple[Array, Any]:
            value, _, residuals = evaluate(program, found.at, [parameter, *example], taps)
            return value, residuals

        taps = {at: jnp.zeros_like(use.result) for at, use in uses.items()}
        value, pullback, residuals = jax.vjp(run, taps, has_aux=True)
        return value, residuals, pullback(jnp.ones_like(value))[0]

    values, residuals, cotangents = jax.vmap(backward)(*batch)
    return values, [(residuals[at], cotangents[at]) for at in uses]


def check(
    use: Callable[..., Array],
    parameter: np.ndarray,
    *data: np.ndarray,
    kinds: list[str] | None,
    ghost: bool,
    roundoff: float = 1e-16,
) -> Uses:
    """Asserts that uses of the given kinds, each way, give JAX's own gradient.

    Args:
        use: `use(parameter, *data)`, of one example; any shape.
        parameter: the parameter.
        data: examples in front.
        kinds: the kinds that are expected, in the order of the program; None for any.
        ghost: whether a norm without the gradient is expected to be possible.
        roundoff: of the narrowest dtype in the program.
    """
    with jax.enable_x64(True):
        output = jax.eval_shape(use, parameter, *(x[0] for x in data))
        # Any cotangent may arrive from above.
        batch = (*data, examples(*output.shape, seed=9))

        def loss(parameter: Array, *example: Array) -> Array:
            *inputs, cotangent = example
            return jnp.sum(use(parameter, *inputs) * cotangent)

        one = tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in batch)
        program, found = traced(loss, jnp.asarray(parameter), True, one)
        uses = found.of[0]
        assert bool(uses and overlaps(tuple(uses.values()))) == ghost
        if not ghost:
            return found
        assert kinds in (None, [use.kind.name for use in uses.values()])

        def everything(parameter: Array, *batch: Array) -> Any:
            values, met = met_at_uses(program, found, parameter, list(batch))
            results = {}
            for way in ("factored",):
                form = LeafForm(parameter.shape, tuple(uses.values()), np.dtype(np.float64))
                leaf = leaf_gradient(form, met)
                results[way] = (
                    *norm_and_bound([leaf], NUM_EXAMPLES, form.dtype),
                    leaf.sum(jnp.asarray(FACTORS), jnp.asarray(CONTRIBUTES)),
                )
            truth = jax.vmap(jax.value_and_grad(loss), (None, *[0] * len(batch)))
            return values, results, truth(parameter, *batch)

        jitted = jax.jit(everything)
        values, results, (true_values, grads) = jitted(parameter, *batch)
        close = 1e4 * roundoff
        np.testing.assert_allclose(values, true_values, rtol=close, atol=close)
        rows = np.asarray(grads).reshape(NUM_EXAMPLES, -1)
        norms = np.linalg.norm(rows, axis=1)
        total = np.tensordot(np.where(CONTRIBUTES, FACTORS, 0), grads, axes=1)
        for found_norms, bounds, found_sum in results.values():
            # The ghost norm is the root of a sum in which terms may cancel.
            np.testing.assert_allclose(found_norms, norms, rtol=max(close, 1e-7), atol=1e-9)
            assert (bounds >= norms * (1 - 4 * (roundoff - 1e-16))).all()
            np.testing.assert_allclose(bounds, norms, rtol=max(close, 1e-6), atol=1e-6)
            assert found_sum.shape == parameter.shape
            np.testing.assert_allclose(found_sum, total, rtol=close, atol=close)
        return found
