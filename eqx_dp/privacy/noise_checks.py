"""Checks what noise is added to, and how much of it."""

from typing import Any, SupportsFloat, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from ..expected import real_number
from ..paths import dotted
from ..precision import Policy


def static_stddev(stddev: SupportsFloat) -> float:
    """A standard deviation that is known before the step is compiled; else a ValueError."""
    if isinstance(stddev, jax.Array):
        raise ValueError(
            "stddev must be a Python or numpy number, known before the step is compiled; found the "
            f"JAX array of shape {stddev.shape}. Pass float(stddev), outside of jit."
        )
    return real_number(
        "stddev",
        stddev,
        lambda real: real >= 0,
        "at least 0 (no noise)",
        advice=" It is noise multiplier times sensitivity, and the sensitivity is infinite without "
        "a finite clip norm: set l2_clip_norm.",
    )


def check_arrays_alone(params: optax.Params) -> None:
    """Refuses a whole model, whose functions and numbers fail in the next optimizer of a chain."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype"):
            raise ValueError(
                f"an optimizer takes only arrays; found a {type(leaf).__name__} at "
                f"{dotted(path) or 'the root'}. Give it what is trained: "
                "optimizer.init(grad_fn.trainable(model)), which is eqx.filter(model, "
                "eqx.is_inexact_array) unless a filter_spec says otherwise."
            )


def checked_gradient(
    leaf: object, path: tuple[Any, ...], policy: Policy | None
) -> Float[Array, "..."]:
    """A leaf that noise may be added to; a ValueError if its dtype does not allow it."""
    where = f"the gradient at {dotted(path) or 'the root'}"
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        raise ValueError(
            f"{where} is a {type(leaf).__name__}, not an array; keep what is not trained out of "
            "the gradients (None in its place), as filter_clipped_grad does."
        )
    found = cast("np.dtype[Any]", leaf.dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"{where} has dtype {found}, and Gaussian noise is for real floating-point numbers; "
            "keep what is not trained out of the gradients (None in its place)."
        )
    declared = np.dtype(np.float32) if policy is None else policy.accumulate_dtype
    # By significand: a policy that is not unsafe declares float32 or float64.
    narrower = jnp.finfo(found).nmant < jnp.finfo(declared).nmant
    if narrower and not (policy is not None and policy.unsafe):
        raise ValueError(
            f"{where} has dtype {found}, narrower than the accumulate dtype {declared}: the sum "
            f"over examples was rounded before the noise. Sum clipped gradients in {declared} (as "
            "filter_clipped_grad does with the same policy), or give a policy that is unsafe."
        )
    return jnp.asarray(leaf)


def check_range(stddev: float, dtype: Any) -> None:
    """Refuses a standard deviation at the ends of the noise dtype's range.

    The longest noise, of 19 standard deviations, is within the range. Numbers below it, which a
    machine may take for zero, are at most 2^-22 standard deviations in all 2^32 entries of a leaf.
    (Not so in an unsafe dtype, narrower than float32.)
    """
    limits = jnp.finfo(dtype)
    least = float(limits.smallest_normal) * (2.0**39 if limits.nmant >= 23 else 1.0)
    if not least <= stddev <= float(limits.max) / 32:
        raise ValueError(
            f"stddev {stddev} is beyond the normal range of the noise dtype {dtype} "
            f"({least:.2g} to {float(limits.max) / 32:.2g}): noise, or the sum beside it, would be "
            "rounded to zero or infinity. Rescale the gradients, or take a wider noise dtype."
        )
