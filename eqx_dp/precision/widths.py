"""How wide a floating-point format is, and what an equation's values are held in."""

from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np


class Width(NamedTuple):
    """A floating-point format.

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


def is_narrow(aval: Any, declared: Width) -> bool:
    """Whether a value cannot hold what the declared width can; integers of 32 bits pass for it."""
    dtype = getattr(aval, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits <= _NARROW_INTEGER
    width = width_of(dtype)
    return width is None or width.narrower(declared)


_NARROW_INTEGER = 16  # bits


def held_in(equation: jex_core.JaxprEqn, variable: Any) -> Width | None:
    """What one of an equation's results is held in, if that is floating point, or may have been.

    Floats, or wider integers in which floats may be held, that become integers of 8 or 16 bits are
    rounded to as many digits.
    """
    dtype = getattr(variable.aval, "dtype", None)
    name = equation.primitive.name
    if name == "reduce_precision":
        digits, exponent = (equation.params[key] for key in ("mantissa_bits", "exponent_bits"))
        return Width(f"reduce_precision({exponent}, {digits})", digits, exponent)
    if name == "convert_element_type" and dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        before: Any = equation.invars[0].aval
        bits = jnp.iinfo(dtype).bits
        if bits <= _NARROW_INTEGER and _holds_more(before.dtype):
            return Width(np.dtype(dtype).name, bits, 0)
    return width_of(dtype)


def _holds_more(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits > _NARROW_INTEGER
    return width_of(dtype) is not None
