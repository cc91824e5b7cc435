"""What a loss returned, split into loss and aux, and held against what it may return."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..paths import below
from ..shown import shown
from ..trees import PyTree
from .trained import is_state

_NO_GRADIENT = (
    "Hand in the loss itself, before eqx.filter_grad, eqx.filter_value_and_grad or jax.grad: the "
    "clipped gradient takes their place."
)


class NoScalar(ValueError):
    """A loss is an array, and no single number."""


def check_output(
    output: Any, has_aux: bool, gradient: PyTree[Array]
) -> tuple[Float[Array, ""], PyTree[Any]]:
    """Splits the user's output into loss and aux; `gradient` is as `eqx.filter_grad` returns it.

    Raises:
        ValueError: it is no pair where it should be one, or its loss is no real scalar.
    """
    if has_aux:
        if not (isinstance(output, tuple) and len(output) == 2):
            raise ValueError(
                "With has_aux=True the loss must return a pair (loss, aux); it returned "
                f"{shown(output)}."
            )
        loss, aux = output
    else:
        loss, aux = output, None
    if eqx.is_array_like(loss) and jnp.shape(loss) == ():
        loss = jnp.asarray(loss)
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(
                f"The loss must be a real floating-point number; its dtype is {loss.dtype}."
            )
        return loss, aux
    parts = (output, *output) if isinstance(output, tuple) else (output,)
    if any(_is_gradient(part, gradient) for part in parts):
        raise ValueError(
            f"The loss returns a tree of arrays like the model's, which looks like its gradient. "
            f"{_NO_GRADIENT}"
        )
    if not eqx.is_array_like(loss):
        pair = f"; pass has_aux=True if it returns (loss, aux). {_NO_GRADIENT}"
        hint = pair if isinstance(loss, tuple) else "."
        found = "None" if loss is None else f"a {type(loss).__name__}"
        raise ValueError(f"The loss must return a scalar array; it returned {found}{hint}")
    raise NoScalar(
        f"The loss of one example must be a scalar; its shape is {jnp.shape(loss)}. Reduce it with "
        "jnp.mean or jnp.sum; a loss written for a whole batch needs keep_batch_dim=True. "
        f"{_NO_GRADIENT}"
    )


def _is_gradient(output: PyTree[Any], gradient: PyTree[Array]) -> bool:
    """Whether it is a tree with the same float arrays at the same places."""
    shapes = [
        {
            jax.tree_util.keystr(path): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if eqx.is_inexact_array(leaf)
        }
        for tree in (output, gradient)
    ]
    return not eqx.is_array(output) and shapes[0] == shapes[1]


def check_aux(aux: PyTree[Any]) -> None:
    """Refuses what cannot, or must not, be stacked over examples.

    Raises:
        ValueError: aux holds something else than arrays, or an `eqx.nn.State`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_state):
        if is_state(leaf):
            raise ValueError(
                f"{below('aux', path)} is an eqx.nn.State. A state that a private "
                "example has written must not reach the next step. Return the loss alone, and "
                "update the state on public data, outside of the loss."
            )
        if not eqx.is_array_like(leaf):
            raise ValueError(
                f"{below('aux', path)} is a {type(leaf).__name__}: aux is stacked over "
                "examples, so it holds arrays only. Leave it out (eqx.filter(aux, eqx.is_array))."
            )


def drop_axis_of_one(leaf: Any) -> Any:
    """Takes the batch axis of length one off an aux leaf of a loss that is written for a batch."""
    return leaf[0] if eqx.is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == 1 else leaf
