"""Which results of a step come back as its arguments: the state that it carries along."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import equinox as eqx
from jax.tree_util import tree_leaves_with_path

from ..trees import PyTree, is_array_or_shape

_Kind: TypeAlias = tuple[tuple[int, ...], Any]  # shape and dtype


def next_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], results: PyTree[Any]
) -> list[list[int]]:
    """For each array that a step returns, the arguments that it may be in the next call.

    What a caller does with results is in no program, so places decide, of equal shapes and dtypes:

    | a step | the result `state` comes back as |
    |---|---|
    | `step(model, state, *batch) -> (model, state)` | the argument at the same place |
    | `step(state, *batch) -> state` | an argument that has its arrays at the same paths |
    | `step(state, *batch) -> (loss, state)` | the same, if nothing fits at its own place |

    Returns:
        A list for each array among the results, of numbers of arrays among the arguments.
    """
    at_place: dict[Any, list[int]] = {}
    at_path: defaultdict[Any, list[int]] = defaultdict(list)
    for i, (path, kind) in enumerate(_arrays((tuple(args), dict(kwargs)))):
        at_place[path[1:], kind] = [i]
        at_path[path[2:], kind].append(i)
    return [
        at_place.get((path, kind)) or [*at_path[path, kind], *at_path[path[1:], kind]]
        for path, kind in _arrays(results)
    ]


def _arrays(tree: PyTree[Any]) -> list[tuple[tuple[Any, ...], _Kind]]:
    """Arrays and what stands for them, as `eqx.filter_make_jaxpr` takes them, with their paths."""
    arrays = eqx.filter(tree, is_array_or_shape)
    return [(path, (tuple(leaf.shape), leaf.dtype)) for path, leaf in tree_leaves_with_path(arrays)]
