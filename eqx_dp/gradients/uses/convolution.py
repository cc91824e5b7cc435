"""`conv_general_dilated`: convolutions of every rank, strided, dilated, grouped, transposed."""

import math
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import conv_general_dilated_p
from jaxtyping import Array

from .use import MatrixAxes, Operation

name = "convolution"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A convolution with the parameter as its kernel."""
    return (
        equation.primitive is conv_general_dilated_p
        and operand == 1
        and equation.params["batch_group_count"] == 1
    )


def residuals(operation: Operation, operand: int, inputs: list[Any]) -> Any:
    """The image, as it is: its patches are cut out when they are needed."""
    del operation, operand
    return inputs[0]


def matrix_axes(operation: Operation, operand: int) -> MatrixAxes:
    """Rows are the entries of the window, channels last; columns the output channels of a group."""
    output, channel, *window = operation.param("dimension_numbers").rhs_spec
    groups = operation.param("feature_group_count")
    shape = list(operation.operands[operand])
    shape[output : output + 1] = groups, shape[output] // groups

    def moved(axis: int) -> int:
        return axis + (axis > output)

    rows = tuple(moved(axis) for axis in (*window, channel))
    return MatrixAxes(tuple(shape), (output,), rows, (output + 1,))


def factors(
    operation: Operation, operand: int, residuals: Any, cotangent: Array
) -> tuple[Array, Array]:
    """Positions are time, a patch of the image is the input, output channels are the output."""
    del operand
    x, g = _columns(operation, residuals, cotangent)
    return jnp.swapaxes(x, 1, 2), jnp.swapaxes(g, 1, 2)


def gradient(operation: Operation, operand: int, residuals: Any, cotangent: Array) -> Array:
    """The sum of the outer products, from factors whose time stays last: nothing is moved."""
    del operand
    x, g = _columns(operation, residuals, cotangent)
    return jnp.einsum("gkt,gpt->gkp", x, g, precision=jax.lax.Precision.HIGHEST)


def _columns(operation: Operation, image: Any, cotangent: Array) -> tuple[Array, Array]:
    """Patches `(group, offset x channel, time)`, and cotangents `(group, channel, time)`."""
    groups = operation.param("feature_group_count")
    numbers = operation.param("dimension_numbers")
    patches = _patches(operation, jnp.transpose(image, numbers.lhs_spec))
    images, offsets, channels, positions = patches.shape
    x = patches.reshape(images, offsets, groups, channels // groups, positions)
    g = jnp.transpose(cotangent, numbers.out_spec).reshape(images, groups, -1, positions)
    time = images * positions
    return (
        jnp.transpose(x, (2, 1, 3, 0, 4)).reshape(groups, -1, time),
        jnp.transpose(g, (1, 2, 0, 3)).reshape(groups, -1, time),
    )


def _patches(operation: Operation, images: Array) -> Array:
    """Cuts `(image, channel, *space)` into `(image, offset, channel, position)`.

    One spatial dimension after the other: as many cuts as a window has edges, not entries.
    """
    params = dict(operation.params)
    numbers = params["dimension_numbers"]
    kernel, output = operation.operands[1], operation.result
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
