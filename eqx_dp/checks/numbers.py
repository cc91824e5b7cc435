"""Follows counting integers and random keys through the equations of a program."""

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..programs import UNCHANGED, named
from .facts import Fact, evaluated, key_bytes, value_of
from .flow import dtype_of, shape_of
from .keys import FIRST, Along, Key, Number

_MOVES = UNCHANGED | named("broadcast_in_dim reshape squeeze slice convert_element_type")


def counted(equation: JaxprEqn, inputs: list[Fact]) -> Number | None:
    """What an integer result counts; None for other dtypes and unknown rules."""
    dtype, name = dtype_of(equation.outvars[0]), equation.primitive.name
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize < 4:
        return None
    if name == "iota":
        shape = equation.params["shape"]
        return Number(None, 0, (Along(FIRST, 1, shape[0]),)) if len(shape) == 1 else None
    match name, [fact.number for fact in inputs]:
        case "add", [Number() as a, Number() as b] if a.is_constant or b.is_constant:
            return a.plus(b.offset) if b.is_constant else b.plus(a.offset)
        case _, [Number() as a, *_] if name in _MOVES:
            key = _moved(equation, inputs, Key(None, (a,)))
            return None if key is None else key.path[0]
        case _:
            return None


def key_of(equation: JaxprEqn, inputs: list[Fact]) -> Key | None:
    """The key in a result; None if it is no key, or follows from keys in an unknown way."""
    name, first = equation.primitive.name, inputs[0] if inputs else Fact()
    match name:
        case "random_seed" | "random_wrap":
            return _from_words(equation, first)
        case "random_unwrap":
            return first.key and first.key._replace(is_words=True)
        case "random_fold_in":
            return first.key and first.key.folded(inputs[1].number)
        case "random_split":
            shape = equation.params["shape"]
            is_plain = len(shape) == 1 and not shape_of(equation.invars[0])
            along = (Along(FIRST, 1, shape[0]),) if is_plain and shape[0] > 1 else ()
            return first.key and first.key.folded(Number(None, 0, along) if is_plain else None)
        case "unstack" if first.key is not None:  # along the first dimension; see `entry`
            is_first = len(shape_of(equation.invars[0])) > first.key.is_words
            return first.key if is_first and equation.params["axis"] == 0 else None
        case _ if first.key is not None and name in _MOVES:
            return _moved(equation, inputs, first.key)
        case _:
            return None


def _from_words(equation: JaxprEqn, words: Fact) -> Key | None:
    """A key from its words or from a seed; constants of one value are one root."""
    if words.key is not None:
        return words.key._replace(is_words=False)
    made = value_of(Fact(constant=evaluated(equation, [words])))
    is_one = made is not None and not np.shape(made)
    return Key(("constant", key_bytes(made)) if is_one else None)


def _moved(equation: JaxprEqn, inputs: list[Fact], key: Key) -> Key | None:
    """The key after a move of the whole, or a cut along the first dimension; otherwise None."""
    name, params = equation.primitive.name, equation.params
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    dims = params["broadcast_dimensions"] if name == "broadcast_in_dim" else ()
    if key.is_words and (after[-1:] != before[-1:] or (dims and dims[-1] != len(after) - 1)):
        return None
    if key.is_one:
        return key
    if name == "slice":
        step = (params["strides"] or (1,))[0]
        return key.each(lambda one: one.cut(params["start_indices"][0], step, after[0]))
    is_whole = name in UNCHANGED or name == "convert_element_type"
    is_whole |= name == "squeeze" and 0 not in params["dimensions"]
    return key if is_whole else None


def entry(key: Key, index: int) -> Key:
    """One of several keys or numbers along the first dimension."""
    return key.each(lambda one: one.cut(index, 1, 1))
