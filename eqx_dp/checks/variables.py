"""Shapes and dtypes of a program's variables and literals."""

import math
from typing import Any


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable or a literal; () if it is no array."""
    return tuple(getattr(variable.aval, "shape", ()))


def size_of(variable: Any) -> int:
    """How many entries it has."""
    return math.prod(shape_of(variable))


def dtype_of(variable: Any) -> Any:
    """Its dtype; None if it is no array."""
    return getattr(variable.aval, "dtype", None)
