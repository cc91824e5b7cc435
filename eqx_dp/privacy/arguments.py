"""Plain numbers that a caller hands in, refused by name when they are not what they should be.

Numpy's numbers are as welcome as Python's and come back as Python's. Booleans are not: `True` for a
probability or a count is a slip, though Python would take it for 1.
"""

import math
import numbers

from ..shown import shown


def whole_number(name: str, value: object, *, least: int, most: int) -> int:
    """Returns `value` as an int, or raises a ValueError unless `least <= value <= most`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be a whole number; found {shown(value)} ({_kind(value)}).")
    whole = int(value)
    if whole < least:
        raise ValueError(f"{name} must be at least {least}; found {shown(whole)}.")
    if whole > most:
        raise ValueError(f"{name} must be at most {most}; found {shown(whole)}.")
    return whole


def real_number(name: str, value: object, *, advice: str = "") -> float:
    """Returns `value` as a finite float, or raises a ValueError (with advice, if not finite)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a real number; found {shown(value)} ({_kind(value)}).")
    try:
        real = float(value)
    except OverflowError:  # an integer beyond every float
        real = math.inf
    if not math.isfinite(real):
        raise ValueError(f"{name} must be a finite number; found {real}.{advice}")
    return real


def sampling_probability(value: object) -> float:
    """Returns `value` as a float in (0, 1], or raises a ValueError that speaks of sampling_prob."""
    probability = real_number("sampling_prob", value)
    if not 0 < probability <= 1:
        raise ValueError(
            "sampling_prob must be greater than 0 and at most 1 (it is the probability with which "
            f"each example is drawn in a step); found {_size(probability)}."
        )
    return probability


def checked_noise_multiplier(value: object) -> float:
    """Returns `value` as a float of at least 0, or raises a ValueError."""
    noise_multiplier = real_number("noise_multiplier", value)
    if noise_multiplier < 0:
        raise ValueError(f"noise_multiplier must be at least 0; found {noise_multiplier}.")
    return noise_multiplier


def checked_delta(value: object) -> float:
    """Returns `value` as a float in (0, 1), or raises a ValueError."""
    delta = real_number("delta", value)
    if not 0 < delta < 1:
        raise ValueError(
            "delta must be between 0 and 1, both excluded (well below 1 / number of examples to "
            f"mean anything); found {delta}."
        )
    return delta


def _size(value: float) -> str:
    return str(value) if abs(value) <= 2**32 else "a number beyond 2^32"


def _kind(value: object) -> str:
    return type(value).__name__
