"""How an error names what it found: never a whole model, a key, or what an array holds."""

import numbers
from typing import Any

import equinox as eqx
import numpy as np

_LONGEST = 80


def shown(value: Any) -> str:
    """A number, a short text, None: as they are. An array: dtype and shape. Else the type."""
    kind = f"a value of type {type(value).__name__}"
    if value is None or isinstance(value, str | numbers.Number):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{kind} of {len(text)} characters"
    if eqx.is_array(value) or isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return f"the type {value.__qualname__}" if isinstance(value, type) else kind
