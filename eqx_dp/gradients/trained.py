"""What of a model is trained: the leaves that a filter spec selects, and no state."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..paths import below
from ..shown import shown
from ..trees import PyTree

FilterSpec = PyTree[bool | Callable[[Any], bool]]
_Model = TypeVar("_Model")

STATE_ADVICE = (
    "Hand the state in with the model, grad_fn((model, state), *batch), and let the loss take the "
    "pair as its first argument. Every trace then gets a state of its own, and its gradients are "
    "None, so that no noise is added to it. optimizer.init(grad_fn.trainable((model, state))) fits "
    "these gradients. eqx.nn.inference_mode(model) makes layers leave their state alone."
)


def is_state(node: Any) -> bool:
    """Whether a node of a tree is an `eqx.nn.State`."""
    return isinstance(node, eqx.nn.State)


def split_trainable(model: _Model, filter_spec: FilterSpec) -> tuple[_Model, _Model]:
    """Splits a model into what is trained and the rest, each with None in place of the other.

    What an `eqx.nn.State` holds (running statistics, say) is written by layers, and no gradient
    descent is meant to move it. A function gets a leaf and not its place in the tree, so it selects
    parameters alone; True in a tree of booleans may select state as well.

    | filter_spec | of an `eqx.nn.State`, a `StateIndex.init` |
    |---|---|
    | a function of a leaf (the default is one) | nothing is trained |
    | a tree, a function above the state | nothing is trained |
    | a tree, True above the state | all of it is trained |
    | a tree, True or a function inside of it | what it selects is trained |

    Args:
        model: any tree.
        filter_spec: a tree prefix of booleans and functions, as in `eqx.partition`.

    Raises:
        ValueError: `filter_spec` is something else, or no prefix.
    """

    def holds_state(node: Any) -> bool:
        return isinstance(node, eqx.nn.State | eqx.nn.StateIndex)

    def without_state(spec: Any, part: PyTree[Any]) -> Any:
        if isinstance(spec, bool):
            return spec
        if not callable(spec):
            raise ValueError(
                "filter_spec must be a function of a leaf, or a tree of booleans and functions; "
                f"found {shown(spec)} in it."
            )
        return jax.tree.map(
            lambda node: not holds_state(node) and bool(spec(node)), part, is_leaf=holds_state
        )

    try:
        jax.tree.map(lambda *_: None, filter_spec, model)
    except ValueError as error:
        raise ValueError(
            "filter_spec is no prefix of the model's tree. Give a function of a leaf, or a tree "
            "made from the model: spec = jax.tree.map(lambda _: False, model), in which "
            f"eqx.tree_at puts True for what is trained. {error}"
        ) from error
    return eqx.partition(model, jax.tree.map(without_state, filter_spec, model))


def checked_trainable(
    model: PyTree[Any], filter_spec: FilterSpec
) -> tuple[PyTree[Array], PyTree[Any]]:
    """Splits a model, as [`split_trainable`][], and checks that what is trained can be.

    Raises:
        ValueError: nothing is trained, or something that is no real floating-point array.
    """
    params, rest = split_trainable(model, filter_spec)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError(
            "Nothing is trainable: filter_spec selects no leaf of the model. The default selects "
            "floating-point arrays outside of eqx.nn.State; a Python float is none (wrap it in "
            "jnp.asarray)."
        )
    for path, leaf in leaves:
        if not (eqx.is_array_like(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)):
            raise ValueError(
                f"filter_spec selects {below('model', path)}, which is {shown(leaf)}: "
                "only real floating-point arrays can be trained. Narrow filter_spec, or hold a "
                "complex parameter as two real ones."
            )
    return jax.tree.map(jnp.asarray, params), rest
