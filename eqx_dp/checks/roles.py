"""Masks and indices: what is still the argument as it came."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..programs import UNCHANGED
from .facts import Fact, Place, Row
from .variables import dtype_of, shape_of

Role: TypeAlias = tuple[Any, ...]
"""A token of a value; one of these, or () for none:

| token | the value |
|---|---|
| `("mask",)` | is True wherever the step's mask argument is |
| `("index", name)` | is the integer argument `name` |
| `("lt", role, number)`, `("add", ...)`, `("select_n", ...)` | follows from it by this primitive |
| `("total", loop)` | is what a loop carries, and each turn does nothing but add to it |
"""

MASK: Role = ("mask",)
_SHAPED = UNCHANGED | {"broadcast_in_dim", "reshape", "squeeze", "transpose", "slice"}
_NORMALIZING = ("lt", "add", "select_n")  # indices that may be negative


def role_of(equation: JaxprEqn, inputs: Sequence[Fact]) -> Role:
    """The role of a result."""
    name, dtype = equation.primitive.name, dtype_of(equation.outvars[0])
    if dtype == np.bool_ and _is_mask(name, inputs):
        return MASK
    roles = [role if is_index(role := fact.token) else fact.value for fact in inputs]
    if not any(map(is_index, roles)):
        return ()
    if name in _NORMALIZING:
        return () if None in roles else (name, *roles)
    is_same = name in _SHAPED or (name == "convert_element_type" and dtype in _WIDE)
    return roles[0] if is_same else ()


_WIDE = (jnp.int32, jnp.int64)


def is_index(token: Any) -> bool:
    """Whether a token is that of an index, or of what follows from one."""
    return isinstance(token, tuple) and token[:1] in [(kind,) for kind in ("index", *_NORMALIZING)]


def _is_mask(name: str, inputs: Sequence[Fact]) -> bool:
    """Whether a boolean value is True wherever the mask is."""
    is_so = [fact.token == MASK or fact.value is True for fact in inputs]
    if name in ("or", "select_n"):
        return any(is_so) if name == "or" else all(is_so[1:])
    # Of a matrix of features, a column is no mask.
    return all(is_so) and name in {*_SHAPED, "and", "convert_element_type"} - {"slice"}


def gathered(equation: JaxprEqn, inputs: Sequence[Fact]) -> tuple[Place, ...] | None:
    """What entries depend on that are looked up in private rows by an argument that came so.

    A row then belongs to the example of its index. There are other numbers of indices than of rows:
    otherwise entry i of the indices would belong to row i.
    """
    values, index = inputs[0], inputs[1]
    numbers, shape = equation.params["dimension_numbers"], shape_of(equation.outvars[0])
    rows = (*shape_of(equation.invars[0]), 0)[0]
    is_row = tuple(numbers.start_index_map) == (0,) and equation.params["slice_sizes"][0] == 1
    role: Role = index.token or ()
    plain: Any = role[2] if role[:1] == ("select_n",) else role
    wrapped = "select_n", ("lt", plain, 0), plain, ("add", plain, rows)
    is_known = plain[:1] == ("index",) and role in (plain, wrapped)
    is_whole = values.places[:1] == (Row(rows, 0),)
    its_own = {place._replace(part=()) for place in index.places if isinstance(place, Row)}
    is_other = len(its_own) == 1 and rows not in {place.length for place in its_own}
    if not (is_row and is_known and is_whole and is_other) or numbers.operand_batching_dims:
        return None
    found: list[Place] = [None] * len(shape)
    for dim, to in enumerate(d for d in range(len(shape)) if d not in numbers.offset_dims):
        place = dict(enumerate(index.places)).get(dim)
        found[to] = place._replace(chosen_by=plain[1]) if isinstance(place, Row) else None
    return tuple(found)
