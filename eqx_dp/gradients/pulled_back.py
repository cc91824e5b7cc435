"""Gradients of parameters that reach data only as values derived from them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..precision import stage
from .computed_once import computed_once
from .layouts import Layout
from .leaves import (
    LeafForm,
    LeafGradient,
    Met,
    per_example_gradients,
    sides,
)
from .powers import power_of_two
from .weighted_products import Weighted, weighted_products


def entry_by_entry(
    form: LeafForm,
    entries: Layout,
    shape: tuple[int, ...],
    derivative: Float[Array, "..."],
    met: list[Met],
) -> LeafGradient:
    """The gradient of a parameter of which each entry of a value depends on one entry.

    Args:
        form: how the gradient with respect to the value is found: the norm from "inner_products"
            where it is one outer product, else each example's own, "kept".
        entries: where each entry of the value stands in the parameter.
        shape: of the parameter.
        derivative: of each entry of the value, in the accumulate dtype.
        met: of the value's uses.
    """
    if form.way == "kept":
        grads = _formed(form, entries, shape, derivative, met)
        if not entries.is_isometric:
            return LeafGradient(grads)
        return LeafGradient(grads, lambda total: entries.pulled_back(total, shape))
    norm, bound, held = _measured(form, derivative, met)
    total = functools.partial(_summed, form, entries, shape, held)
    return LeafGradient(known=(norm, bound), weighted=total)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _formed(
    form: LeafForm,
    entries: Layout,
    shape: tuple[int, ...],
    derivative: Array,
    met: list[Met],
) -> Float[Array, "batch ..."]:
    """Each example's gradient; where that only moves entries, with respect to the value."""
    met = [(residuals, cotangent.astype(form.dtype)) for residuals, cotangent in met]

    def form_all(met: list[Met]) -> Array:
        grads = per_example_gradients(form, met) * derivative
        if entries.is_isometric:
            return grads
        return jax.vmap(lambda one: entries.pulled_back(one, shape))(grads)

    return computed_once(form_all, met, met[0][1])


@functools.partial(jax.jit, static_argnums=0)
def _measured(form: LeafForm, derivative: Array, met: list[Met]) -> tuple[Array, Array, Weighted]:
    """Norm, bound, and what the weighted sum is made of."""
    met = [(residuals, cotangent.astype(form.dtype)) for residuals, cotangent in met]
    (use,), (one,) = form.uses, met
    assert use.matrices is not None
    x, g = sides(use, *one, form.dtype)
    weights = use.matrices._replace(sign=1).outputs_first.taken(derivative)
    return weighted_products(x[:, :, 0], g[:, :, 0], weights)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _summed(
    form: LeafForm,
    entries: Layout,
    shape: tuple[int, ...],
    held: Weighted,
    factors: Float[Array, " batch"],
    contributes: Bool[Array, " batch"],
) -> Array:
    """The weighted sum."""
    matrices = form.uses[0].matrices
    assert matrices is not None
    total = held.sum(factors, contributes)
    return entries.pulled_back(matrices.outputs_first.pulled_back(total, form.shape), shape)


def pulled_back(
    function: Callable[[list[Array]], list[Array]],
    params: list[Array],
    grads: list[Array],
    dtype: np.dtype[Any],
) -> list[Float[Array, "batch ..."]]:
    """Each example's gradients with respect to parameters, through values derived from them.

    They are formed before they are measured, and what is measured is what is summed. Where the
    derivative is computed in a narrower dtype than gradients are, it is given each example's with a
    largest entry near one, so that none overflows.

    Args:
        function: from the parameters to the values derived from them.
        params: the parameters.
        grads: with respect to each value, in the order of the function's results.
        dtype: the accumulate dtype.
    """
    with stage("loss"):  # what is left of the backward pass
        values, pullback = jax.vjp(function, params)
        pairs = list(zip(values, grads, strict=True))
        scale: Any = None
        if any(value.dtype != grad.dtype for value, grad in pairs):
            flat = [abs(grad).reshape(len(grad), -1).astype(dtype) for grad in grads]
            largest = jnp.max(jnp.concatenate(flat, axis=1), axis=1, initial=0)
            scale, inverse = power_of_two(largest)
            grads = [
                (grad * inverse.reshape(-1, *[1] * (grad.ndim - 1))).astype(value.dtype)
                for value, grad in pairs
            ]
        (found,) = jax.vmap(pullback)(grads)
    found = [one.astype(dtype) for one in found]
    if scale is not None:
        found = [one * scale.reshape(-1, *[1] * (one.ndim - 1)) for one in found]
    return found
