"""Parameters as they are stored, and as an optimizer sees them."""

from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..precision import Policy
from ..sharding import ShardingRules

Model = TypeVar("Model")


class Parameters(NamedTuple):
    """In which dtypes, and where, a step keeps parameters.

    Attributes:
        policy: stored in its params dtype, updated in its accumulate dtype; without one, as they
            are.
        rules: where they live.
    """

    policy: Policy | None
    rules: ShardingRules | None

    def stored(self, model: Model) -> Model:
        """A copy of the model as it is stored."""
        model = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, model)
        model = model if self.policy is None else self.policy.cast_to_param(model)
        return model if self.rules is None else self.rules.shard(model)

    def wide(self, params: PyTree[Any]) -> PyTree[Any]:
        """Trained parameters as wide as their gradients, and where those live."""
        params = params if self.policy is None else self.policy.cast_to_accumulate(params)
        return params if self.rules is None else self.rules.shard_accumulators(params)

    def updated(self, model: Model, updates: PyTree[Array | None]) -> Model:
        """The model, stored again, after an update in the wide dtype."""

        def add(update: Array | None, leaf: Any) -> Any:
            # Added in the wider dtype, then rounded once to what is stored.
            return leaf if update is None else (leaf + update).astype(leaf.dtype)

        after = cast(Model, jax.tree.map(add, updates, model, is_leaf=lambda x: x is None))
        return after if self.rules is None else self.rules.shard(after)
