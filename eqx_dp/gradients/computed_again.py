"""Values of parameters that are cheap enough to be computed wherever they are needed.

What a mask, or a penalty of squares, makes of a parameter is as large as the parameter. To hold it
from norms to sums takes memory that a product entry by entry does not need. Where it is computed
twice, it may be rounded in two ways: compilers reorder products with constants. So each way may be
off by as many roundings as an entry goes through, and bounds have room for both.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..programs import Call, equations, inside, named
from .split import pruned

MOST_ROUNDINGS = 4
"""Of what is computed again. Those of bounds that make up for it have room for twice as many."""

_MOST_GROWTH = 2.0**8
"""By what constants multiply, at most, for a value that is computed again.

A product may vanish on the way in one order and not in another. It is then off by less than 1e-35.
Bounds are relative, and have no room for more.
"""


def again_or_held(
    function: Callable[[], list[Array]], dtype: np.dtype[Any]
) -> list[Callable[[], Array]]:
    """The results of a function, each held unless it is only a few products entry by entry.

    Guarantee: where one is computed twice, each entry is off by a relative error of at most
    `MOST_ROUNDINGS` roundings each time, or by less than 1e-35 where a product is so small that it
    vanishes.

    Args:
        function: gives arrays.
        dtype: the one in which products are computed again; what has another is held.
    """
    program = jax.make_jaxpr(function)()

    def one(place: int) -> Callable[[], Array]:
        alone = pruned(program, [place])
        roundings = _roundings(alone.jaxpr, dtype)

        def computed() -> Array:
            (found,) = jex_core.jaxpr_as_fun(alone)()
            return found

        is_exact = roundings is not None and roundings <= MOST_ROUNDINGS
        if is_exact and _growth(alone.jaxpr) <= _MOST_GROWTH:
            return computed
        held = computed()
        return lambda: held

    return [one(place) for place in range(len(program.jaxpr.outvars))]


def _roundings(jaxpr: jex_core.Jaxpr, dtype: np.dtype[Any]) -> int | None:
    """How many roundings there are; None if anything else happens than products of entries.

    Nothing is decided by a number that was rounded: it could be decided in two ways.
    """
    count = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        avals: list[Any] = [x.aval for x in (*equation.invars, *equation.outvars)]
        smooth = [aval.dtype for aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact)]
        match inside(equation):
            case Call("jit", body):
                its: Any = _roundings(body.jaxpr, dtype)
            case None if any(its != dtype for its in smooth):
                its = None
            case None if name in _EXACT or (name in _COMPARISONS and not smooth):
                its = 0
            case None if name == "mul":
                its = 1
            case None if name == "integer_pow" and 0 <= params["y"] <= 3:
                its = params["y"]
            case _:
                its = None
        if its is None:
            return None
        count += its
    return count


def _growth(jaxpr: jex_core.Jaxpr) -> float:
    """By how much constants can make a number larger, all together."""
    found = 1.0
    for equation in equations(jaxpr):
        constants = [x.val for x in equation.invars if isinstance(x, jex_core.Literal)]
        for constant in constants:
            if jnp.issubdtype(jnp.result_type(constant), jnp.inexact):
                found *= max(1.0, float(np.max(np.abs(constant), initial=0)))
    return found


_EXACT = named(
    """
    and broadcast_in_dim convert_element_type copy iota neg not or reshape select_n squeeze
    transpose
    """
)
_COMPARISONS = named("eq ge gt le lt ne")
