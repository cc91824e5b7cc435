"""`conv_general_dilated`: convolutions of every rank, strided, dilated, grouped, transposed."""

import math
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import conv_general_dilated_p
from jaxtyping import Array

from .kind import Kind, MatrixAxes
from .norms import PRECISION


class Convolution(Kind):
    """A convolution with the parameter as its kernel; its patches are cut out when needed.

    JAX's own rule for a kernel's gradient convolves images with cotangents, each example with its
    own: on a CPU that takes several times as long as `outer_products`.
    """

    name = "convolution"
    has_rule = True

    @classmethod
    def claims(cls, equation: jex_core.JaxprEqn, operand: int) -> bool:
        """Any convolution of images that are not in groups."""
        is_kernel = equation.primitive is conv_general_dilated_p and operand == 1
        return is_kernel and equation.params["batch_group_count"] == 1

    @property
    def matrix_axes(self) -> MatrixAxes:
        """Rows and columns are input and output channels.

        The entries of the window stand behind the channels of the side that patches are cut out of.
        """
        output, *others = self.param("dimension_numbers").rhs_spec
        groups, shape = self.param("feature_group_count"), list(self.shape)
        shape[output : output + 1] = groups, shape[output] // groups
        channel, *window = (axis + (axis > output) for axis in others)
        rows, columns = (channel,), (output + 1,)
        if self._cuts_cotangent:
            columns = (*columns, *window)
        else:
            rows = (*rows, *window)
        return MatrixAxes(tuple(shape), (output,), rows, columns)

    @property
    def terms(self) -> int:
        """The positions of the side that is not cut."""
        images, _, *positions = self._sides[not self._cuts_cotangent]
        return images * math.prod(positions)

    def factors(self, residual: Any, cotangent: Array, dtype: Any) -> tuple[Array, Array]:
        """Positions are time, a patch of one side and the channels of the other the two factors."""
        x, g = self._columns(residual, cotangent, dtype)
        return jnp.swapaxes(x, 1, 2), jnp.swapaxes(g, 1, 2)

    def outer_products(self, residual: Any, cotangent: Array, dtype: Any) -> Array:
        """The gradient as matrices; the factors keep time as the last axis, without a copy."""
        x, g = self._columns(residual, cotangent, dtype)
        outputs_first = jnp.einsum("gpt,gkt->gpk", g, x, precision=PRECISION)
        return jnp.swapaxes(outputs_first, 1, 2)

    @property
    def _sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of image and result: images, channels, positions."""
        numbers, (image, _) = self.param("dimension_numbers"), self.operands
        of_result = tuple(self.result[i] for i in numbers.out_spec)
        return tuple(image[i] for i in numbers.lhs_spec), of_result

    @property
    def _cuts_cotangent(self) -> bool:
        """Whether patches are cut from the cotangent, because the convolution enlarges the image.

        Each entry of the window takes all of the smaller side to a part of the larger one. In a
        transposed convolution the padded image would be mostly zeros.
        """
        image, result = self._sides
        return math.prod(image[2:]) < math.prod(result[2:])

    def _columns(self, image: Any, cotangent: Array, dtype: Any) -> tuple[Array, Array]:
        """The factors, `(group, features, time)`; features of patches are channel x offset."""
        groups, numbers = self.param("feature_group_count"), self.param("dimension_numbers")
        sides = jnp.transpose(image, numbers.lhs_spec), jnp.transpose(cotangent, numbers.out_spec)
        is_cut = self._cuts_cotangent
        patches = self._patches(sides[is_cut], is_cut)
        images, *_, positions = patches.shape

        def by_group(x: Array) -> Array:
            x = x.reshape(images, groups, -1, positions)
            x = jnp.transpose(x, (1, 2, 0, 3)).reshape(groups, -1, images * positions)
            return x.astype(dtype)

        cut, other = map(by_group, (patches, sides[not is_cut]))
        return (other, cut) if is_cut else (cut, other)

    def _patches(self, images: Array, is_cotangent: bool) -> Array:
        """Cuts `(image, channel, *space)` into `(image, channel, offset, position)`.

        One spatial dimension after the other: as many cuts as a window has edges, not entries. The
        entry of the window at o takes the image's position i to the result's p where

            i x lhs_dilation + low = p x stride + o x rhs_dilation.
        """
        params, (image, result) = dict(self.params), self._sides
        kernel = self.shape
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
            span, stride = spans[dimension], strides[dimension]
            parts = [jax.lax.slice_in_dim(cut, i, i + span, stride, axis) for i in starts]
            cut = jnp.stack(parts, axis=2)
        return cut.reshape(*images.shape[:2], math.prod(window), math.prod(positions))
