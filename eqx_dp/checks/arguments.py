"""A step's arguments: which ones hold private data, and which ones are results again."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, SequenceKey, tree_leaves_with_path

from ..paths import dotted
from ..shown import shown
from ..trees import PyTree, is_array_or_shape


class Argument(NamedTuple):
    """An array among a step's arguments."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


def arguments_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Argument]:
    """All arrays, in the order in which the traced program takes them."""
    parameters = _parameters(fn)
    found: list[Argument] = []
    for (where, at, *rest), leaf in arrays_in((tuple(args), dict(kwargs))):
        assert isinstance(where, SequenceKey)
        heads = [str(at.key)] if isinstance(at, DictKey) else [str(at.idx)]
        if where.idx == 0 and at.idx < len(parameters):
            heads.append(parameters[at.idx])
        tail = dotted(tuple(rest))
        names = tuple(f"{head}.{tail}" if tail else head for head in heads)
        found.append(Argument(names, tuple(leaf.shape), leaf.dtype))
    return found


def _parameters(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def under(arguments: Sequence[Argument], entries: object, what: str) -> list[bool]:
    """For each array whether positions, names or dotted paths name it.

    Raises:
        ValueError: a name fits no argument.
    """
    is_one = isinstance(entries, int | str) or not isinstance(entries, Iterable)
    named: list[Any] = [entries] if is_one else [*cast("Iterable[Any]", entries)]
    for entry in named:
        is_name = isinstance(entry, int | str) and not isinstance(entry, bool)
        if not is_name or not any(_is_under(argument, str(entry)) for argument in arguments):
            known = ", ".join(dict.fromkeys(a.names[-1].split(".")[0] for a in arguments))
            raise ValueError(
                f"{what} names {shown(entry)}, under which the step has no array. Its arguments "
                f"with arrays are: {known}. Give positions, names, or dotted paths that begin with "
                "one of them."
            )
    return [any(_is_under(argument, str(entry)) for entry in named) for argument in arguments]


def _is_under(argument: Argument, entry: str) -> bool:
    return any(f"{name}.".startswith(f"{entry}.") for name in argument.names)


# Results that are arguments of the next call: the state that a step carries.

_Kind: TypeAlias = tuple[tuple[int, ...], Any]  # shape and dtype, or True for floats of any width


def next_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], results: PyTree[Any]
) -> list[list[int]]:
    """For each array that a step returns, the arguments that it may be in the next call.

    What a caller does with results is in no program, so places decide, of equal shapes and dtypes
    (floats of any width):

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
    for i, (path, leaf) in enumerate(arrays_in((tuple(args), dict(kwargs)))):
        at_place[path[1:], _kind(leaf)] = [i]
        at_path[path[2:], _kind(leaf)].append(i)
    return [
        at_place.get((path, kind)) or [*at_path[path, kind], *at_path[path[1:], kind]]
        for path, kind in ((path, _kind(leaf)) for path, leaf in arrays_in(results))
    ]


def arrays_in(tree: PyTree[Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Arrays and what stands for them, as `eqx.filter_make_jaxpr` takes them, with their paths."""
    return tree_leaves_with_path(eqx.filter(tree, is_array_or_shape))


def _kind(leaf: Any) -> _Kind:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return tuple(leaf.shape), True
    return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
