"""Masks and indices: what is still the argument as it came."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..programs import UNCHANGED
from .facts import Fact, Place, Row
from .flow import dtype_of, shape_of

Role: TypeAlias = tuple[Any, ...]
"""A token of a value; one of these, or () for none:

| token | the value |
|---|---|
| `("mask",)` | is True wherever the step's mask argument is |
| `("index", name)` | is the integer argument `name` |
| `("negative", name)` | says where it is negative |
| `("behind", name, n)` | is it plus n |
| `("wrapped", name, n)` | is it, plus n where it is negative |
| `("total", loop, i)` | is the i-th value that a loop carries, at the beginning of a turn |
| `("added", loop, i)` | is that plus clipped sums of the turn |
"""

MASK: Role = ("mask",)
_SHAPED = UNCHANGED | {"broadcast_in_dim", "reshape", "squeeze", "transpose", "slice"}


def role_of(equation: JaxprEqn, inputs: Sequence[Fact]) -> Role:
    """The role of a result."""
    name = equation.primitive.name
    if dtype_of(equation.outvars[0]) == np.bool_ and (found := _mask(name, inputs)):
        return found
    first: Role = (inputs[0].token if inputs else None) or ()
    by = inputs[1].value if len(inputs) > 1 else None
    match name, first:
        case "lt", ("index", who) if by == 0:
            return "negative", who
        case "add", ("index", who) if isinstance(by, int):
            return "behind", who, by
        case "select_n", ("negative", who):
            plain, (kind, *behind) = inputs[1].token, inputs[2].token or ("",)
            is_so = plain == ("index", who) and kind == "behind" and behind[0] == who
            return ("wrapped", *behind) if is_so else ()
        case "convert_element_type", ("index" | "wrapped" | "behind", *_):
            is_wide = equation.params["new_dtype"] in (jnp.int32, jnp.int64)
            return first if is_wide else ()
        case _, ("index" | "wrapped" | "behind" | "negative", *_) if name in _SHAPED:
            return first
        case _:
            return ()


def _mask(name: str, inputs: Sequence[Fact]) -> Role:
    """Whether a boolean value is True wherever the mask is."""
    is_so = [fact.token == MASK or fact.value is True for fact in inputs]
    if name == "or":
        return MASK if any(is_so) else ()
    if name == "and" or name in _SHAPED or name == "convert_element_type":
        return MASK if all(is_so) else ()
    if name == "select_n":
        return MASK if all(is_so[1:]) else ()
    return ()


def gathered(equation: JaxprEqn, inputs: Sequence[Fact]) -> tuple[Place, ...] | None:
    """What entries depend on that are looked up in private rows by an argument that came so.

    A row then belongs to the example of its index. There are other numbers of indices than of rows:
    otherwise entry i of the indices would belong to row i.
    """
    values, index = inputs[0], inputs[1]
    numbers, shape = equation.params["dimension_numbers"], shape_of(equation.outvars[0])
    rows = (*shape_of(equation.invars[0]), 0)[0]
    is_row = tuple(numbers.start_index_map) == (0,) and equation.params["slice_sizes"][0] == 1
    role: Role = (*(index.token or ()), "", "", 0)
    kind, name, behind = role[:3]
    is_known = kind == "index" or (kind == "wrapped" and behind == rows)
    is_whole = values.places[:1] == (Row(rows, 0),)
    its_own = [place for place in index.places if isinstance(place, Row)]
    is_other = all(place.length != rows for place in its_own)
    if not (is_row and is_known and is_whole and is_other) or numbers.operand_batching_dims:
        return None
    found: list[Place] = [None] * len(shape)
    for dim, to in enumerate(d for d in range(len(shape)) if d not in numbers.offset_dims):
        place = dict(enumerate(index.places)).get(dim)
        found[to] = place._replace(chosen_by=name) if isinstance(place, Row) else None
    return tuple(found)
