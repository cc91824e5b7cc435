"""Whether JAX's batching rules keep mapped what is one example's own.

A rule may leave a result unmapped: one value, of which `jax.vmap` then gives every example a copy.
If an operand is an example's own, that value is of another example too. (Before JAX 0.11.1 the
backward pass of cuDNN attention adds the gradient of a bias that examples share over the batch.)
"""

from typing import Any

import jax
import jax.extend.core as jex_core

from ..programs import REARRANGED, evaluated
from .primitives import axes_named


def is_mapped(value: Any, own: Any) -> bool:
    """Whether `vmap` maps a value, as it maps `own`, in the function that it calls."""
    return isinstance(value, type(own))  # a tracer of vmap, which an unmapped value is not


def may_unmap(equation: jex_core.JaxprEqn) -> bool:
    """Whether JAX is asked which results it maps. That takes 2 ms.

    A rule that leaves the only result unmapped would map nothing; `run_apart` and a test look at
    those. Rules of collectives can be asked on their axes alone, and map all results.
    """
    is_moved = equation.primitive.name in REARRANGED
    return len(equation.outvars) > 1 and not is_moved and not axes_named(equation)


def stay_mapped(equation: jex_core.JaxprEqn, is_own: list[bool]) -> list[bool]:
    """Which results JAX's rule maps if it maps the operands that are an example's own."""
    avals: list[Any] = [atom.aval for atom in equation.invars]
    shapes = [
        jax.ShapeDtypeStruct((2,) * its + aval.shape, aval.dtype)
        for aval, its in zip(avals, is_own, strict=True)
    ]
    found: list[bool] = []

    def one(*values: Any) -> None:
        own = values[is_own.index(True)]
        found.extend(is_mapped(result, own) for result in evaluated(equation, values))

    jax.eval_shape(jax.vmap(one, [0 if its else None for its in is_own]), *shapes)
    return found
