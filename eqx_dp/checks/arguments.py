"""A step's arguments: which ones hold private data, which is the mask, which are results again."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, tree_leaves_with_path

from ..paths import dotted
from ..privacy import GaussianPrivatizerState, NoiseStream
from ..shown import shown
from ..trees import PyTree, is_array_or_shape


class Argument(NamedTuple):
    """An array among a step's arguments.

    Attributes:
        names: its dotted paths: by position, and by name.
        stream: if it is part of a stream of noise: the number of the stream, and of the part.
        leaf: the array, or what stands for it.
    """

    names: tuple[str, ...]
    stream: tuple[int, int] | None
    leaf: Any


def arguments_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Argument]:
    """All arrays, in the order in which the traced program takes them."""
    parameters = _parameters(fn)
    found = list[Argument]()
    streams = _streams((tuple(args), dict(kwargs)))
    for path, leaf in arrays_in((tuple(args), dict(kwargs))):
        names, stream = _names(path, parameters), streams.get(path)
        found.append(Argument(names, stream, leaf))
    return found


def _parameters(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def _names(path: tuple[Any, ...], parameters: Sequence[str]) -> tuple[str, ...]:
    """Dotted paths, by position and by name, or by name alone."""
    where, at, *rest = path
    heads: list[str] = [str(at.key)] if isinstance(at, DictKey) else [str(at.idx)]
    if where.idx == 0 and at.idx < len(parameters):
        heads.append(parameters[int(at.idx)])
    tail = dotted(tuple(rest))
    return tuple(f"{head}.{tail}" if tail else head for head in heads)


def _streams(tree: PyTree[Any]) -> dict[tuple[Any, ...], tuple[int, int]]:
    """For each array of a stream's state its number, by path: streams say by type what they are."""
    kinds = (GaussianPrivatizerState, NoiseStream)
    nodes = tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kinds))
    states = [(path, node) for path, node in nodes if isinstance(node, kinds)]
    return {
        (*path, *below): (number, part)
        for number, (path, node) in enumerate(states)
        for part, (below, _) in enumerate(tree_leaves_with_path(node))
    }


def under(arguments: Sequence[Argument], entries: object, what: str) -> list[bool]:
    """For each array whether positions, names or dotted paths name it.

    Raises:
        ValueError: a name fits no argument.
    """
    is_one = isinstance(entries, int | str) or not isinstance(entries, Iterable)
    named: list[Any] = [entries] if is_one else [*cast("Iterable[Any]", entries)]
    for entry in named:
        is_name = isinstance(entry, int | str) and not isinstance(entry, bool)
        if not is_name or not any(_is_under(argument.names, str(entry)) for argument in arguments):
            known = ", ".join(dict.fromkeys(a.names[-1].split(".")[0] for a in arguments))
            raise ValueError(
                f"{what} must name arguments of the step that hold arrays ({known}) by positions, "
                "names, or dotted paths that begin with one of them; found "
                f"{what}={shown(entry)}."
            )
    return [any(_is_under(one.names, str(entry)) for entry in named) for one in arguments]


def _is_under(names: Sequence[str], entry: str) -> bool:
    return any(f"{name}.".startswith(f"{entry}.") for name in names)


def masks_among(arguments: Sequence[Argument], is_private: Sequence[bool]) -> set[int]:
    """The masks: what is called `is_padding_example`, or else the only boolean vector of a batch.

    Arrays of one length are one batch. Of stacks of batches, the mask has two dimensions.
    """
    found, bools = set[int](), defaultdict[int, list[int]](list)
    for i, one in enumerate(arguments):
        if is_private[i] and one.leaf.shape and one.leaf.dtype == np.bool_:
            bools[one.leaf.shape[0]].append(i)
    for own in bools.values():
        least = min(arguments[i].leaf.ndim for i in own)
        vectors = [i for i in own if arguments[i].leaf.ndim == least]
        called = [i for i in own if arguments[i].names[-1].split(".")[-1] == "is_padding_example"]
        found.update(called or (vectors if len(vectors) == 1 else []))
    return found


def statics_among(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], entries: Iterable[Any]
) -> list[str]:
    """What is no array in private arguments, and is no argument of the program.

    Numbers and texts are not, and a node of a tree that is no tuple, list or dict may hold some.
    """
    parameters, found = _parameters(fn), list[str]()
    nodes = tree_leaves_with_path((tuple(args), dict(kwargs)), is_leaf=_is_other)
    for path, node in nodes:
        names = _names(path, parameters)
        is_around = any(_is_under([str(entry)], name) for entry in entries for name in names)
        is_within = any(_is_under(names, str(entry)) for entry in entries)
        if (is_around or is_within) and not is_array_or_shape(node):
            found.append(names[-1])
    return found


def _is_other(node: Any) -> bool:
    """Whether a node of a tree is none of the plain ones."""
    is_plain = node is None or isinstance(node, tuple | list | dict)
    return not is_plain and not jax.tree_util.all_leaves([node])


# Results that are arguments of the next call: the state that a step carries.


def coming_back(
    args: Sequence[Any], kwargs: Mapping[str, Any], results: PyTree[Any]
) -> list[int | None]:
    """For each array that a step returns, the argument that it is in the next call.

    What a caller does with results is in no program, so places decide, of equal shapes and dtypes
    (floats of any width). No two results are one argument:

    | a step | the result `state` comes back as |
    |---|---|
    | `step(model, state, *batch) -> (model, state)` | the argument at the same place |
    | `step(state, *batch) -> state` | the argument that has its arrays at the same paths |
    | `step(state, *batch) -> (loss, state)` | the same, if nothing fits at its own place |
    """
    before = [(path[1:], _kind(leaf)) for path, leaf in arrays_in((tuple(args), dict(kwargs)))]
    after = [(path, _kind(leaf)) for path, leaf in arrays_in(results)]
    found: list[int | None] = [None] * len(after)
    for i, j in ((0, 0), (1, 0), (1, 1)):  # how many entries of the paths are left out
        arguments = [(path[i:], kind) for path, kind in before]
        returned = [(path[j:], kind) for path, kind in after]
        places = {one: place for place, one in enumerate(arguments)}
        counts, times = Counter(arguments), Counter(returned)
        for at, one in enumerate(returned):
            is_only = counts[one] == times[one] == 1
            if found[at] is None and is_only and places[one] not in found:
                found[at] = places[one]
    return found


def arrays_in(tree: PyTree[Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Arrays and what stands for them, as `eqx.filter_make_jaxpr` takes them, with their paths."""
    return tree_leaves_with_path(eqx.filter(tree, is_array_or_shape))


def _kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype; True for floats of any width."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return tuple(leaf.shape), True
    return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
