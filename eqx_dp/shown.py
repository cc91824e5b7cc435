"""How errors show values (never a model, a key, or an array's values)."""

import numbers
from collections.abc import Sequence
from typing import Any, cast

import equinox as eqx
import numpy as np
from jax.sharding import PartitionSpec

_LONGEST = 80
_SHORT = (str, numbers.Number, np.dtype, PartitionSpec)


def function_name(function: Any) -> str:
    """The name of a function; never its bound object or closure, such as a model or a key."""
    return getattr(function, "__name__", type(function).__name__)


def some(names: Sequence[str], most: int) -> str:
    """The first of some names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def shapes(tree: Any) -> str:
    """A tree on one line, with dtype and shape in the place of an array: `f32[20]`."""
    return eqx.tree_pformat(tree, width=10**9)


def shown(value: Any) -> str:
    """A value, as an error shows it.

    | value | shown as |
    |---|---|
    | a number, text, None, dtype, spec | itself, up to 80 characters |
    | a whole number beyond 2^64 | that it is one: it may be a secret |
    | a tuple or list | its entries, up to 80 characters |
    | an array | dtype and shape |
    | anything else, or longer | its type |
    """
    if eqx.is_array(value) or isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    text = ""
    if isinstance(value, int) and abs(value) > 2**64:
        return "a whole number beyond 2^64"
    if value is None or isinstance(value, _SHORT):
        text = repr(value)
    elif type(value) in (tuple, list):
        entries = [shown(entry) for entry in cast("tuple[Any, ...]", value)]
        text = f"({', '.join(entries)}{',' if len(entries) == 1 else ''})"
    if 0 < len(text) <= _LONGEST:
        return text
    kind = f"the type {value.__qualname__}" if isinstance(value, type) else ""
    return kind or f"a value of type {type(value).__name__}"
