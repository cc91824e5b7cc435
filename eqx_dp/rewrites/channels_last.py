"""Convolutions in the layout that XLA runs on all cores of a CPU."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.extend.core.primitives import conv_general_dilated_p

from ..device import is_cpu
from ..programs import inlined, rewritten


def channels_last(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Rewrites a program's convolutions, in loops and branches as well, for a CPU.

    On a CPU, XLA runs a convolution by a library, on all cores, if channels are last in images and
    kernels. It changes convolutions to that layout, but not those in the body of a loop or in a
    branch (https://github.com/jax-ml/jax/issues/12868): the gradient of a convolution of 64 images
    takes 20 times as long there. Here convolutions are written channels last, between
    transpositions. Three kinds do not change: convolutions of groups of images, those on Explicit
    axes, and depthwise ones, where XLA's own loop is faster. Nothing else changes, and on other
    platforms nothing at all.

    The program is differentiated and batched; derivative rules that are not yet applied do not
    change.

    Returns:
        A program of the same inputs and results.
    """
    return rewritten(program, _moved) if is_cpu() else program


def _moved(equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn] | None:
    """Transpositions, the convolution channels last, and the transposition back."""
    if equation.primitive is not conv_general_dilated_p or _stays(equation):
        return None
    numbers = equation.params["dimension_numbers"]
    channel = len(numbers.lhs_spec) - 1
    images = (0, channel, *range(1, channel))
    last = jax.lax.ConvDimensionNumbers(images, (channel, channel - 1, *range(channel - 1)), images)
    if numbers == last:
        return None
    orders = [_order(spec, to) for spec, to in zip(numbers, last, strict=True)]
    params = equation.params | {"dimension_numbers": last}

    def convolution(*operands: Any) -> Any:
        moved = map(jax.lax.transpose, operands, orders)
        found = conv_general_dilated_p.bind(*moved, **params)
        return jax.lax.transpose(found, np.argsort(orders[-1]))

    return inlined(convolution, equation)


def _order(spec: Sequence[int], to: Sequence[int]) -> list[int]:
    """The permutation of dimensions from one spec to another."""
    at = dict(zip(to, spec, strict=True))
    return [at[i] for i in range(len(spec))]


def _stays(equation: jex_core.JaxprEqn) -> bool:
    params, aval = equation.params, cast(Any, equation.invars[1].aval)
    kernel = aval.shape
    groups, features = params["feature_group_count"], params["dimension_numbers"].rhs_spec
    # Depthwise: XLA's own loop is 6 to 130 times as fast as the library.
    is_depthwise = groups > 1 and [kernel[axis] for axis in features[:2]] == [groups, 1]
    return is_depthwise or params["batch_group_count"] > 1 or params["out_sharding"] is not None
