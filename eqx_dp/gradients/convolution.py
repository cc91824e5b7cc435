"""`conv_general_dilated`: convolutions of every rank, strided, dilated, grouped, transposed."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import conv_general_dilated_p
from jaxtyping import Array

from ..isolation import of_one
from ..sharding import evaluated_whole, whole
from .leaves import computed_once
from .uses import MatrixAxes, Operation, ParamUse

name = "convolution"


def claims(equation: jex_core.JaxprEqn, operand: int) -> bool:
    """A convolution with the parameter as its kernel."""
    is_kernel = equation.primitive is conv_general_dilated_p and operand == 1
    return is_kernel and equation.params["batch_group_count"] == 1


def residuals(operation: Operation, operand: int, inputs: list[Any]) -> Any:
    """The image; its patches are cut out later, when they are needed."""
    del operation, operand
    return inputs[0]


def matrix_axes(operation: Operation, operand: int) -> MatrixAxes:
    """Which axes of the kernel are the rows, and which the columns, of a matrix.

    Rows and columns are input and output channels. The entries of the window stand behind the
    channels of the side that patches are cut out of.
    """
    output, channel, *window = operation.param("dimension_numbers").rhs_spec
    groups = operation.param("feature_group_count")
    shape = list(operation.operands[operand])
    shape[output : output + 1] = groups, shape[output] // groups

    def moved(axis: int) -> int:
        return axis + (axis > output)

    rows, columns = (moved(channel),), (output + 1,)
    window = tuple(map(moved, window))
    if _cuts_cotangent(operation):
        columns = (*columns, *window)
    else:
        rows = (*rows, *window)
    return MatrixAxes(tuple(shape), (output,), rows, columns)


def steps(operation: Operation, operand: int) -> int:
    """The positions of the side that is not cut."""
    del operand
    sides = _sides(operation)
    images, _, *positions = sides[not _cuts_cotangent(operation)]
    return images * math.prod(positions)


def factors(
    operation: Operation, operand: int, residuals: Any, cotangent: Array
) -> tuple[Array, Array]:
    """Positions are time, a patch of one side and the channels of the other the two factors."""
    del operand
    x, g = _columns(operation, residuals, cotangent)
    return jnp.swapaxes(x, 1, 2), jnp.swapaxes(g, 1, 2)


def outer_products(operation: Operation, image: Array, cotangent: Array) -> Array:
    """The gradient as matrices; the factors keep time as the last axis, without a copy."""
    x, g = _columns(operation, image, cotangent)
    outputs_first = jnp.einsum("gpt,gkt->gpk", g, x, precision=jax.lax.Precision.HIGHEST)
    return jnp.swapaxes(outputs_first, 1, 2)


class Kernel(NamedTuple):
    """The use of a formed leaf as a kernel: its gradient comes from patches of the image.

    JAX's own rule convolves images with cotangents, each example with its own: on a CPU that takes
    several times as long.

    Attributes:
        use: the use.
        saves_memory: whether patches go as soon as they are used. Otherwise the compiler may hold
            those of several layers at once, which is a little faster.
    """

    use: ParamUse
    saves_memory: bool

    def tap(self) -> Any:
        """Nothing: the kernel is differentiated itself."""
        return ()

    def evaluated(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Any
    ) -> tuple[Array, Any]:
        """The result of a convolution, with another rule for the kernel's gradient."""
        del tap

        def product(image: Array, kernel: Array) -> Array:
            return evaluated_whole(equation, [image, kernel])[0]

        run = jax.custom_vjp(product)
        of_example = functools.partial(outer_products, self.use.operation)

        def of_batch(*sides: Array) -> tuple[Array, Any]:
            return computed_once(lambda its: jax.vmap(of_example)(*its), sides, sides[1]), ()

        gradient = (lambda *its: of_one(of_batch)(*its)[0]) if self.saves_memory else of_example

        def forward(image: Array, kernel: Array) -> tuple[Array, Any]:
            result, pullback = jax.vjp(lambda image: product(image, kernel), image)
            return result, (pullback, image)

        def backward(held: Any, cotangent: Array) -> tuple[Array, Array]:
            pullback, image = held
            aval: Any = equation.invars[1].aval
            grads = gradient(image, cotangent)
            return *pullback(cotangent), self.use.inside().to_parameter(grads).astype(aval.dtype)

        run.defvjp(forward, backward)
        return run(*map(whole, inputs)), ()


