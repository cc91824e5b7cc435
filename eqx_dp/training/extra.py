"""Public values for an optimizer that wants more than gradients and parameters."""

import re
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import PyTree

from ..expected import expect

_HOW = "step(state, *batch, is_padding_example=mask, extra={{{}}})"
_MISSING = re.compile(r"missing \d+ required keyword-only arguments?: (.*)")
_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")
_IS_FUNCTION = re.compile(r"\w+_fn\b")


def checked_extra(
    optimizer: optax.GradientTransformation, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What an optimizer's update is given beside, by name; refuses what it does not take."""
    expect("extra", {} if extra is None else extra, Mapping, "a mapping from names to numbers")
    found = {} if extra is None else dict(extra)
    for name, value in found.items():
        leaves = jax.tree.leaves(value)
        if any(callable(leaf) for leaf in leaves):
            raise ValueError(_refusal(name))
        if not all(map(eqx.is_array_like, leaves)):
            raise ValueError(f"extra[{name!r}] must hold numbers and arrays, and nothing else.")
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
    """An optimizer's update, with what it wants beside; refuses one that evaluates a loss."""
    update = optax.with_extra_args_support(optimizer).update
    try:
        return update(grads, state, params, **extra)
    except (TypeError, ValueError) as error:
        told = str(error)
        missing = _MISSING.search(told)
        wanted = re.findall(r"'(\w+)'", missing.group(1)) if missing else []
        functions = [name for name in wanted if _IS_FUNCTION.fullmatch(name)]
        if "must be provided" in told:
            functions += _IS_FUNCTION.findall(told)
        if functions:
            raise ValueError(_refusal(functions[0])) from error
        unknown = _UNKNOWN.search(told)
        if unknown and unknown.group(1) in extra:
            raise ValueError(
                f"extra holds {unknown.group(1)!r}, which the optimizer's update does not take. "
                "Leave it out."
            ) from error
        if not wanted:
            raise
        given = ", ".join(f"{name!r}: ..." for name in wanted)
        raise ValueError(
            f"The optimizer's update wants {', '.join(map(repr, wanted))}. Hand it over at every "
            f"step: {_HOW.format(given)}. It must be public, such as a loss on held-out data: a "
            "value computed from the batch is private, and no noise covers it."
        ) from error


def _refusal(name: str) -> str:
    return (
        f"The optimizer's update wants a function, {name!r}, to evaluate losses or gradients of "
        "its own. On the batch these would be neither clipped nor covered by noise, and no plan "
        "accounts for them. Take an optimizer that needs gradients alone: without a line search "
        "(optax.lbfgs(linesearch=None)), and optax.contrib.sam with opaque_mode=False."
    )
