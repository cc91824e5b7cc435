"""The key of noise, on its way into a program: no `vmap` shares it, and the platform is known.

This file alone defines a primitive. JAX asks its rules what a Python function cannot see: whether
it is under `vmap`, also where nothing is mapped, and which platforms a program is lowered for.
It was written for JAX 0.10 and 0.11.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, PRNGKeyArray

PLATFORMS = frozenset(("cpu", "cuda", "rocm"))
"""Where float64 is that of IEEE 754, as the proof of certified noise assumes."""

Purpose = Literal["init", "noise", "noise that is not certified"]

_noise_key: Any = Primitive("eqx_dp_noise_key")


@functools.partial(jax.jit, static_argnames="purpose")
def noise_key(
    key: PRNGKeyArray, purpose: Purpose, gradients: Sequence[Float[Array, "..."]] = ()
) -> PRNGKeyArray:
    """Returns the key of some noise, or raises an error where that noise would not be private.

    | case | what happens |
    |---|---|
    | `init` under `vmap`, and the key is not mapped | refused: all models would share it |
    | a gradient is mapped, and the key is not | refused: all rows would share their noise |
    | nothing is mapped | one noise, of which `vmap` makes copies |
    | certified, and lowered for a platform that is not in `PLATFORMS` | refused |
    | lowered for several platforms | refused if one of them is |

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


def _lowered(context: Any, key: Any, *_gradients: Any, purpose: Purpose) -> list[Any]:
    others = {*(context.platforms or context.module_context.platforms)} - PLATFORMS
    if purpose == "noise" and others:
        raise ValueError(
            "certified noise needs float64 as IEEE 754 has it, which a TPU does not have; found "
            f"{', '.join(others)}. Train on one of {', '.join(sorted(PLATFORMS))}; or, in your own "
            "loop, take certified=False, which is not Gaussian (see gaussian_privatizer)."
        )
    return [key]


_noise_key.def_abstract_eval(lambda key, *_gradients, purpose: key)
batching.fancy_primitive_batchers[_noise_key] = _mapped
mlir.register_lowering(_noise_key, _lowered)
