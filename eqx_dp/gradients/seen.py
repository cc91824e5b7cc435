"""Uses whose cotangents become norms, or weighted sums, within the backward pass: ghost clipping.

Li et al., "Large Language Models Can Be Strong Differentially Private Learners", 2022.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from ..isolation import engines_rule
from ..precision import stage
from ..sharding import evaluated_whole
from .clip import norm_error, norms, unit_roundoff
from .leaves import Known, LeafForm, Scattering, leaf_gradient
from .powers import without_subnormal
from .uses import ParamUse


class Seen(NamedTuple):
    """What is known of a use that keeps nothing: the only one of its leaf.

    Attributes:
        use: the use.
        dtype: the accumulate dtype.
        scattering: how the weighted sum leaves it, where each device keeps a part.
    """

    use: ParamUse
    dtype: np.dtype[Any]
    scattering: Scattering | None

    @property
    def form(self) -> LeafForm:
        """How the operand's gradient is found, in one iteration of the scans around."""
        inner = self.use.inside()
        return LeafForm(inner.shape, (inner,), self.dtype)

    def no_norms(self) -> Float[Array, "*slices 2"]:
        """Zeros for norm and bound."""
        return jnp.zeros((*self.use.slices, 2), self.dtype)

    def no_sum(self) -> Float[Array, "..."]:
        """Zeros for the weighted sum."""
        part = self.form.shape if self.scattering is None else self.scattering.part
        return jnp.zeros((*self.use.slices, *part), self.dtype)

    def of_leaf(self, total: Float[Array, "..."]) -> Array:
        """The leaf's sum."""
        if self.scattering is not None:
            return self.scattering.stacked(total)
        return self.use.from_operand(total)


def measuring(
    seen: Seen, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Array
) -> tuple[Array, Any]:
    """The result of a use, whose cotangent becomes norm and bound: those of the tap."""
    (result,) = evaluated_whole(equation, inputs)
    return seen.use.received(_measured(seen, result, tap, seen.use.kept(inputs))), ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _measured(seen: Seen, result: Array, tap: Array, residuals: Any) -> Array:
    del seen, tap, residuals
    return result


def _measured_back(seen: Seen, residuals: Any, cotangent: Array) -> tuple[Any, ...]:
    return cotangent, _norms(seen)(residuals, cotangent), None


_measured.defvjp(lambda seen, result, tap, residuals: (result, residuals), _measured_back)


@functools.lru_cache(maxsize=1024)
def _norms(seen: Seen) -> Callable[..., Float[Array, "2"]]:
    """Norm and bound of one example."""

    @jax.jit
    def of_batch(residuals: Any, cotangent: Array) -> Float[Array, "batch 2"]:
        with stage("norm"):
            known = leaf_gradient(seen.form, [(residuals, cotangent)]).known
        assert known is not None
        return jnp.stack(known, axis=-1)

    return _of_one(of_batch, True)


class Asked(NamedTuple):
    """What one example may add at a use.

    Attributes:
        total: zeros, whose cotangent is the sum over all examples.
        factor: the example's clip factor.
        limit: the bound that the factor was found from.
    """

    total: Float[Array, "*view"]
    factor: Float[Array, ""]
    limit: Float[Array, ""]


def adding(
    seen: Seen, equation: jex_core.JaxprEqn, inputs: list[Any], asked: Asked
) -> tuple[Array, Any]:
    """The result of a use, whose cotangent becomes the weighted sum over all examples."""
    (result,) = evaluated_whole(equation, inputs)
    return seen.use.received(_added(seen, result, *asked, seen.use.kept(inputs))), ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _added(
    seen: Seen, result: Array, total: Array, factor: Array, limit: Array, residuals: Any
) -> Array:
    del seen, total, factor, limit, residuals
    return result


def _added_forward(
    seen: Seen, result: Array, total: Array, factor: Array, limit: Array, residuals: Any
) -> tuple[Array, Any]:
    del seen, total
    return result, (residuals, factor, limit)


def _added_back(seen: Seen, held: Any, cotangent: Array) -> tuple[Any, ...]:
    residuals, factor, limit = held
    return cotangent, _sum(seen)(residuals, cotangent, factor, limit), None, None, None


_added.defvjp(_added_forward, _added_back)


@functools.lru_cache(maxsize=1024)
def _sum(seen: Seen) -> Callable[..., Array]:
    """The weighted sum. It speaks of one example, as everything inside of `vmap`, but is of all.

    Guarantee: what one example adds is at most its factor times its limit, whatever the pass that
    found these rounded otherwise: the very arrays that are added here are measured here, and what
    exceeds the limit is scaled down to it.
    """

    @jax.jit
    def of_batch(residuals: Any, cotangent: Array, factors: Array, limits: Array) -> Array:
        with stage("norm"):
            leaf = leaf_gradient(seen.form, [(residuals, cotangent)])
            assert leaf.known is not None
            factors = within(factors, leaf.known[1], limits)
        with stage("sum"):
            total = leaf.sum(factors, factors > 0)
            if seen.scattering is not None:
                total = seen.scattering(total)
        return total

    return _of_one(of_batch, False)


def within(
    factors: Float[Array, " batch"], bounds: Float[Array, " batch"], limits: Float[Array, " batch"]
) -> Float[Array, " batch"]:
    """Factors that take bounds to factor x limit, where they are above the limit.

    Quotient and products are off by 4 u and u each; 16 are taken off. Zero where a bound is not
    finite, or where a factor is no normal number any more.
    """
    less = 1 - 16 * unit_roundoff(factors.dtype)
    is_more = bounds > limits
    ratio = limits / jnp.where(is_more, bounds, 1) * less
    smaller = without_subnormal(factors * without_subnormal(ratio))
    return jnp.where(jnp.isfinite(bounds), jnp.where(is_more, smaller, factors), 0)


def _of_one(of_batch: Callable[..., Array], is_batched: bool) -> Callable[..., Array]:
    """A function of a batch as one of one example, for `vmap`."""

    @custom_vmap
    def of_one(*values: Any) -> Array:
        found = of_batch(*jax.tree.map(lambda x: x[None], values))
        return found[0] if is_batched else found

    @of_one.def_vmap
    @engines_rule
    def _(size: int, is_mapped: list[Any], *values: Any) -> tuple[Array, bool]:
        values = jax.tree.map(
            lambda x, there: x if there else jnp.broadcast_to(x, (size, *x.shape)),
            values,
            tuple(is_mapped),
        )
        return of_batch(*values), is_batched

    return of_one


def of_slices(measured: Float[Array, "batch *slices 2"]) -> Known:
    """Norm and bound of a stacked parameter from those of its slices."""
    batch = measured.shape[0]
    norm, bound = (norms(measured[..., i].reshape(batch, -1)) for i in range(2))
    return norm, bound * (1 + norm_error(measured[0, ..., 0].size, measured.dtype))
