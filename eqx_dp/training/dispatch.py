"""A compiled step that takes little work to call, and that is not waited for."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.core import Tracer
from jaxtyping import PyTree

from ..expected import expect
from ..trees import is_array_or_shape
from .state import TrainState, is_gone, refuse_used_up

Beside = TypeVar("Beside")
Tree = TypeVar("Tree")
Result = TypeVar("Result")
Model = TypeVar("Model")


class _Rest(NamedTuple):
    """What a tree is, but for its arrays: where one is, `others` has None."""

    structure: Any
    others: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Flat(Generic[Tree]):
    """A tree that is taken apart.

    To do so, and to put it together again, takes longer than to call a compiled function: modules
    are flattened by Python.
    """

    rest: _Rest
    arrays: list[Any]

    @property
    def tree(self) -> Tree:
        """The tree."""
        arrays = iter(self.arrays)
        leaves = [next(arrays) if other is None else other for other in self.rest.others]
        return self.rest.structure.unflatten(leaves)


def flat(tree: Tree) -> Flat[Tree]:
    """Takes a tree apart; shapes may stand for arrays."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array_or_shape(leaf)]
    others = tuple(None if is_array_or_shape(leaf) else leaf for leaf in leaves)
    return Flat(_Rest(structure, others), arrays)


Carry = tuple[Any, PyTree[Any], Any, PyTree[Any]]
"""Model, optimizer's state, key, average: what a step uses up of a state."""


@dataclasses.dataclass(frozen=True)
class FlatState(Generic[Model]):
    """A state that is taken apart, so that the next step is called in less time.

    Attributes:
        carry: all but the count of steps. Used up by the next step.
        step: how many steps have been taken (a scalar, or its shape). It is not used up: to wait
            for it is to wait for the step that has made it, also when the next one has been called.
    """

    carry: Flat[Carry]
    step: Any

    @classmethod
    def of(cls, state: TrainState[Model]) -> "FlatState[Model]":
        """Takes a state apart; a ValueError if it is none, or an earlier step has used it up."""
        allowed = "the dp.TrainState that step.init(model) or an earlier step returned"
        expect("state", state, TrainState, allowed)
        carry = flat((state.model, state.opt_state, state.key, state.average))
        if any(map(is_gone, carry.arrays)) or is_gone(state.step):
            refuse_used_up("state", state)
        return cls(carry, state.step)

    @property
    def state(self) -> TrainState[Model]:
        """The state, put together."""
        model, opt_state, key, average = self.carry.tree
        return TrainState(model, opt_state, self.step, key, average)


@jax.tree_util.register_static
class _Form:
    """What a program depends on beside its arrays. Its hash is worked out once."""

    def __init__(self, *rests: _Rest):
        self.rests = rests
        self._hash = hash(rests)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Form) and self.rests == other.rests)


class Dispatch(Generic[Beside, Tree, Result]):
    """`function(beside, carry) -> (carry, arrays)`, compiled, called without waiting for it.

    As `eqx.filter_jit(function, donate="all-except-first")`: arrays are traced, all else is static,
    it is compiled once for what is static and for shapes and dtypes, and the buffers of a carry go
    to the next. `eqx.filter_jit` waits for every result, to tell what `eqx.error_if` has to say.
    This does not: such an error is raised where the result is waited for.

    On a mesh (`is_spread`) the arrays of the next carry live where those of the carry lived. The
    compiler would choose for itself, and compile once more for what it chose.
    """

    def __init__(self, function: Callable[[Beside, Tree], tuple[Tree, Result]], is_spread: bool):
        self._function, self._is_spread = function, is_spread
        self._form: _Form | None = None
        self._jitted = functools.cache(self._compiled)

    def __call__(self, beside: Beside, carry: Flat[Tree]) -> tuple[Flat[Tree], Result]:
        """The next carry, and arrays that are there when the call has ended; uses up the carry."""
        function = self._jitted(self._places(carry))
        form, arrays, result = function(*self._arguments(beside, carry))
        return Flat(form.rests[0], arrays), result

    def lower(self, beside: Beside, carry: Flat[Tree]) -> jax.stages.Lowered:
        """Lowers the function for these arguments; nothing is computed."""
        return self._jitted(self._places(carry)).lower(*self._arguments(beside, carry))

    def _places(self, carry: Flat[Tree]) -> tuple[Any, ...] | None:
        """Where arrays live; None of one that is traced, where nothing says it."""
        if not self._is_spread:
            return None
        return tuple(None if isinstance(x, Tracer) else x.sharding for x in carry.arrays)

    def _compiled(self, places: tuple[Any, ...] | None) -> Any:
        out = None if places is None else (None, list(places), None)
        return jax.jit(self._of_arrays, donate_argnums=2, out_shardings=out)

    def _arguments(self, beside: Beside, carry: Flat[Tree]) -> tuple[_Form, list[Any], list[Any]]:
        first, form = flat(beside), self._form
        # One object for equal forms, since that is compared fast.
        if form is None or form.rests != (first.rest, carry.rest):
            self._form = form = _Form(first.rest, carry.rest)
        return form, first.arrays, carry.arrays

    def _of_arrays(self, form: _Form, beside: list[Any], carry: list[Any]) -> Any:
        arguments = (Flat(*parts).tree for parts in zip(form.rests, (beside, carry), strict=True))
        tree, result = self._function(*arguments)
        after = flat(tree)
        return _Form(after.rest), after.arrays, result
