"""Plain numbers that a caller hands in, refused by name when they are not what they should be.

Numpy's numbers are accepted, and come back as Python's. Booleans are refused: Python takes `True`
for 1, but as a probability or a count it is a slip.
"""

import math
import numbers
from collections.abc import Callable

from ..shown import shown


def whole_number(name: str, value: object, *, least: int, most: int, advice: str = "") -> int:
    """Returns `value` as an int, or raises a ValueError unless `least <= value <= most`.

    Advice is given for a number that is too large.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(
            f"{name} must be a whole number; found {shown(value)} ({type(value).__name__})."
        )
    whole = int(value)
    if whole < least:
        raise ValueError(f"{name} must be at least {least}; found {shown(whole)}.")
    if whole > most:
        raise ValueError(f"{name} must be at most {most}; found {shown(whole)}.{advice}")
    return whole


def real_number(
    name: str,
    value: object,
    is_in_range: Callable[[float], bool] = math.isfinite,
    wanted: str = "a finite number",
    *,
    advice: str = "",
) -> float:
    """Returns `value` as a float, or raises a ValueError: unless finite, and in range.

    `wanted` is the range, in words. Advice is given for numbers that are not finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(
            f"{name} must be a real number; found {shown(value)} ({type(value).__name__})."
        )
    try:
        real = float(value)
    except OverflowError:  # an integer beyond every float
        real = math.inf
    if not math.isfinite(real):
        raise ValueError(f"{name} must be a finite number; found {real}.{advice}")
    if not is_in_range(real):
        # A very large number may be a secret in the wrong place.
        found = real if abs(real) <= 2**32 else "a number beyond 2^32"
        raise ValueError(f"{name} must be {wanted}; found {found}.")
    return real


def sampling_probability(value: object) -> float:
    """Returns `value` as a float in (0, 1], or raises a ValueError that speaks of sampling_prob."""
    wanted = (
        "greater than 0 and at most 1 (it is the probability with which each example is drawn in "
        "a step)"
    )
    return real_number("sampling_prob", value, lambda real: 0 < real <= 1, wanted)
