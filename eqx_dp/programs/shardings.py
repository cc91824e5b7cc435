"""The shardings that an equation demands of its values."""

from typing import Any

import jax.extend.core as jex_core
from jax.extend.core.primitives import device_put_p, jit_p, sharding_constraint_p
from jax.sharding import NamedSharding

PLACEMENTS = frozenset({sharding_constraint_p.name, device_put_p.name, "reshard", "pvary"})
"""The primitives that say where a value lives, and do not change the value."""


def shardings(equation: jex_core.JaxprEqn) -> dict[int, Any]:
    """The shardings that an equation demands, as the user wrote them.

    Returns:
        The sharding for the position of an operand, or of a result: those come after the operands.
    """
    params, results = equation.params, len(equation.invars)
    if equation.primitive is sharding_constraint_p:
        return {results: params["sharding"]}
    if equation.primitive.name == "reshard":
        return {results: params["dst_sharding"]}
    if equation.primitive is device_put_p:
        found = enumerate(params["devices"], results)
    elif equation.primitive is jit_p:
        found = enumerate([*params["in_shardings"], *params["out_shardings"]])
    else:
        return {}
    return {i: sharding for i, sharding in found if isinstance(sharding, NamedSharding)}


def result_sharding(equation: jex_core.JaxprEqn) -> NamedSharding | None:
    """The sharding that an equation demands of its one result, as an einsum with `out_sharding`.

    On Explicit axes JAX also fills it in.
    """
    if len(equation.outvars) != 1:
        return None
    named = (value for value in equation.params.values() if isinstance(value, NamedSharding))
    return next(named, None)
