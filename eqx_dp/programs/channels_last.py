"""Convolutions in the layout that XLA runs on all cores of a CPU."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import conv_general_dilated_p
from jax.sharding import NamedSharding, PartitionSpec

from .rewriting import inlined, rewritten


def channels_last(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Rewrites a program's convolutions, in loops and branches as well, for a CPU.

    XLA runs a convolution on a CPU by a library, on all cores, if channels are last in images and
    kernels. It brings convolutions into that layout by itself, but not those in the body of a loop
    or in a branch (https://github.com/jax-ml/jax/issues/12868): the gradient of a convolution of 64
    images takes 20 times as long there. Here convolutions are written channels last, between
    transpositions, and groups of images as groups of channels. Images with holes in them
    (`lhs_dilation`) that are smaller than their kernel become the kernel: the gradient of the
    kernel of a transposed convolution takes 1 / 16 of the time or less. Convolutions of each
    channel by itself stay as they are. Nothing else changes, and on other platforms nothing at all.

    The program is differentiated and batched: derivative rules not yet applied stay as they are.

    Returns:
        A program of the same inputs and results.
    """
    if jax.default_backend() != "cpu":
        return program
    return rewritten(program, _of_equation)


def _of_equation(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn] | None:
    return _moved(equation) if equation.primitive is conv_general_dilated_p else None


