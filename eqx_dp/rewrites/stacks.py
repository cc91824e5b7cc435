"""Arrays side by side, so that one kernel computes what each would have a kernel for.

Compilers write each kernel anew, however equal its code is to another's.
"""

import math
from collections.abc import Hashable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from .once import not_repeated


def together(kinds: Sequence[Hashable], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Which arrays go side by side: those of one kind, by their places, in order.

    Args:
        kinds: of each array.
        sizes: how many entries each has.
        most: how many entries are together at most; an array with more is alone.
    """
    groups, latest = list[list[int]](), dict[Hashable, list[int]]()
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if kind not in latest or (len(latest[kind]) + 1) * size > most:
            latest[kind] = []
            groups.append(latest[kind])
        latest[kind].append(i)
    return groups


def side_by_side(arrays: Sequence[Shaped[Array, "..."]]) -> Shaped[Array, "..."]:
    """Joins arrays, once: XLA would repeat the code of a cipher for each in every kernel.

    Arrays of one shape are stacked, which keeps how they are spread over devices; others are
    flattened. One array stays as it is.
    """
    if not arrays[1:]:
        return arrays[0]
    if len({x.shape for x in arrays}) == 1:
        return not_repeated(jnp.stack(arrays))
    return not_repeated(jnp.concatenate([*map(jnp.ravel, arrays)]))


def apart(x: Shaped[Array, "..."], shapes: list[tuple[int, ...]]) -> list[Shaped[Array, "..."]]:
    """What `side_by_side` joined."""
    if len({*shapes}) == 1:
        return [*x] if shapes[1:] else [x]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    return [part.reshape(shape) for part, shape in zip(jnp.split(x, ends), shapes, strict=True)]
