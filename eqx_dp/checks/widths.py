"""How many digits a number format holds, a matrix product keeps, and an equation's results hold.

Accelerators round float32 operands of products unless a program asks for more: at JAX's default
precision to bfloat16 (TPU) or TensorFloat32 (NVIDIA). A named algorithm rounds to the format of its
name.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import DotAlgorithm, DotAlgorithmPreset, Precision

from ..programs import UNSEEN, named
from .variables import dtype_of


class Width(NamedTuple):
    """A number format; narrow ones sort first.

    Attributes:
        digits: binary digits of the significand that are stored.
        exponent: bits of the exponent.
        name: that of the dtype.
    """

    digits: int
    exponent: int
    name: str

    def narrower(self, declared: "Width") -> bool:
        """Whether this format cannot hold what the declared one can."""
        return self.digits < declared.digits or self.exponent < declared.exponent


def width_of(dtype: Any) -> Width | None:
    """The width of a floating-point dtype (of a complex one's parts); None for other dtypes."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return None
    info = jnp.finfo(dtype)
    return Width(int(info.nmant), int(info.nexp), np.dtype(dtype).name)


def known_width(dtype: Any) -> Width:
    """The width of a floating-point dtype."""
    width = width_of(dtype)
    assert width is not None
    return width


def width_of_variable(variable: Any) -> Width | None:
    """The width of a variable, if it is floating point."""
    return width_of(dtype_of(variable))


def shown_product(operands: list[Width]) -> str:
    """The formats of a product's operands, each once."""
    return " x ".join(dict.fromkeys(operand.name for operand in operands))


def is_float8(widths: list[Width]) -> bool:
    """Whether one of them has 8 bits."""
    return any(1 + width.exponent + width.digits <= 8 for width in widths)


# Matrix products and convolutions, whatever the dtypes of their results say.

CONTRACTIONS = named("dot_general conv_general_dilated ragged_dot_general")


def narrowest_inside(equation: JaxprEqn) -> Width | None:
    """The format that a contraction rounds to, if it is narrower than operands and result.

    | a product of float32 | digits that are kept |
    |---|---|
    | without a precision, at the default; of any dtype, by a named algorithm | 7, of bfloat16 |
    | at high precision | 10, of TensorFloat32 |
    | at the highest | all |

    Returns:
        The narrowest such format; None if nothing is lost, or for other equations.
    """
    if equation.primitive.name not in CONTRACTIONS:
        return None
    given = equation.params["precision"]
    if isinstance(given, DotAlgorithm | DotAlgorithmPreset):
        return _BFLOAT16._replace(name="product by an algorithm, of which no more is known")
    pair = given if isinstance(given, tuple) else (given, given)
    of_operands = zip(pair, map(width_of_variable, equation.invars[:2]), strict=True)
    return narrowest_of(_inside(one) for one, width in of_operands if width and width.digits == 23)


_BFLOAT16 = known_width(jnp.bfloat16)


def _inside(precision: Precision | None) -> Width | None:
    """The format that an operand of float32 is rounded to."""
    if precision == Precision.HIGHEST:
        return None
    if precision == Precision.HIGH:
        return Width(10, 8, "float32 at precision high (TensorFloat32 on accelerators)")
    return _BFLOAT16._replace(name="float32 at precision default (bfloat16 on accelerators)")


def width_of_result(equation: JaxprEqn, variable: Any) -> Width | None:
    """The width of an equation's result, if it is floating point.

    | equation | width |
    |---|---|
    | a callback, a kernel by name | none at all: its results are unknown |
    | `reduce_precision` | the one that it rounds to |
    | a matrix product, a convolution | of the result, or a narrower one inside |
    | anything else | of the result |
    """
    name = equation.primitive.name
    if name in UNSEEN:
        return Width(0, 0, f"result of {name}, of which nothing is known")
    if name == "reduce_precision":
        digits, exponent = (equation.params[key] for key in ("mantissa_bits", "exponent_bits"))
        return Width(digits, exponent, f"reduce_precision({exponent}, {digits})")
    return narrowest_inside(equation) or width_of_variable(variable)


# Facts about a value between the clip and the noise.


class Draw(NamedTuple):
    """Random bits that a program asks for.

    Attributes:
        line: the source line.
        bits: how many for each number.
        size: how many numbers.
        arguments: the program's arguments that they follow from.
    """

    line: str
    bits: int
    size: int
    arguments: frozenset[int]


class Facts(NamedTuple):
    """What is known of a value.

    Attributes:
        clipped: whether it contains a sum of clipped gradients without noise.
        draws: the random bits that it depends on; none if `clipped`.
        narrowest: the narrowest floating-point format that it went through since the draws; None
            without any, or without a float yet.
        arguments: the program's arguments that it is made of, outside of the engine; in the loss,
            the one that it is a view of.
        untouched: the argument that it is.
    """

    clipped: bool = False
    draws: frozenset[Draw] = frozenset()
    narrowest: Width | None = None
    arguments: frozenset[int] = frozenset()
    untouched: int | None = None

    def through(self, width: Width | None) -> "Facts":
        """The facts about a value of the given width, computed from a value with these facts."""
        if not self.draws or width is None:
            return self
        return self._replace(narrowest=narrowest_of([self.narrowest, width]))


def narrowest_of(widths: Iterable[Width | None]) -> Width | None:
    """The narrowest of the known widths."""
    return min((width for width in widths if width is not None), default=None)
