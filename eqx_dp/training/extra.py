"""Public values for an optimizer that wants more than gradients and parameters."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import PyTree

from ..expected import expect

_ADVICE = (
    "An optimizer that wants more than gradients, state and parameters gets it by name, at every "
    "step: step(state, *batch, is_padding_example=mask, extra={'value': v}). It must be public, "
    "such as a loss on held-out data: no noise covers it. An optimizer that evaluates losses or "
    "gradients by itself cannot be used, because no plan accounts for these: take it without a "
    "line search (optax.lbfgs(linesearch=None)), and optax.contrib.sam with opaque_mode=False."
)


def checked_extra(
    optimizer: optax.GradientTransformation, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What an optimizer's update is given beside, by name; refuses what it does not take."""
    expect("extra", {} if extra is None else extra, Mapping, "a mapping from names to numbers")
    found = dict(extra or {})
    for name, value in found.items():
        if not all(map(eqx.is_array_like, jax.tree.leaves(value))):
            raise ValueError(f"extra[{name!r}] must hold numbers and arrays alone. {_ADVICE}")
    if found and not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        raise ValueError(
            f"extra holds {', '.join(map(repr, found))}, and the optimizer's update takes nothing "
            "beside gradients, state and parameters. Leave extra out."
        )
    return jax.tree.map(np.asarray, found)


def updated(
    optimizer: optax.GradientTransformation,
    grads: PyTree[Any],
    state: PyTree[Any],
    params: PyTree[Any],
    extra: Mapping[str, Any],
) -> tuple[PyTree[Any], PyTree[Any]]:
    """An optimizer's update, with what it wants beside."""
    try:
        return optax.with_extra_args_support(optimizer).update(grads, state, params, **extra)
    except (TypeError, ValueError) as error:
        if "argument" not in str(error) and "must be provided" not in str(error):
            raise
        raise ValueError(f"The optimizer's update failed: {error}. {_ADVICE}") from error
