"""Random keys through a program: wrapped, split, folded into, laid out anew."""

from collections.abc import Callable
from typing import TypeAlias

import jax.extend.core as jex_core
import numpy as np

from ..isolation import shape_of
from ..programs import named
from .terms import (
    SEEDS,
    UNKNOWN,
    Each,
    Key,
    Listed,
    Root,
    Span,
    Step,
    Term,
    differs,
    is_of_argument,
)
from .values import Public

Rule: TypeAlias = Callable[[jex_core.JaxprEqn, list[Public]], Public]
"""From an equation and its operands to what is known of its result."""


def laid_out(
    equation: jex_core.JaxprEqn, key: Key, before: tuple[int, ...], after: tuple[int, ...]
) -> Term | None:
    """Keys whose dimensions of length one come and go, or that are repeated along new ones."""
    words = int(key.is_words)
    name = equation.primitive.name
    if name == "broadcast_in_dim":
        at = {dim: i for i, dim in enumerate(equation.params["broadcast_dimensions"])}
        along = tuple(
            key.along[at[dim]]
            if dim in at and at[dim] < len(key.along) and before[at[dim]] == after[dim]
            else ()
            for dim in range(len(after) - words)
        )
        return key._replace(along=along)
    kept = [along for along, length in zip(key.along, before, strict=False) if length != 1]
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    left = iter(kept)
    along = tuple(() if length == 1 else next(left) for length in after[: len(after) - words])
    return key._replace(along=along)


def _wrapped(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    rank = len(shape_of(equation.outvars[0]))
    match inputs[0].term:
        case Key() as key:
            return Public(key._replace(is_words=False))
        case Root() as root if is_of_argument(root):
            return Public(of_root(root, shape_of(equation.outvars[0])))
        case Each(loop, Root() as root) if is_of_argument(root):
            inner = of_root(root, shape_of(equation.outvars[0]))
            step = Each(loop, Root(("rows", root.name), root.varies))
            along = tuple(tuple(i + 1 for i in dims) for dims in inner.along)
            return Public(Key(root, (step, *inner.path), along))
        case Listed(values) if rank == 0:
            return Public(Key(Root(("constant", np.asarray(values, np.uint32).tobytes()))))
        case _:
            return Public(Key(UNKNOWN, (), ((),) * rank))


def _unwrapped(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    term = inputs[0].term
    return Public(term._replace(is_words=True) if isinstance(term, Key) else None)


def _folded(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    key, data = inputs[0].term, inputs[1].term
    shape = shape_of(equation.outvars[0])
    if not isinstance(key, Key) or isinstance(data, Key):
        return Public(Key(UNKNOWN, (), ((),) * len(shape)))
    step: Step = UNKNOWN if data is None else data
    along = key.along if len(key.along) == len(shape) else ((),) * len(shape)
    of_data = shape_of(equation.invars[1])
    if of_data:
        if of_data != shape or len(shape) != 1:
            step = UNKNOWN
        along = tuple((*dims, len(key.path)) for dims in along)
    return Public(Key(key.root, (*key.path, step), along))


def _split(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    key, lengths = inputs[0].term, equation.params["shape"]
    if not isinstance(key, Key):
        return Public(Key(UNKNOWN, (), ((),) * len(shape_of(equation.outvars[0]))))
    steps = tuple(Span(0, length) for length in lengths)
    along = tuple((len(key.path) + i,) for i in range(len(lengths)))
    return Public(Key(key.root, (*key.path, *steps), (*key.along, *along)))


def _seeded(equation: jex_core.JaxprEqn, inputs: list[Public]) -> Public:
    seed = inputs[0].term
    step = UNKNOWN if seed is None or isinstance(seed, Key) else seed
    return Public(Key(SEEDS, (step,)))


def of_root(root: Root, shape: tuple[int, ...]) -> Key:
    """An array of keys of which nothing is known but that it is itself, and holds no key twice."""
    path = tuple(Span(0, length) for length in shape)
    return Key(root, path, tuple((dim,) for dim in range(len(shape))))


def all_differ(key: Key, lengths: tuple[int, ...]) -> bool:
    """Whether an array of keys holds no key twice."""
    return len(key.along) == len(lengths) and all(
        any(differs(key.path[at], length) for at in dims)
        for dims, length in zip(key.along, lengths, strict=True)
    )


RULES: dict[str, Rule] = {
    name: rule
    for rule, names in (
        (_wrapped, named("random_wrap")),
        (_unwrapped, named("random_unwrap")),
        (_folded, named("random_fold_in")),
        (_split, named("random_split")),
        (_seeded, named("random_seed")),
    )
    for name in names
}
"""What is known of the keys that a primitive makes, by its name."""
