"""Which examples a value of a batched program depends on, and where they stand in it."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.extend.core as jex_core


@dataclass(frozen=True)
class Shared:
    """The value depends on no example: parameters, constants, and what follows from them."""


@dataclass(frozen=True)
class Apart:
    """The value holds all examples along one dimension, and each entry depends on one of them.

    Entry `i` of dimension `dim` belongs to example `i // inner % num_examples`: a convolution
    folds examples and features into one dimension.
    """

    dim: int
    inner: int = 1


@dataclass(frozen=True)
class Single:
    """The value depends on one example alone.

    Attributes:
        loop: the loop over examples in which it is the one at hand; None if the batch has but one.
    """

    loop: jex_core.JaxprEqn | None = None


@dataclass(frozen=True)
class Mixed:
    """The value may depend on several examples.

    Attributes:
        equation: where they met.
        is_wanted: whether the engine itself added them up, as the last thing that it does.
        line: the user's line that it stands in, or that it is called from; "" if there is none.
    """

    equation: jex_core.JaxprEqn
    is_wanted: bool = False
    line: str = ""


Dependence: TypeAlias = Shared | Apart | Single | Mixed

SHARED = Shared()


def joined(facts: list[Dependence], equation: jex_core.JaxprEqn) -> Dependence:
    """That of a value that may be any of several, or depends on all of them entry by entry."""
    mixed = mixed_among(facts)
    if mixed is not None:
        return mixed
    found = {fact for fact in facts if fact != SHARED}
    if len(found) > 1:
        return Mixed(equation)
    return next(iter(found), SHARED)


def mixed_among(facts: list[Dependence]) -> Mixed | None:
    """The mixed one of several; one that the engine did not want comes first."""
    found = [fact for fact in facts if isinstance(fact, Mixed)]
    return min(found, key=lambda fact: fact.is_wanted, default=None)


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of what a variable or a literal holds; of what is no array, ()."""
    return tuple(getattr(variable.aval, "shape", ()))


def size_of(variable: Any) -> int:
    """How many entries it has."""
    return math.prod(shape_of(variable))


def dtype_of(variable: Any) -> Any:
    """Their dtype; None of what is no array."""
    return getattr(variable.aval, "dtype", None)
