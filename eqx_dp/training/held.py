"""A state as one step hands it to the next."""

import dataclasses
from typing import Any, Generic, TypeVar

from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree

from ..sharding import ShardingRules
from .dispatch import Flat, flat, is_gone
from .state import TrainState, refuse_used_up, specs_of

Model = TypeVar("Model")

Carry = tuple[Any, PyTree[Any], dict[str, Any]]
"""Model, optimizer's state, what was disclosed: the parts of a state that a step uses up."""


@dataclasses.dataclass(frozen=True)
class Held(Generic[Model]):
    """A state that is taken apart, so that the next step is called in less time.

    Attributes:
        carry: all but the count of steps. Used up by the next step.
        step: how many steps have been taken. It is not used up: to wait for it is to wait for the
            step that has made it, also when the next one has been called.
        specs: where its arrays stay; none without sharding rules.
    """

    carry: Flat[Carry]
    step: Int[Array, ""]
    specs: tuple[PartitionSpec | None, ...]

    @classmethod
    def of(cls, state: TrainState[Model], rules: ShardingRules | None) -> "Held[Model]":
        """Takes a state apart.

        Raises:
            ValueError: an earlier step has used it up.
        """
        carry = flat((state.model, state.opt_state, state.disclosed))
        if any(map(is_gone, carry.arrays)) or is_gone(state.step):
            refuse_used_up("state", state)
        return cls(carry, state.step, specs_of(state, rules))

    @property
    def state(self) -> TrainState[Model]:
        """The state, put together."""
        model, opt_state, disclosed = self.carry.tree
        return TrainState(model, opt_state, self.step, disclosed)
