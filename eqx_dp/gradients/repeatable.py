"""Whether a program gives the same numbers when it runs again, as `ghost` relies on."""

import math
import os
from typing import Any

import jax
import jax.extend.core as jex_core

from ..programs import programs_of

# Their kernels on GPUs may add with atomic operations, in whatever order threads come; those of
# vendors' libraries and of the user's may do anything.
_UNORDERED = frozenset(
    """
    conv_general_dilated dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper
    ffi_call pallas_call pure_callback scatter-mul scatter-sub select_and_scatter
    select_and_scatter_add
    """.split()  # noqa: SIM905
)
_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


def adds_in_one_order(platform: str | None = None) -> bool:
    """Whether every compiled program adds up in the same order each time it runs.

    CPUs and TPUs do. GPUs do only if XLA is told so: `XLA_FLAGS=--xla_gpu_deterministic_ops=true`.

    Args:
        platform: where programs run; None for JAX's default.
    """
    if (platform or jax.default_backend()) in ("cpu", "tpu"):
        return True
    flags = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    return any(name in _FLAGS and value.lower() in ("", "true", "1") for name, _, value in flags)


def is_ordered(program: jex_core.Jaxpr) -> bool:
    """Whether a program adds up in one order on a GPU, too, and so gives the same numbers again.

    Matrix products, reductions and elementwise work do. Scatters of three and more terms to one
    place do not, nor may convolutions and kernels of others. (Two terms and a zero have one sum, in
    any order.) What the engine does in batching rules of its own is left out.
    """
    return all(
        equation.primitive.name == "custom_vmap_call"
        or (_adds_in_order(equation) and all(map(is_ordered, programs_of(equation))))
        for equation in program.eqns
    )


def _adds_in_order(equation: jex_core.JaxprEqn) -> bool:
    if equation.primitive.name != "scatter-add":
        return equation.primitive.name not in _UNORDERED
    indices: Any = equation.invars[1].aval
    batch = equation.params["dimension_numbers"].scatter_indices_batching_dims
    own = [size for axis, size in enumerate(indices.shape[:-1]) if axis not in batch]
    return equation.params["unique_indices"] or math.prod(own) <= 2
