"""``conv_general_dilated``: convolutions of every rank, strided, dilated, grouped, transposed."""

import itertools
import math
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..views import shape_of
from .site import Matrices, outer_products

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
    params = equation.params
    groups = params["feature_group_count"]
    numbers = params["dimension_numbers"]
    patches = _patches(equation, jnp.transpose(kept, numbers.lhs_spec))
    images, offsets, channels, positions = patches.shape
    x = patches.reshape(images, offsets, groups, channels // groups, positions)
    x = jnp.transpose(x, (2, 0, 4, 1, 3)).reshape(groups, images * positions, -1)
    g = jnp.transpose(cotangent, numbers.out_spec).reshape(images, groups, -1, positions)
    return x, jnp.transpose(g, (1, 0, 3, 2)).reshape(groups, images * positions, -1)


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
    x, g = matrices(equation, operand, kept, cotangent)
    return from_matrix(equation, operand, outer_products(x, g))


def _patches(equation: jex_core.JaxprEqn, images: Array) -> Array:
    """Cuts ``(image, channel, *space)`` into ``(image, offset, channel, position)``."""
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
    padded = jax.lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), (0, 0, 0), *edges])
    cut = [
        jax.lax.slice(
            padded,
            (0, 0, *starts),
            (
                *padded.shape[:2],
                *(a + (n - 1) * s + 1 for a, n, s in zip(starts, positions, strides, strict=True)),
            ),
            (1, 1, *strides),
        )
        for offset in itertools.product(*map(range, window))
        for starts in [[o * d for o, d in zip(offset, dilation, strict=True)]]
    ]
    return jnp.stack(cut, axis=1).reshape(
        images.shape[0], len(cut), images.shape[1], math.prod(positions)
    )
