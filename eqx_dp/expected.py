"""Arguments of another type than expected, refused by name before anything fails on them."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from .shown import shown


def expect(name: str, value: object, kinds: type | tuple[type, ...], allowed: str) -> None:
    """Raises a ValueError unless a value is an instance of one of the types.

    Args:
        name: of the argument.
        value: what was found.
        kinds: the types.
        allowed: what is allowed, in words, and where one gets it.
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
    return Path(cast("str | os.PathLike[str]", value))


def function(name: str, value: object, like: str) -> None:
    """Raises a ValueError unless a value can be called; `like` says how it will be."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, {like}; found {shown(value)}.")


def entries(name: str, value: object, of: str) -> tuple[Any, ...]:
    """What a tuple, list or other iterable holds; a ValueError for anything else."""
    expect(name, value, Iterable, f"a tuple of {of}")
    return tuple(cast("Iterable[Any]", value))


def optimizer(name: str, value: object) -> None:
    """Raises a ValueError unless a value is an optimizer of optax, or has the same two methods."""
    if not all(callable(getattr(value, method, None)) for method in ("init", "update")):
        allowed = "an optax.GradientTransformation, such as optax.adam(1e-3)"
        raise ValueError(f"{name} must be {allowed}; found {shown(value)}.")
