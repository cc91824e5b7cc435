"""A compiled step with little overhead for each call, which does not wait for the result."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
from jax.core import Tracer

from ..expected import expect
from ..trees import is_array_or_shape
from .state import OptState, TrainState

Tree = TypeVar("Tree")
Model = TypeVar("Model")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Rest:
    """A tree without its arrays: `others` has None in their place."""

    structure: Any
    others: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Flat(Generic[Tree]):
    """A flattened tree.

    Flattening and unflattening modules in Python takes longer than a call of a compiled function.
    """

    rest: Rest
    arrays: list[Any]

    @property
    def tree(self) -> Tree:
        """The tree."""
        arrays = iter(self.arrays)
        leaves = [next(arrays) if other is None else other for other in self.rest.others]
        return self.rest.structure.unflatten(leaves)


def flat(tree: Tree) -> Flat[Tree]:
    """Flattens a tree; it may hold shapes instead of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array_or_shape(leaf)]
    others = tuple(None if is_array_or_shape(leaf) else leaf for leaf in leaves)
    return Flat(Rest(structure, others), arrays)


Carry = tuple[Any, OptState]
"""The parts of a state that a step uses up: the model, and what else is carried."""


@dataclasses.dataclass(frozen=True)
class FlatState(Generic[Model]):
    """A flattened state, so that the next step is called in less time.

    Attributes:
        carry: all but the count of steps. Used up by the next step.
        step: how many steps have been taken (a scalar, or its shape). It is not used up. Waiting
            for it waits for the step that computed it, also after the next step was called.
    """

    carry: Flat[Carry]
    step: Any

    @classmethod
    def of(cls, state: TrainState[Model]) -> "FlatState[Model]":
        """Flattens a state; a ValueError if it is no state."""
        allowed = "the dp.TrainState that step.init(model) or an earlier step returned"
        expect("state", state, TrainState, allowed)
        carry: Flat[Carry] = flat((state.model, state.opt_state))
        return cls(carry, state.step)

    @property
    def state(self) -> TrainState[Model]:
        """The state, unflattened."""
        return TrainState(*self.carry.tree, self.step)


class Dispatch:
    """`function(beside, carry) -> (carry, array)`, compiled, called without waiting for it.

    As `eqx.filter_jit(function, donate="all-except-first")`: arrays are traced, all else is static,
    it is compiled once for what is static and for shapes and dtypes, and the buffers of a carry go
    to the next. `eqx.filter_jit` waits for every result, to report errors of `eqx.error_if`. This
    function does not: such an error is raised when somebody waits for the result.

    On a mesh (`is_spread`) the arrays of the next carry live where those of the carry lived.
    Otherwise the compiler would choose places, and compile again for its choice.
    """

    def __init__(self, function: Callable[[Any, Carry], tuple[Carry, Any]], is_spread: bool):
        self._function, self._is_spread = function, is_spread
        self._jitted = functools.cache(self._compiled)

    def __call__(self, beside: Any, carry: Flat[Carry]) -> tuple[Flat[Carry], Any]:
        """The next carry, and an array to wait for; uses up the given carry."""
        function = self._jitted(self._places(carry))
        rest, arrays, result = function(*self._arguments(beside, carry))
        return Flat(rest, arrays), result

    def lower(self, beside: Any, carry: Flat[Carry]) -> jax.stages.Lowered:
        """Lowers the function for these arguments; nothing is computed."""
        return self._jitted(self._places(carry)).lower(*self._arguments(beside, carry))

    def _places(self, carry: Flat[Carry]) -> tuple[Any, ...] | None:
        """Where arrays live; None for a traced array without a sharding."""
        if not self._is_spread:
            return None
        return tuple(None if isinstance(x, Tracer) else x.sharding for x in carry.arrays)

    def _compiled(self, places: tuple[Any, ...] | None) -> Any:
        out = None if places is None else (None, list(places), None)
        return jax.jit(self._of_arrays, donate_argnums=3, out_shardings=out)

    def _arguments(self, beside: Any, carry: Flat[Carry]) -> tuple[Any, ...]:
        first = flat(beside)
        return first.rest, carry.rest, first.arrays, carry.arrays

    def _of_arrays(self, first: Rest, second: Rest, beside: list[Any], carry: list[Any]) -> Any:
        tree, result = self._function(Flat(first, beside).tree, Flat(second, carry).tree)
        after = flat(tree)
        return after.rest, after.arrays, result
