"""What a step may disclose of its batch, for those who ask for it by name. None of it is private.

A disclosed value is a release that no plan accounts for: epsilon does not cover it. It is for data
that is public, or for runs whose figures nobody outside will see.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..expected import entries
from ..gradients import PerExample

Disclosed: TypeAlias = Literal["loss", "grad_norm", "num_examples"]
"""What a step may disclose of its batch."""

Mask = Bool[Array | np.ndarray, " batch"]


def _mean(values: Float[Array, " batch"], mask: Mask) -> Float[Array, ""]:
    """Over real examples; 0 where there are none."""
    total = jnp.sum(jnp.where(mask, 0, values), dtype=jnp.float32)
    return total / jnp.maximum(1, _count(mask))


def _count(mask: Mask) -> Float[Array, ""]:
    return jnp.sum(jnp.logical_not(mask), dtype=jnp.float32)


_BY_NAME: dict[str, Callable[[PerExample, Mask], Float[Array, ""]]] = {
    "loss": lambda values, mask: _mean(values.loss, mask),
    "grad_norm": lambda values, mask: _mean(
        functools.reduce(jnp.hypot, jax.tree.leaves(values.grad_norm)), mask
    ),
    "num_examples": lambda values, mask: _count(mask),
}


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of what is to be disclosed; a ValueError if one is unknown, or there twice."""
    found: tuple[Any, ...] = (
        (names,) if isinstance(names, str) else entries("disclose", names, "names")
    )
    unknown = [name for name in found if name not in _BY_NAME]
    if unknown or len(set(found)) < len(found) or isinstance(names, str):
        shown = [x if isinstance(x, str) else type(x).__name__ for x in found]
        raise ValueError(
            f"disclose must be a tuple of different names out of {', '.join(map(repr, _BY_NAME))}; "
            f"found {shown}."
        )
    return found


def disclosed(
    names: tuple[str, ...], values: PerExample | None, mask: Mask
) -> dict[str, Float[Array, ""]]:
    """What was asked for, from the values of single examples. **Not private.**

    | name | value, float32 |
    |---|---|
    | loss | mean over the batch's real examples, as they are (NaN stays NaN) |
    | grad_norm | mean norm of their gradients before clipping (over groups: of all) |
    | num_examples | how many there are |
    """
    if values is None:
        return {}
    return {name: _BY_NAME[name](values, mask) for name in names}
