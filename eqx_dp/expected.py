"""Checks the types of arguments, and refuses them by name before anything else fails."""

import math
import numbers
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .extras import extra
from .shown import shown

# The path of a file or folder of a run: of `pathlib` on a file system, of `etils.epath` in an
# object store. The latter is a `PurePath` with the methods of `pathlib.Path` that are used here.
if TYPE_CHECKING:
    RunPath = Path
else:
    RunPath = PurePath


def expect(name: str, value: object, kinds: type | tuple[type, ...], allowed: str) -> None:
    """Raises a ValueError unless a value is an instance of one of the types.

    `allowed` says in words what is allowed, and where to get it.
    """
    if not isinstance(value, kinds):
        raise ValueError(f"{name} must be {allowed}; found {shown(value)}.")


def flag(name: str, value: object) -> bool:
    """True or False; a ValueError for anything else, such as a text."""
    expect(name, value, (bool, np.bool_), "True or False")
    return bool(value)


def path(name: str, value: object) -> Path:
    """A path from a text or a path object; a ValueError for anything else."""
    expect(name, value, (str, os.PathLike), "a path: a text, or a pathlib.Path")
    found = Path(cast("str | os.PathLike[str]", value))
    if "://" in str(value):
        raise ValueError(f"{name} must be a path on a file system; found {str(value)!r}.")
    return found


def directory(name: str, value: object) -> RunPath:
    """A directory on a file system, absolute, or in an object store.

    Raises:
        ValueError: it is no path, or in a store that orbax does not write to.
    """
    allowed = 'a path: a text such as "run" or "gs://bucket/run", or a path object'
    expect(name, value, (str, os.PathLike), allowed)
    text = os.fspath(cast("str | os.PathLike[str]", value))
    if "://" not in text:
        return Path(text).absolute()
    if not text.startswith("gs://") or not text.removeprefix("gs://").strip("/"):
        raise ValueError(
            f"{name} must be a path on a file system, or in Google's cloud storage: "
            f"gs://bucket/folder; found {text!r}. Arrays are written by orbax, which knows no "
            "other object store: mount yours as a folder."
        )
    return extra("etils.epath").Path(text)


def function(name: str, value: object, like: str) -> None:
    """Raises a ValueError unless a value can be called; `like` says how it will be."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, {like}; found {shown(value)}.")


def entries(name: str, value: object, of: str) -> tuple[Any, ...]:
    """The entries of a tuple, list or other iterable; a ValueError for anything else."""
    expect(name, value, Iterable, f"a tuple of {of}")
    return tuple(cast("Iterable[Any]", value))


def optimizer(name: str, value: object) -> None:
    """Raises a ValueError unless a value is an optimizer of optax, or has the same two methods."""
    if not all(callable(getattr(value, method, None)) for method in ("init", "update")):
        allowed = "an optax.GradientTransformation, such as optax.adam(1e-3)"
        raise ValueError(f"{name} must be {allowed}; found {shown(value)}.")


# Numbers. Numpy's are accepted, and become Python's. Booleans are refused: Python treats `True` as
# 1, but as a probability or a count it is a mistake.


def whole_number(name: str, value: object, *, least: int, most: int, advice: str = "") -> int:
    """Returns `value` as an int, or raises a ValueError unless `least <= value <= most`.

    Advice is given for a number that is too large.
    """
    whole = int(_number(name, value, numbers.Integral, "a whole number"))
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
    found = _number(name, value, numbers.Real, "a real number")
    try:
        real = float(found)
    except OverflowError:  # an integer beyond every float
        real = math.inf
    if not math.isfinite(real):
        raise ValueError(f"{name} must be a finite number; found {real}.{advice}")
    if not is_in_range(real):
        # A very large number may be a secret in the wrong place.
        found = real if abs(real) <= 2**32 else "a number beyond 2^32"
        raise ValueError(f"{name} must be {wanted}; found {found}.")
    return real


def _number(name: str, value: object, kind: type, wanted: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name} must be {wanted}; found {shown(value)} ({type(value).__name__}).")
    return value
