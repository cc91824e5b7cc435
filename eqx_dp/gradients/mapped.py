"""Gradients of parameters that reach data as a value whose own gradient is one outer product."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from .leaves import LeafForm, LeafGradient, Met, sides
from .linear_maps import LinearMap, MapSize, size_of, transposed_derivative
from .mapped_products import mapped_products, start_of, summed, vector_axes
from .split import Shared, Split
from .taps import Uses
from .uses import contraction


class Map(NamedTuple):
    """From the gradient with respect to a value to that of a parameter.

    Attributes:
        linear: the map.
        size: how large it is.
    """

    linear: LinearMap
    size: MapSize


def is_mapped(
    split: Split,
    uses: Uses,
    params: Sequence[Any],
    frozen: Sequence[Any],
    dtype: np.dtype[Any],
    leaf: int,
    root: int,
) -> bool:
    """Whether a parameter's gradient through one value is a known map of one outer product.

    It is found on shapes.

    Args:
        split: the loss.
        uses: of every root.
        params: the trainable leaves, or their shapes.
        frozen: the other arrays of the model, likewise.
        dtype: the accumulate dtype, in which the map has to be.
        leaf: the parameter.
        root: the value.
    """
    (use, *others) = uses.of[root].values()
    value = split.derived[root - len(params)]
    if others or use.kind is not contraction or use.matrices is None or value.over:
        return False
    axes = vector_axes(use.matrices, value.value.shape)
    if use.steps != 1 or axes is None or not dtype == params[leaf].dtype == value.value.dtype:
        return False
    _, rows, columns = use.matrices.shape

    def follow(params: list[Any], frozen: list[Any], x: Array, g: Array) -> Any:
        derived: list[Any] = [None] * len(split.derived)
        shared = Shared([*params, *derived], frozen)
        function = one_value(split, leaf, root, shared)
        linear = transposed_derivative(function, params[leaf], dtype)
        if linear is None:
            return None
        found = linear.follow(start_of(x, g, axes, value.value.shape))
        squares = None if found is None else found.squares()
        return None if squares is None else [term.fixed for _, term in squares]

    vectors = [jax.ShapeDtypeStruct((1, size), dtype) for size in (rows, columns)]
    return jax.eval_shape(follow, [*params], [*frozen], *vectors) is not None


def one_value(split: Split, leaf: int, root: int, shared: Shared) -> Callable[[Array], Array]:
    """One derived value as a function of one parameter, all else being what it is."""
    function = split.of_leaves([leaf], [root], shared)
    return lambda parameter: function([parameter])[0]


def map_of(
    split: Split, leaf: int, root: int, shared: Shared, parameter: Array, dtype: np.dtype[Any]
) -> Map:
    """The map of a parameter for which `is_mapped` holds."""
    linear = transposed_derivative(one_value(split, leaf, root, shared), parameter, dtype)
    assert linear is not None
    shape = split.derived[root - (len(shared.roots) - len(split.derived))].value.shape
    return Map(linear, size_of(linear, shape, dtype))


def mapped(form: LeafForm, its: Map, met: Sequence[Met]) -> LeafGradient:
    """The gradient of a parameter for which `is_mapped` holds.

    Args:
        form: of the value.
        its: the map.
        met: of the value's one use.
    """
    (use,), ((residuals, cotangent),) = form.uses, met
    matrices = use.matrices
    assert matrices is not None
    axes = vector_axes(matrices, form.shape)
    assert axes is not None
    x, g = sides(use, residuals, cotangent.astype(form.dtype), form.dtype)
    found = mapped_products(x[:, 0, 0], g[:, 0, 0], axes, form.shape, its.linear, its.size)
    assert found is not None
    norm, bound, held = found

    def total(factors: Float[Array, " batch"], contributes: Bool[Array, " batch"]) -> Array:
        products, exponent = held.sum(factors, contributes)
        value = matrices.outputs_first.pulled_back(products[None], form.shape)
        return summed(its.linear, its.size, value, exponent)

    return LeafGradient(known=(norm, bound), weighted=total)
