"""Whether a step returns its optimizer's state as wide as a policy declares it."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..precision import Policy
from .precision_report import Violation


def narrow_states(results: PyTree[jax.ShapeDtypeStruct], policy: Policy) -> list[Violation]:
    """A row for each dtype in which state of optax's transformations is narrower than declared.

    State is known by its type, which is one of optax's. Of it, arrays of floats with one axis or
    more count: numbers by themselves (learning rates that are state) are no moments.
    """
    declared = policy.optimizer_dtype
    found: defaultdict[Any, list[str]] = defaultdict(list)
    for path, node in jax.tree_util.tree_leaves_with_path(results, is_leaf=_is_state):
        for below, leaf in jax.tree_util.tree_leaves_with_path(node) if _is_state(node) else ():
            if leaf.shape and jnp.issubdtype(leaf.dtype, jnp.floating):
                found[leaf.dtype].append(jax.tree_util.keystr((*path, *below)))
    return [
        Violation("optimizer state", str(declared), str(dtype), _where(paths))
        for dtype, paths in found.items()
        if jnp.promote_types(dtype, declared) != dtype
    ]


def _is_state(node: Any) -> bool:
    is_named_tuple = isinstance(node, tuple) and hasattr(node, "_fields")
    return is_named_tuple and type(node).__module__.split(".")[0] == "optax"


def _where(paths: list[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"the result{paths[0]}{more}"
