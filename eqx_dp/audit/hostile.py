"""Examples that break careless code: for every dtype the values at its limits."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

Example: TypeAlias = PyTree[np.ndarray]
"""One example of a batch: its leaves have no axis of examples."""

_FACTORS = {"negated": -1.0, "x 1024": 2.0**10, "x -1024": -(2.0**10)}
_POWERS = (40, -20, -70)
_LIMITS = ("max", "min", "smallest_normal", "smallest_subnormal")


def hostile_examples(example: Example, other: Example) -> dict[str, Example]:
    """Replacements of an example, by name; no two are equal.

    | leaves | become |
    |---|---|
    | floating point | themselves by -1, 1024, -1024, 2^40, 2^-20, 2^-70; NaN, one NaN, \
infinities; the largest, lowest, smallest normal and smallest subnormal number of their dtype |
    | integer | the largest and the lowest number of their dtype |
    | boolean | the opposite |
    | all | zeros; a copy of another example, and a negated copy, which cancels it |

    Leaves of other kinds stay as they are.
    """
    found: dict[str, Example] = {
        "as given": example,
        "zeros": jax.tree.map(np.zeros_like, example),
        "copy of another": other,
        "negated copy of another": _changed(other, jnp.inexact, lambda x: _scaled(x, -1.0)),
        "one NaN": _changed(example, jnp.inexact, _first_is_nan),
        "opposite": _changed(example, jnp.bool_, np.logical_not),
    }
    for name, factor in (_FACTORS | {f"x 2^{x}": 2.0**x for x in _POWERS}).items():
        found[name] = _changed(example, jnp.inexact, lambda x, by=factor: _scaled(x, by))
    for value in (np.nan, np.inf, -np.inf):
        found[f"{value}"] = _changed(example, jnp.inexact, lambda x, to=value: np.full_like(x, to))
    for name in _LIMITS:
        found[f"floats: {name}"] = _changed(example, jnp.floating, _limit(jnp.finfo, name))
    for name in _LIMITS[:2]:
        found[f"integers: {name}"] = _changed(example, jnp.integer, _limit(jnp.iinfo, name))
    names: dict[bytes, str] = {}
    for name, made in found.items():
        names.setdefault(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(made)), name)
    return {name: found[name] for name in names.values()}


def _changed(example: Example, kind: Any, change: Callable[[np.ndarray], Any]) -> Example:
    """The example with all leaves of one kind of dtype changed."""
    return jax.tree.map(lambda x: change(x) if jnp.issubdtype(x.dtype, kind) else x, example)


def _limit(limits: Callable[[Any], Any], name: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.full_like(x, getattr(limits(x.dtype), name))


def _scaled(x: np.ndarray, factor: float) -> np.ndarray:
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    with np.errstate(all="ignore"):
        return np.asarray(x.astype(wide) * factor).astype(x.dtype)


def _first_is_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x).astype(x.dtype)
