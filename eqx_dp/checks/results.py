"""What the results of an equation hold, and where digits are lost that no dtype tells of."""

from typing import Any

import jax.extend.core as jex_core

from ..isolation import dtype_of
from ..programs import named
from .products import narrowest_inside
from .widths import Width, is_integer, width_of, width_of_number

# Nothing is known of what comes out of these: host functions, kernels, programs of elsewhere.
_UNSEEN = named(
    """pure_callback io_callback buffer_callback ffi_call tpu_custom_call triton_kernel_call
    call_exported"""
)
_CASTS = named("convert_element_type bitcast_convert_type")
# Of integers, these do not keep all bits.
_DROPPING = named(
    """and or reduce_and reduce_or population_count clz shift_left shift_right_logical
    shift_right_arithmetic div rem"""
)


def width_of_result(equation: jex_core.JaxprEqn, variable: Any) -> Width | None:
    """What one of an equation's results holds, if that is floating point, or may have been.

    | equation | width |
    |---|---|
    | a callback, a kernel by name | none at all: nothing is known of its results |
    | `reduce_precision` | the one that it rounds to |
    | a cast to integers, of floats or of wider integers | as many digits as bits |
    | a matrix product, a convolution | of the result, or what is narrower on the way there |
    | anything else | of the result |
    """
    name, dtype = equation.primitive.name, dtype_of(variable)
    if name in _UNSEEN:
        return Width(f"result of {name}, of which nothing is known", 0, 0)
    if name == "reduce_precision":
        digits, exponent = (equation.params[key] for key in ("mantissa_bits", "exponent_bits"))
        return Width(f"reduce_precision({exponent}, {digits})", digits, exponent)
    if name in _CASTS and is_integer(dtype):
        before = dtype_of(equation.invars[0])
        was, now = width_of_number(before), width_of_number(dtype)
        if was and now and (now.digits < was.digits or not is_integer(before)):
            return now
    return narrowest_inside(equation) or width_of(dtype)


def bits_dropped(equation: jex_core.JaxprEqn, variable: Any) -> str | None:
    """Says which arithmetic on integers drops bits of what they hold; None where none does."""
    dtype = dtype_of(variable)
    if equation.primitive.name not in _DROPPING or not is_integer(dtype):
        return None
    return f"{dtype}, bits dropped by {equation.primitive.name}"
