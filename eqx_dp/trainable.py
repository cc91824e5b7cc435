"""The part of a model that is trained."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .paths import below
from .shown import shown
from .trees import PyTree, check_numbers

FilterSpec = PyTree[bool | Callable[[Any], bool]]
_Model = TypeVar("_Model")


def split_trainable(model: _Model, filter_spec: FilterSpec) -> tuple[_Model, _Model]:
    """Splits a model into its trained part and the rest, each with None in place of the other.

    Layers write an `eqx.nn.State` (for example running statistics), and gradient descent must not
    change it. A function gets a leaf and not its place in the tree, so it selects only parameters;
    True in a tree of booleans may select state as well. True above a part of the model means the
    floating-point arrays in it: activation functions, integers and Python numbers stay as they are.

    | filter_spec | of an `eqx.nn.State`, a `StateIndex.init` |
    |---|---|
    | a function of a leaf (the default is one) | nothing is trained |
    | a tree, a function above the state | nothing is trained |
    | a tree, True above the state | all of its floating-point arrays are trained |
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
            is_leaf = jax.tree_util.all_leaves([part])
            return (
                spec if is_leaf else jax.tree.map(lambda x: spec and eqx.is_inexact_array(x), part)
            )
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
    """Splits a model, as [`split_trainable`][], and checks that the trained part can be trained.

    Raises:
        ValueError: nothing is trained, or something that is no real floating-point array.
    """
    check_numbers("model", model)
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
