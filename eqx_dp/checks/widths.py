"""How many digits a number format holds, and the results of an equation."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


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
