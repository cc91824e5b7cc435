"""What a run carries from step to step, and where it lives."""

import math
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..gradients import FilterSpec, checked_trainable
from ..paths import below
from ..precision import Policy
from ..privacy import printed_without_key, refuse_to_pickle, without_key
from ..sharding import ShardingRules
from ..shown import some
from ..trees import PyTree
from ..updates import apply_updates, stored_model, wide_parameters

Model = TypeVar("Model")
T = TypeVar("T")


class OptState(NamedTuple):
    """What a state holds besides the model. No printed form and no pickle shows its keys.

    Attributes:
        noise: **secret**: the state of the noise, with its stream.
        optimizer: the optimizer's own state.
        average: the moving average of what is trained, in the dtype in which it is updated; None
            without `ema`.
        key: **secret**: the root of the keys of the loss and of stochastic rounding.
    """

    noise: Any
    optimizer: PyTree[Any]
    average: PyTree[Array] | None
    key: PRNGKeyArray

    __repr__, __pdoc__, __reduce__ = without_key, printed_without_key, refuse_to_pickle


class AdaptiveState(NamedTuple):
    """The optimizer's state, with a clip norm that follows a quantile of norms.

    Attributes:
        clip_norm: of the next step; it follows from releases, so it is public.
        optimizer: the state of the optimizer.
    """

    clip_norm: Float[Array, ""]
    optimizer: PyTree[Any]


class TrainState(eqx.Module, Generic[Model]):
    """All that a run carries from one step to the next.

    Attributes:
        model: the model as it is stored: what is trained in the policy's params dtype.
        opt_state: the states of the noise (`opt_state[0]`, **secret**: it holds a key), of the
            optimizer (`opt_state[1]`), and what else is carried. Keys are fresh at every start, and
            not in checkpoints.
        step: how many steps this model has taken.
    """

    model: Model
    opt_state: OptState
    step: Int[Array, ""]

    def __repr__(self) -> str:
        return f"TrainState({type(self.model).__name__}, step={_number_of(self.step)})"

    __pdoc__ = printed_without_key

    @property
    def averaged(self) -> Model:
        """The model with the average of what is trained, in the dtypes in which it is stored.

        It is post-processing of the released models, so it is as private as they are.

        Raises:
            ValueError: the step was made without `ema`.
        """
        if self.opt_state.average is None:
            raise ValueError(
                "There is no average of the parameters: give make_step(..., ema=0.999)."
            )

        def stored(mean: Array | None, leaf: Any) -> Any:
            return leaf if mean is None else mean.astype(leaf.dtype)

        return jax.tree.map(stored, self.opt_state.average, self.model, is_leaf=lambda x: x is None)


def _number_of(step: Any) -> str:
    """A number of steps, if it can be read: an array may be traced, used up, or on other hosts."""
    is_here = isinstance(step, jax.Array) and not isinstance(step, Tracer) and not is_gone(step)
    return str(int(step)) if is_here and step.is_fully_addressable else "?"


class Parameters(NamedTuple):
    """The dtypes and places in which a step stores and updates parameters.

    What is trained is stored in the policy's params dtype, and updated in its accumulate dtype, or
    in the optimizer dtype if that is wider. What is not trained keeps its dtypes. A module rule
    with a param dtype holds for both.
    """

    filter_spec: FilterSpec
    policy: Policy | None
    rules: ShardingRules | None

    def stored(self, model: Model) -> Model:
        """A copy of the model as it is stored."""
        model = strong(copied(model))
        if self.policy is not None:
            model = stored_model(*checked_trainable(model, self.filter_spec), self.policy)
        return model if self.rules is None else self.rules.shard(model)

    def wide(self, params: PyTree[Any]) -> PyTree[Any]:
        """Trained parameters in the optimizer's wide dtype, where gradients live."""
        params = wide_parameters(params, self.policy)
        return params if self.rules is None else self.rules.shard_accumulators(params)

    def updated(
        self, model: Model, updates: PyTree[Array | None], key: PRNGKeyArray | None
    ) -> Model:
        """The model, stored again, after an update in the wide dtype."""
        after = apply_updates(model, updates, self.policy, key=key)
        return after if self.rules is None else self.rules.shard(after)


def moved(average: PyTree[Any], params: PyTree[Array], ema: float, step: Array) -> PyTree[Any]:
    """The moving average after a step.

    It is sum_i ema^(t-i) p_i / sum_i ema^(t-i) over the parameters p_i after steps i = 1..t: the
    starting values are not in it, as they are not in Adam's debiased moments (Kingma and Ba, 2015).

    `average` may be anything before the first step; `step` is t.
    """

    def mean(old: Array, new: Array) -> Array:
        # 1 - ema^t by expm1: for a decay near 1 the difference would lose its digits.
        left = -jnp.expm1(step.astype(old.dtype) * math.log(ema)) if ema > 0 else 1.0
        return old + (1 - ema) / left * (new - old)

    return jax.tree.map(mean, average, params)


# A step uses up the buffers of its state.


def copied(tree: T) -> T:
    """The same values, each array in a buffer of its own.

    Optimizers may hold a parameter, or one array twice. A step donates every buffer of its state,
    and the same one cannot be donated twice.
    """
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, tree)


def strong(tree: T) -> T:
    """The same values, without weak types, which `jnp.asarray(1.0)` has.

    An array loses its weak type when it is updated, saved, or carried by a scan. With other types
    the loss promotes differently, and the step is compiled again.
    """

    def of(leaf: Any) -> Any:
        is_weak = eqx.is_array(leaf) and getattr(jax.typeof(leaf), "weak_type", False)
        return jax.lax.convert_element_type(leaf, leaf.dtype) if is_weak else leaf

    return jax.tree.map(of, tree)


def is_gone(leaf: Any) -> bool:
    """Whether it is an array whose buffer was donated, or deleted."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def refuse_used_up(name: str, tree: PyTree[Any]) -> None:
    """Raises a ValueError if an earlier step has taken a buffer of a tree; `name` is for it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if gone := [below(name, path) for path, leaf in leaves if is_gone(leaf)]:
        raise ValueError(
            f"{some(gone, 1)}: the array is gone. A step uses up the state that it is given: its "
            "buffers are donated to the next state. Go on with the state that the step returned, "
            "state = step(state, ...), and copy beforehand what is needed later, the model too: "
            "jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, state)."
        )
