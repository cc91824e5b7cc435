"""Checks what noise is added to, how much of it, and with which key.

The key of noise enters a program through `noise_key`: no `vmap` shares it.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, SupportsFloat, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, PRNGKeyArray

from ..expected import real_number
from ..paths import dotted
from ..precision import Policy

Purpose = Literal["init", "noise"]

# A primitive, because JAX asks its rules what a Python function cannot see: whether it is under
# `vmap`, also where nothing is mapped. Nothing else here defines one. It was written for JAX 0.10
# to 0.12.
_noise_key: Any = Primitive("eqx_dp_noise_key")


def static_stddev(stddev: SupportsFloat) -> float:
    """A standard deviation that is known before the step is compiled; else a ValueError."""
    if isinstance(stddev, jax.Array):
        raise ValueError(
            "stddev must be a Python or numpy number, known before the step is compiled; found the "
            f"JAX array of shape {stddev.shape}. Pass float(stddev), outside of jit."
        )
    advice = (
        " It is noise multiplier times sensitivity, and the sensitivity is infinite without a "
        "finite clip norm: set l2_clip_norm."
    )
    wanted = "at least 0 (no noise)"
    return real_number("stddev", stddev, lambda real: real >= 0, wanted, advice=advice)


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


@functools.partial(jax.jit, static_argnames="purpose")
def noise_key(
    key: PRNGKeyArray, purpose: Purpose, gradients: Sequence[Float[Array, "..."]] = ()
) -> PRNGKeyArray:
    """Returns the key of some noise, or raises an error where that noise would not be private.

    | case | what happens |
    |---|---|
    | `init` under `vmap`, and the key is not mapped | refused: all models would share it |
    | a gradient is mapped, and the key is not | refused: all rows would share their noise |
    | a `shard_map` splits a gradient, and not the key | refused, unless JAX checks no types there |
    | nothing is mapped | one noise, of which `vmap` makes copies |

    Args:
        key: typed or raw.
        purpose: what it is taken for.
        gradients: what the noise is added to.
    """
    return _noise_key.bind(key, *jax.lax.stop_gradient(gradients), purpose=purpose)


def _mapped(axis: Any, values: Any, dims: Any, *, purpose: Purpose) -> tuple[Any, Any]:
    if dims[0] is None and (purpose == "init" or any(dim is not None for dim in dims)):
        raise ValueError(
            f"{purpose} is under vmap: {axis.size} models would get one key, and so the same noise."
            " Call optimizer.init for each model, stack the states, and map the update over these."
        )
    return _noise_key.bind(*values, purpose=purpose), dims[0]


def _type(key: Any, *gradients: Any, purpose: Purpose) -> Any:
    del purpose
    axes = {axis for x in gradients for axis in x.manual_axis_type.varying}
    if axes := axes - key.manual_axis_type.varying:
        named = ", ".join(sorted(map(str, axes)))
        raise ValueError(
            f"noise is in a shard_map that splits a gradient over {named}: all parts "
            "would get the same noise. Add noise outside of the shard_map."
        )
    return key


_noise_key.def_abstract_eval(_type)
batching.fancy_primitive_batchers[_noise_key] = _mapped
mlir.register_lowering(_noise_key, lambda _context, key, *_gradients, purpose: [key])
