"""`conv_general_dilated`: convolutions of every rank, strided, dilated, grouped, transposed."""

import math
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..views import shape_of
from .site import Matrices

name = "convolution"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A convolution with the parameter as its kernel."""
    return (
        equation.primitive.name == "conv_general_dilated"
        and operand == 1
        and equation.params["batch_group_count"] == 1
    )


def keep(equation: jex_core.JaxprEqn, operand: int, inputs: list[Any]) -> Any:
    """The image, as it is: its patches are cut out when they are needed."""
    del equation, operand
    return inputs[0]


def matrices(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Matrices:
    """Positions are time, a patch of the image is the input, output channels are the output."""
    del operand
    x, g = _columns(equation, kept, cotangent)
    return jnp.swapaxes(x, 1, 2), jnp.swapaxes(g, 1, 2)


def in_matrix_form(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Array:
    """The sum of the outer products, from factors whose time stays last: nothing is moved."""
    del operand
    x, g = _columns(equation, kept, cotangent)
    return jnp.einsum("gkt,gpt->gkp", x, g, precision=jax.lax.Precision.HIGHEST)


def _columns(equation: jex_core.JaxprEqn, kept: Any, cotangent: Array) -> tuple[Array, Array]:
    """Patches `(group, offset x channel, time)`, and cotangents `(group, channel, time)`."""
    params = equation.params
    groups = params["feature_group_count"]
    numbers = params["dimension_numbers"]
    patches = _patches(equation, jnp.transpose(kept, numbers.lhs_spec))
    images, offsets, channels, positions = patches.shape
    x = patches.reshape(images, offsets, groups, channels // groups, positions)
    g = jnp.transpose(cotangent, numbers.out_spec).reshape(images, groups, -1, positions)
    time = images * positions
    return (
        jnp.transpose(x, (2, 1, 3, 0, 4)).reshape(groups, -1, time),
        jnp.transpose(g, (1, 2, 0, 3)).reshape(groups, -1, time),
    )


def from_matrix(equation: jex_core.JaxprEqn, operand: int, gradient: Array) -> Array:
    """From (group, offset x channel, output channel) to the kernel's layout."""
    spec = equation.params["dimension_numbers"].rhs_spec
    shape = shape_of(equation.invars[operand])
    outputs, channels, *window = (shape[i] for i in spec)
    groups = equation.params["feature_group_count"]
    kernel = gradient.reshape(groups, *window, channels, outputs // groups)
    kernel = jnp.moveaxis(kernel, (-1, -2), (1, 2)).reshape(outputs, channels, *window)
    return jnp.transpose(kernel, [spec.index(i) for i in range(len(spec))])


def gradient(equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array) -> Array:
    """The transpose of the convolution with respect to its kernel."""
    return from_matrix(equation, operand, in_matrix_form(equation, operand, kept, cotangent))


def _patches(equation: jex_core.JaxprEqn, images: Array) -> Array:
    """Cuts `(image, channel, *space)` into `(image, offset, channel, position)`.

    One spatial dimension after the other: as many cuts as a window has edges, not entries.
    """
    params = equation.params
    numbers = params["dimension_numbers"]
    kernel, output = shape_of(equation.invars[1]), shape_of(equation.outvars[0])
    window = [kernel[i] for i in numbers.rhs_spec[2:]]
    positions = [output[i] for i in numbers.out_spec[2:]]
    strides, dilation = params["window_strides"], params["rhs_dilation"]

    edges = [
        (low, high, step - 1)
        for (low, high), step in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    cut = jax.lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), (0, 0, 0), *edges])
    for dimension in reversed(range(len(window))):
        span = (positions[dimension] - 1) * strides[dimension] + 1
        axis = cut.ndim - len(window) + dimension
        starts = [offset * dilation[dimension] for offset in range(window[dimension])]
        cut = jnp.stack(
            [
                jax.lax.slice_in_dim(cut, start, start + span, strides[dimension], axis)
                for start in starts
            ],
            axis=1,
        )
    return cut.reshape(images.shape[0], math.prod(window), images.shape[1], math.prod(positions))
