"""How many digits a number format holds, a matrix product keeps, and an equation's results hold.

Accelerators round float32 operands of products unless a program asks for more: at JAX's default
precision to bfloat16 (TPU) or TensorFloat32 (NVIDIA). An algorithm by name rounds to what it is
named for.
"""

from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithm, DotAlgorithmPreset, Precision

from ..programs import UNSEEN, named
from .flow import dtype_of


class Width(NamedTuple):
    """A number format.

    Attributes:
        name: as a dtype has it.
        digits: binary digits of the significand that are stored.
        exponent: bits of the exponent.
    """

    name: str
    digits: int
    exponent: int

    @property
    def key(self) -> tuple[int, int, str]:
        """Narrow formats sort first."""
        return self.digits, self.exponent, self.name

    def narrower(self, declared: "Width") -> bool:
        """Whether this format cannot hold what the declared one can."""
        return self.digits < declared.digits or self.exponent < declared.exponent


def width_of(dtype: Any) -> Width | None:
    """The width of a floating-point dtype (of a complex one's parts); None of anything else."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return None
    info = jnp.finfo(dtype)
    return Width(np.dtype(dtype).name, int(info.nmant), int(info.nexp))


def width_of_number(dtype: Any) -> Width | None:
    """The width of a floating-point dtype, or of an integer one; None of anything else.

    Integers hold fixed-point numbers, whose scale stands in for an exponent.
    """
    if not is_integer(dtype):
        return width_of(dtype)
    bits = int(jnp.iinfo(dtype).bits)
    return Width(np.dtype(dtype).name, bits, bits)


def is_integer(dtype: Any) -> bool:
    """Whether a dtype is one of integers."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer)


# Matrix products and convolutions, whatever the dtypes of their results say.

CONTRACTIONS = named("dot_general conv_general_dilated ragged_dot_general")

# What an operand is rounded to, as algorithms are named; ANY_F8 is given the better of two worlds.
_FORMATS = {
    "ANY": Width("float8", 3, 5),
    "F16": Width("float16", 10, 5),
    "BF16": Width("bfloat16", 7, 8),
    "TF32": Width("TensorFloat32", 10, 8),
    "F32": Width("float32", 23, 8),
    "F64": Width("float64", 52, 11),
}
# Into how many parts of that format an algorithm takes an operand apart.
_PARTS = {"X3": 2, "X6": 3, "X9": 3}
# What float32 may become at each precision; at the highest it is kept.
_FLOAT32_AT = {Precision.DEFAULT: _FORMATS["BF16"], Precision.HIGH: _FORMATS["TF32"]}


def narrowest_inside(equation: jex_core.JaxprEqn) -> Width | None:
    """What a contraction rounds to on its way, narrower than its operands and its result show.

    | a product of float32 | digits that are kept |
    |---|---|
    | without a precision, or at the default | 7, of bfloat16 |
    | at high precision | 10, of TensorFloat32 |
    | at the highest | all |
    | by `BF16_BF16_F32_X3` | 15, of two bfloat16 parts |
    | by `BF16_BF16_F32_X6` or `_X9` | all, of three (X6 is TPU's highest precision) |
    | by `TF32_TF32_F32_X3` | 21, of two TensorFloat32 parts |
    | by another algorithm | those it is named for |
    | where imprecise accumulation is allowed | half of the accumulator's |

    Returns:
        The narrowest such format; None where nothing is lost, and of what is no contraction.
    """
    if equation.primitive.name not in CONTRACTIONS:
        return None
    shown_by: list[Any] = [*equation.invars[:2], *equation.outvars]
    before = [width_of(variable.aval.dtype) for variable in shown_by]
    inside = _inside(equation.params["precision"], before)
    lost = [
        width
        for width, shown in zip(inside, before, strict=False)
        if width is not None and shown is not None and width.narrower(shown)
    ]
    return min(lost, key=lambda width: width.key, default=None)


def _inside(precision: Any, shown: list[Width | None]) -> list[Width | None]:
    """The two operands and their sums as they are inside; None where they are as they show."""
    match precision:
        case DotAlgorithm():
            left = _in_parts(width_of(precision.lhs_precision_type), precision.lhs_component_count)
            right = _in_parts(width_of(precision.rhs_precision_type), precision.rhs_component_count)
            sums = width_of(precision.accumulation_type)
            name, imprecise = "a DotAlgorithm", precision.allow_imprecise_accumulation
        case DotAlgorithmPreset() if precision != DotAlgorithmPreset.DEFAULT:
            operand, *rest = precision.name.split("_")
            left = right = _in_parts(_FORMATS[operand], _PARTS.get(rest[-1], 1))
            sums = width_of(precision.accumulation_type)
            name, imprecise = precision.name, "FAST" in rest
        case _:
            pair = precision if isinstance(precision, tuple) else (Precision.DEFAULT,) * 2
            return [_float32_at(one, width) for one, width in zip(pair, shown, strict=False)]
    if imprecise and sums is not None:
        sums = sums._replace(digits=sums.digits // 2)
    return [
        width and width._replace(name=f"{width.name} by {name}") for width in (left, right, sums)
    ]


def _in_parts(width: Width | None, parts: int) -> Width | None:
    """The parts of an operand hold all their digits together, each with a leading one."""
    return width and width._replace(digits=parts * (width.digits + 1) - 1)


def _float32_at(precision: Precision, width: Width | None) -> Width | None:
    lost = _FLOAT32_AT.get(precision)
    if lost is None or width is None or width.digits != _FORMATS["F32"].digits:
        return None
    name = f"{width.name} at precision {precision.name.lower()} ({lost.name} on accelerators)"
    return lost._replace(name=name)


# The results of an equation, and where digits are lost that no dtype tells of.

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
    if name in UNSEEN:
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


def product_of(operands: list[Width]) -> str:
    """The dtypes of operands, as they are shown."""
    return " x ".join(dict.fromkeys(operand.name for operand in operands))


def is_float8(widths: list[Width]) -> bool:
    """Whether any has 8 bits."""
    return any(1 + width.exponent + width.digits <= 8 for width in widths)


def known_width(dtype: Any) -> Width:
    """The width of a floating-point dtype."""
    width = width_of(dtype)
    assert width is not None
    return width


def width_of_variable(variable: Any) -> Width | None:
    """The width of what a variable holds, if that is floating point."""
    return width_of(dtype_of(variable))


# What is known of a value on its way between the clip and the noise.


class Draw(NamedTuple):
    """Random bits that a program asks for.

    Attributes:
        line: the source line.
        bits: how many for each number.
        size: how many numbers.
    """

    line: str
    bits: int
    size: int


class Narrowest(NamedTuple):
    """The narrowest floating-point format that a value went through, and the line where it did."""

    width: Width
    line: str


class Facts(NamedTuple):
    """What is known of a value.

    Attributes:
        clipped: whether a sum of clipped gradients is in it that has no noise yet.
        draws: the random bits that it descends from; none where `clipped`.
        narrowest: what it went through since the draws; None without any, or without a float yet.
    """

    clipped: bool = False
    draws: frozenset[Draw] = frozenset()
    narrowest: Narrowest | None = None

    def through(self, width: Width | None, line: str) -> "Facts":
        """The facts about a value of the given width that is made of one with these."""
        if not self.draws or width is None:
            return self
        if self.narrowest and not width.key < self.narrowest.width.key:
            return self
        return self._replace(narrowest=Narrowest(width, line))


NOTHING = Facts()
