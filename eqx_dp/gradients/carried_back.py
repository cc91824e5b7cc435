"""Through which variables of a program a gradient comes back from its results.

What is cast to an integer, compared, stopped (`jax.lax.stop_gradient`) or not used for the result
in question has no part in the gradient of that, whatever else is done with it.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core import primitives

from ..programs import Call, Cond, Scan, While, inside, settled

# Their derivative is zero wherever they have one.
_FLAT = frozenset(
    {primitives.stop_gradient_p, primitives.sign_p, primitives.floor_p, primitives.ceil_p}
    | {primitives.round_p, primitives.nextafter_p}
)


def carried_back(jaxpr: jex_core.Jaxpr, wanted: Sequence[bool]) -> set[Any]:
    """The variables that the gradient of some results passes through; rather too many.

    Args:
        jaxpr: the program.
        wanted: of each of its results whether a gradient comes from there.
    """
    found: set[Any] = set()

    def note(atoms: Sequence[Any], wanted: Sequence[bool]) -> None:
        for atom, is_wanted in zip(atoms, wanted, strict=True):
            if is_wanted and not isinstance(atom, jex_core.Literal) and _is_smooth(atom):
                found.add(atom)

    note(jaxpr.outvars, wanted)
    for equation in reversed(jaxpr.eqns):
        results = [variable in found for variable in equation.outvars]
        if any(results):
            note(equation.invars, operands_wanted(equation, results))
    return found


def operands_wanted(equation: jex_core.JaxprEqn, wanted: list[bool]) -> list[bool]:
    """Of each operand of an equation whether a gradient comes back to it.

    Of what no case speaks of, a derivative rule as well, it is said of every operand.
    """
    match inside(equation):
        case Call("jit" | "remat", body):
            return _inputs(body, wanted)
        case Scan() as scan:
            return _inputs(scan.body, wanted_inside(scan, wanted))
        case While() as loop:
            start = loop.num_body
            carry = settled(
                lambda carry: _inputs(loop.body, carry)[start:], wanted, lambda a, b: a or b
            )
            return [*[False] * loop.num_condition, *_inputs(loop.body, carry)[:start], *carry]
        case Cond(branches):
            found = [_inputs(branch, wanted) for branch in branches]
            return [False, *map(any, zip(*found, strict=True))]
        case _:
            return [equation.primitive not in _FLAT] * len(equation.invars)


def wanted_inside(scan: Scan, wanted: Sequence[bool]) -> list[bool]:
    """Of each result of a scan's body whether a gradient comes from there, at any step."""
    stacked = list(wanted[scan.num_carry :])

    def step(carry: list[bool]) -> list[bool]:
        return scan.split(_inputs(scan.body, [*carry, *stacked]))[1]

    return [*settled(step, list(wanted[: scan.num_carry]), lambda a, b: a or b), *stacked]


def _is_smooth(variable: Any) -> bool:
    return jnp.issubdtype(getattr(variable.aval, "dtype", jnp.bool_), jnp.inexact)


def _inputs(program: jex_core.ClosedJaxpr, wanted: Sequence[bool]) -> list[bool]:
    """Of each input of a program whether a gradient comes back to it."""
    found = carried_back(program.jaxpr, wanted)
    return [variable in found for variable in program.jaxpr.invars]