def _moved(equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
    """Transpositions, the convolution channels last, and the transposition back."""
    params = dict(equation.params)
    numbers, where = params["dimension_numbers"], params["out_sharding"]
    dimensions = len(numbers.lhs_spec)
    last = _channels_last(dimensions)
    groups = _groups_of_images(equation)
    is_exchanged = _is_exchanged(equation)
    if numbers == last and groups == 1 and not is_exchanged:
        return [equation]
    if _is_channel_by_channel(equation) and groups == 1 and not is_exchanged:
        return [equation]
    images, kernel, results = (_order(spec, to) for spec, to in zip(numbers, last, strict=True))
    params["dimension_numbers"] = last
    if where is not None:
        spec = [*where.spec, *[None] * dimensions]
        spec = PartitionSpec(*(spec[dimension] for dimension in results))
        params["out_sharding"] = NamedSharding(where.mesh, spec, memory_kind=where.memory_kind)
    if groups > 1:
        params |= {"batch_group_count": 1, "feature_group_count": groups}

    def convolution(image: Any, weight: Any) -> Any:
        image, weight = jax.lax.transpose(image, images), jax.lax.transpose(weight, kernel)
        if groups > 1:
            image = _side_by_side(image, groups)
        found = (_exchanged if is_exchanged else _as_given)(image, weight, params)
        return jax.lax.transpose(found, sorted(range(dimensions), key=results.__getitem__))

    return inlined(convolution, equation)


def _is_channel_by_channel(equation: jex_core.JaxprEqn) -> bool:
    """Whether each channel of the results is made of one of the images, as in depthwise layers.

    The library goes through groups one after the other. XLA's own loop is 6 to 130 times as fast.
    """
    kernel: Any = equation.invars[1].aval
    features, inside = equation.params["dimension_numbers"].rhs_spec[:2]
    groups = equation.params["feature_group_count"]
    return groups > 1 and kernel.shape[features] == groups and kernel.shape[inside] == 1


def _as_given(image: jax.Array, weight: jax.Array, params: dict[str, Any]) -> jax.Array:
    return conv_general_dilated_p.bind(image, weight, **params)


def _is_exchanged(equation: jex_core.JaxprEqn) -> bool:
    """Whether images and kernel change places: of dilated images that are smaller than the kernel.

    So it is in the gradient of a transposed convolution's kernel. Images with holes have no
    library, and each of the results would meet a kernel as large as an image.
    """
    avals: list[Any] = [variable.aval for variable in equation.invars]
    params, shapes = equation.params, [aval.shape for aval in avals]
    images, kernel, _ = params["dimension_numbers"]
    sizes = [
        math.prod(shape[dimension] for dimension in spec[2:])
        for shape, spec in zip(shapes, (images, kernel), strict=True)
    ]
    is_dilated = any(dilation > 1 for dilation in params["lhs_dilation"])
    return is_dilated and sizes[0] < sizes[1] and params["out_sharding"] is None


def _exchanged(image: jax.Array, weight: jax.Array, params: dict[str, Any]) -> jax.Array:
    """The same convolution with the images for a kernel, and the kernel for images.

    With strides s, dilations l and r, and p zeros in front, the entry i of the results, of n, is
    the sum of image[a] weight[u] over a l = i s + u r - p. So u r = a l + (n - 1 - i) s - p', where
    p' = (n - 1) s - p: read backwards, the results are those of a convolution of the kernel.
    """
    groups = params["feature_group_count"]
    images, *space, channels = image.shape
    *extent, inside, features = weight.shape
    shape = jax.eval_shape(lambda image, weight: _as_given(image, weight, params), image, weight)
    lengths = shape.shape[1:-1]
    kernels = jnp.moveaxis(weight.reshape(*extent, inside, groups, features // groups), -1, 0)
    kernels = jnp.swapaxes(kernels, -1, -2).reshape(features // groups, *extent, channels)
    apart = jnp.moveaxis(image.reshape(images, *space, groups, inside), (-1, 0), (-3, -1))
    strides, dilations = params["window_strides"], (params["lhs_dilation"], params["rhs_dilation"])
    ends = zip(lengths, strides, space, extent, *dilations, params["padding"], strict=True)
    padding: list[tuple[int, int]] = []
    for length, stride, size, window, hole, gap, (before, _) in ends:
        front = (length - 1) * stride - before
        # As long as the results have to be, whatever strides left over behind the images.
        met = (length - 1) * stride + (size - 1) * hole + 1
        padding.append((front, met - front - ((window - 1) * gap + 1)))
    precision = params["precision"]
    exchanged = params | {
        "padding": tuple(padding),
        "lhs_dilation": params["rhs_dilation"],
        "rhs_dilation": params["lhs_dilation"],
        "precision": None if precision is None else tuple(reversed(precision)),
    }
    turned = _as_given(kernels, apart.reshape(*space, inside, groups * images), exchanged)
    turned = jax.lax.rev(turned, tuple(range(1, turned.ndim - 1)))
    turned = turned.reshape(features // groups, *lengths, groups, images)
    return jnp.moveaxis(turned, (0, -1), (-1, 0)).reshape(images, *lengths, features)


def _groups_of_images(equation: jex_core.JaxprEqn) -> int:
    """How many groups of images each have kernels of their own, where they can be moved.

    So it is in the gradient of a kernel whose channels are in groups.
    """
    image: Any = equation.invars[0].aval
    is_spread = any(image.sharding.spec)  # on Explicit axes
    return 1 if is_spread else equation.params["batch_group_count"]


def _side_by_side(image: jax.Array, groups: int) -> jax.Array:
    """Groups of images become groups of channels.

    As groups of images they would get a dimension of space, full of holes: XLA takes up to 500
    times as long.
    """
    size, *space, channels = image.shape
    apart = image.reshape(groups, size // groups, *space, channels)
    return jnp.moveaxis(apart, 0, -2).reshape(size // groups, *space, groups * channels)


def _channels_last(dimensions: int) -> jax.lax.ConvDimensionNumbers:
    space = range(1, dimensions - 1)
    return jax.lax.ConvDimensionNumbers(
        (0, dimensions - 1, *space),
        (dimensions - 1, dimensions - 2, *range(dimensions - 2)),
        (0, dimensions - 1, *space),
    )


def _order(spec: Sequence[int], to: Sequence[int]) -> list[int]:
    """The permutation that brings dimensions from where one spec has them to where another has."""
    at = dict(zip(to, spec, strict=True))
    return [at[i] for i in range(len(spec))]