def _sides(operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of image and result: images, channels, positions."""
    numbers, (image, _) = operation.param("dimension_numbers"), operation.operands
    of_result = tuple(operation.result[i] for i in numbers.out_spec)
    return tuple(image[i] for i in numbers.lhs_spec), of_result


def _cuts_cotangent(operation: Operation) -> bool:
    """Whether patches are cut from the cotangent, because the convolution enlarges the image.

    Each entry of the window takes all of the smaller side to a part of the larger one. In a
    transposed convolution the padded image would be mostly zeros.
    """
    image, result = _sides(operation)
    return math.prod(image[2:]) < math.prod(result[2:])


def _columns(operation: Operation, image: Any, cotangent: Array) -> tuple[Array, Array]:
    """The factors, `(group, features, time)`; features of patches are channel x offset."""
    groups, numbers = operation.param("feature_group_count"), operation.param("dimension_numbers")
    sides = jnp.transpose(image, numbers.lhs_spec), jnp.transpose(cotangent, numbers.out_spec)
    is_cut = _cuts_cotangent(operation)
    patches = _patches(operation, sides[is_cut], is_cut)
    images, channels, offsets, positions = patches.shape
    cut = patches.reshape(images, groups, channels // groups * offsets, positions)
    cut = jnp.transpose(cut, (1, 2, 0, 3)).reshape(groups, -1, images * positions)
    other = sides[not is_cut].reshape(images, groups, -1, positions)
    other = jnp.transpose(other, (1, 2, 0, 3)).reshape(groups, -1, images * positions)
    return (other, cut) if is_cut else (cut, other)


def _patches(operation: Operation, images: Array, is_cotangent: bool) -> Array:
    """Cuts `(image, channel, *space)` into `(image, channel, offset, position)`.

    One spatial dimension after the other: as many cuts as a window has edges, not entries. The
    entry of the window at o takes the image's position i to the result's p where

        i x lhs_dilation + low = p x stride + o x rhs_dilation.
    """
    params, (image, result) = dict(operation.params), _sides(operation)
    kernel = operation.operands[1]
    window = [kernel[i] for i in params["dimension_numbers"].rhs_spec[2:]]
    dilation, lows = params["rhs_dilation"], [low for low, _ in params["padding"]]
    # The strides in the cut array, and in the array that is first padded with zeros.
    strides, fillings = params["window_strides"], params["lhs_dilation"]
    if is_cotangent:
        positions, strides, fillings = image[2:], fillings, strides
        lows = [(k - 1) * d - low for k, d, low in zip(window, dilation, lows, strict=True)]
    else:
        positions = result[2:]
    spans = [(n - 1) * stride + 1 for n, stride in zip(positions, strides, strict=True)]
    edges = [
        (low, span + (k - 1) * d - low - ((n - 1) * filling + 1), filling - 1)
        for low, span, k, d, n, filling in zip(
            lows, spans, window, dilation, images.shape[2:], fillings, strict=True
        )
    ]
    cut = jax.lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), (0, 0, 0), *edges])
    for dimension in reversed(range(len(window))):
        axis = cut.ndim - len(window) + dimension
        offsets = range(window[dimension])
        starts = [offset * dilation[dimension] for offset in offsets]
        if is_cotangent:
            starts.reverse()
        cut = jnp.stack(
            [
                jax.lax.slice_in_dim(cut, start, start + spans[dimension], strides[dimension], axis)
                for start in starts
            ],
            axis=2,
        )
    return cut.reshape(*images.shape[:2], math.prod(window), math.prod(positions))
