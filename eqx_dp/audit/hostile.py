"""Examples that break what is not careful: of every dtype the values at its edges."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..paths import dotted

Example: TypeAlias = PyTree[np.ndarray]
"""One example of a batch, its leaves without the axis of examples."""

_Change: TypeAlias = Callable[[np.ndarray], np.ndarray]

GIVEN = "as given"
ZEROS = "zeros"
HOSTILE_NEIGHBORS = ("x 1024", "NaN", "negated", ZEROS, "infinity")
"""What stands in the other slots, one after the other, where the other examples are hostile."""

_MOST_ARGUMENTS = 4


def _filled(value: float) -> _Change:
    return lambda x: np.full_like(x, value)


def _limit(name: str) -> _Change:
    return lambda x: np.full_like(x, getattr(jnp.finfo(x.dtype), name))


def _scaled(factor: float) -> _Change:
    def scale(x: np.ndarray) -> np.ndarray:
        wide = np.complex128 if np.iscomplexobj(x) else np.float64
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return np.asarray(x.astype(wide) * factor).astype(x.dtype)

    return scale


def _first_nan(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.reshape(-1)[:1] = np.nan
    return x


_OF_FLOATS: dict[str, _Change] = {
    "zero": _filled(0.0),
    "negated": _scaled(-1.0),
    "x 1024": _scaled(2.0**10),
    "x -1024": _scaled(-(2.0**10)),
    "x 2^40": _scaled(2.0**40),
    "x 2^-20": _scaled(2.0**-20),
    "x 2^-70": _scaled(2.0**-70),
    "largest": _limit("max"),
    "lowest": _limit("min"),
    "smallest normal": _limit("smallest_normal"),
    "smallest subnormal": _limit("smallest_subnormal"),
    "NaN": _filled(np.nan),
    "one NaN": _first_nan,
    "infinity": _filled(np.inf),
    "minus infinity": _filled(-np.inf),
}
_OF_INTEGERS: dict[str, _Change] = {
    "integers 0": lambda x: np.zeros_like(x),
    "integers 1": lambda x: np.ones_like(x),
    "integers largest": lambda x: np.full_like(x, jnp.iinfo(x.dtype).max),
    "integers lowest": lambda x: np.full_like(x, jnp.iinfo(x.dtype).min),
}
_OF_BOOLEANS: dict[str, _Change] = {
    "all true": lambda x: np.ones_like(x),
    "all false": lambda x: np.zeros_like(x),
    "not": lambda x: np.asarray(~x),
}
_OF_KIND = (
    (jnp.inexact, _OF_FLOATS),
    (jnp.integer, _OF_INTEGERS),
    (jnp.bool_, _OF_BOOLEANS),
)


def hostile_examples(example: Example, others: Sequence[Example]) -> dict[str, Example]:
    """What an example may be replaced by, by name; no two are the same.

    | kind of leaf | becomes |
    |---|---|
    | floating point | zero, NaN, one NaN, plus and minus infinity, the largest, lowest, smallest \
normal and smallest subnormal number of its dtype, itself by -1, 1024, -1024, 2^40, 2^-20, 2^-70 |
    | the same, of several | 1024 and -1024 times itself, one leaf at a time |
    | integer | 0, 1, the largest and the lowest of its dtype |
    | boolean | true, false, the opposite |
    | any | zeros; a copy of another example; a copy that is negated, and so cancels it |

    Leaves of other kinds stay as they are meanwhile.
    """
    found = {GIVEN: example, ZEROS: jax.tree.map(np.zeros_like, example)}
    for kind, changes in _OF_KIND:
        for name, change in changes.items():
            found[name] = _changed(example, kind, change)
    floats = [path for path, leaf in _leaves(example) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    for path in floats[:_MOST_ARGUMENTS] if len(floats) > 1 else ():
        for factor in (1024, -1024):
            found[f"x {factor} at {path}"] = _changed(
                example, jnp.inexact, _scaled(float(factor)), path
            )
    for other in others[:1]:
        found["copy of another"] = other
        found["negated copy of another"] = _changed(other, jnp.inexact, _scaled(-1.0))
    told_apart: dict[bytes, str] = {}
    for name, made in found.items():
        told_apart.setdefault(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(made)), name)
    return {name: found[name] for name in told_apart.values()}


def _leaves(example: Example) -> list[tuple[str, np.ndarray]]:
    return [(dotted(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(example)]


def _changed(example: Example, kind: Any, change: _Change, at: str | None = None) -> Example:
    """The example with every leaf of a kind of dtype changed, or only the one at a path."""

    def of_leaf(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        is_meant = jnp.issubdtype(leaf.dtype, kind) and at in (None, dotted(path))
        return change(leaf) if is_meant else leaf

    return jax.tree_util.tree_map_with_path(of_leaf, example)
