"""Which arguments of a call hold the data, and the same call on other data."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from ..paths import below
from ..shown import shown
from ..trees import PyTree, is_key
from .hostile import Example

Place: TypeAlias = int | str
"""Where an argument stands: its position, or its name."""

MASK = "is_padding_example"


class Arguments(NamedTuple):
    """A call whose data can be exchanged.

    Attributes:
        args: by position.
        kwargs: by name.
        private: where the data stand: trees of arrays with examples in front.
        padding: where the mask of the padding slots stands; None if the function takes none.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    private: tuple[Place, ...]
    padding: Place | None

    def at(self, place: Place) -> Any:
        """An argument."""
        return self.args[place] if isinstance(place, int) else self.kwargs[place]

    @property
    def examples(self) -> list[Example]:
        """The examples one by one, on the host."""
        batch = [jax.tree.map(np.asarray, self.at(place)) for place in self.private]
        size = len(jax.tree.leaves(batch)[0])
        return [jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i]), batch) for i in range(size)]

    @property
    def mask(self) -> Bool[np.ndarray, " slots"] | None:
        """True where a slot holds no real example; None without a mask."""
        return None if self.padding is None else np.asarray(self.at(self.padding))

    def on(
        self, examples: Sequence[Example], mask: Bool[np.ndarray, " slots"] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call on other data, each array placed as the one that it replaces."""
        batch = jax.tree.map(lambda *rows: np.stack(rows), *examples)
        changed: dict[Place, Any] = dict(zip(self.private, batch, strict=True))
        if self.padding is not None:
            changed[self.padding] = mask
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, value in changed.items():
            value = jax.tree.map(_placed, value, self.at(place))
            if isinstance(place, int):
                args[place] = value
            else:
                kwargs[place] = value
        return tuple(args), kwargs


def _placed(value: np.ndarray, like: Any) -> jax.Array:
    """An array on the devices of another one, if that was put somewhere and fits."""
    if isinstance(like, jax.Array) and like.committed and like.shape == value.shape:
        return jax.device_put(value, like.sharding)
    return jnp.asarray(value)


def arguments_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    private: Sequence[Place],
    padding: Place | None,
) -> Arguments:
    """The arguments of a call, arrays of numpy's turned into JAX's.

    Raises:
        ValueError: a place is none of an argument; the data hold something else than arrays of
            numbers, fewer than two examples, or leaves of different lengths; the mask is no boolean
            vector of that length, or leaves no real example.
    """
    args, named = jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf,
        (args, dict(kwargs)),
    )
    found = Arguments(args, named, tuple(_found(fn, args, named, place) for place in private), None)
    size = _checked_length(found)
    if padding is None:
        return found
    place = _found(fn, args, named, padding)
    found = found._replace(padding=place)
    given = found.at(place)
    if not eqx.is_array(given) or given.dtype != jnp.bool_ or given.shape != (size,):
        raise ValueError(
            f"padding names the argument {padding!r}, which must be boolean with shape ({size},), "
            f"True where a slot holds no real example; found {shown(given)}."
        )
    if given.all():
        raise ValueError("all slots are padding: give at least one real example to exchange.")
    return found


def _found(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], place: object
) -> Place:
    """Where an argument was given: a name may stand for one that was given by position."""
    if isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(args):
        return place
    if isinstance(place, str):
        if place in kwargs:
            return place
        names = list(inspect.signature(fn).parameters)
        if place in names[: len(args)]:
            return names.index(place)
    raise ValueError(
        f"private and padding name arguments of the call: positions from 0 to {len(args) - 1}"
        f"{''.join(f', {name!r}' for name in kwargs)}; found {shown(place)}."
    )


def _checked_length(found: Arguments) -> int:
    """How many examples the data hold."""
    lengths: dict[str, int] = {}
    for place in found.private:
        for path, leaf in jax.tree_util.tree_leaves_with_path(found.at(place)):
            where = below(f"argument {place!r}", path)
            if not eqx.is_array(leaf) or leaf.ndim == 0 or is_key(leaf):
                raise ValueError(
                    f"{where} is named as private and must be an array of numbers with examples "
                    f"along its leading axis; found {shown(leaf)}."
                )
            lengths[where] = leaf.shape[0]
    if not lengths:
        raise ValueError(
            "no argument holds the data: name the arguments with examples along their leading axis "
            "by private=(2, 3), positions or names."
        )
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{where} has {length}" for where, length in lengths.items())
        raise ValueError(f"all data must have the same number of examples: {told}.")
    size = next(iter(lengths.values()))
    if size < 2:
        raise ValueError(f"give at least two examples, so that one has others; found {size}.")
    return size


def next_call(
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    result: PyTree[Any],
    comes_back: Sequence[Sequence[int]],
    times: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the next call: results that come back, and fresh keys for the others.

    For each array of the result `comes_back` says which arrays of the arguments it becomes. How
    many calls there were is folded into keys that do not come back.
    """
    arrays, rest = eqx.partition(arguments, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    back = jax.tree.leaves(eqx.filter(result, eqx.is_array))
    fed = {at: leaf for leaf, places in zip(back, comes_back, strict=True) for at in places}
    for index, leaf in enumerate(leaves):
        if index in fed:
            leaves[index] = fed[index]
        elif is_key(leaf):
            leaves[index] = jax.random.fold_in(leaf, times)
    return eqx.combine(structure.unflatten(leaves), rest)
