"""A program in two halves, of which the second may run again with other inputs."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core

from .inside import programs_of
from .names import named

_VIEWS = named("broadcast_in_dim reshape squeeze")
"""What costs nothing to make again: what they are made of is left to the second half."""

_COSTLY = named(
    """dot_general conv_general_dilated random_bits random_wrap random_unwrap threefry2x32 gather
    scatter sort cumsum"""
)


class Halves(NamedTuple):
    """A program in two halves.

    Attributes:
        first: from the inputs that are not late to what the second half needs.
        second: from that, and the late inputs behind it, to the results.
    """

    first: jex_core.ClosedJaxpr
    second: jex_core.ClosedJaxpr


def halved(program: jex_core.ClosedJaxpr, is_late: Sequence[bool]) -> Halves:
    """Divides a program: all that depends on a late input is in the second half.

    So is, again, what depends on no input at all, and what only repeats or reshapes a value.

    Args:
        program: the program.
        is_late: of every input.
    """
    jaxpr = program.jaxpr
    late = {x for x, its in zip(jaxpr.invars, is_late, strict=True) if its}
    early = [x for x, its in zip(jaxpr.invars, is_late, strict=True) if not its]
    of_inputs, of_first = set[Any](jaxpr.invars), dict[Any, jex_core.JaxprEqn]()
    first, second = list[jex_core.JaxprEqn](), list[jex_core.JaxprEqn]()
    for equation in jaxpr.eqns:
        operands = _variables(equation.invars)
        if not late.isdisjoint(operands):
            late.update(equation.outvars)
            second.append(equation)
            continue
        first.append(equation)
        depends = not of_inputs.isdisjoint(operands)
        if depends:
            of_inputs.update(equation.outvars)
        if _is_made_again(equation, depends):
            of_first.update(dict.fromkeys(equation.outvars, equation))
    constants, left, again = set(jaxpr.constvars), dict[Any, None](), set[int]()
    needed = [x for one in second for x in _variables(one.invars)] + _variables(jaxpr.outvars)
    while needed:
        variable = needed.pop()
        if variable in late or variable in constants or variable in left:
            continue
        equation = of_first.get(variable)
        if equation is None:
            left[variable] = None
        elif id(equation) not in again:
            again.add(id(equation))
            needed += _variables(equation.invars)
    handed_on, given = list(left), [x for x in jaxpr.invars if x in late]
    repeated = [equation for equation in first if id(equation) in again]
    return Halves(
        _part(program, early, first, handed_on),
        _part(program, [*handed_on, *given], [*repeated, *second], jaxpr.outvars),
    )


def _is_made_again(equation: jex_core.JaxprEqn, depends: bool) -> bool:
    if equation.effects or programs_of(equation):
        return False
    name = equation.primitive.name
    return name in _VIEWS or (not depends and name not in _COSTLY)


def _part(
    program: jex_core.ClosedJaxpr,
    inputs: list[Any],
    equations: list[jex_core.JaxprEqn],
    results: Sequence[Any],
) -> jex_core.ClosedJaxpr:
    """Some of a program's equations, with those of its constants that they need."""
    needed = {x for one in equations for x in _variables(one.invars)} | {*_variables(results)}
    consts = [
        (variable, value)
        for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True)
        if variable in needed
    ]
    jaxpr = jex_core.Jaxpr(
        [variable for variable, _ in consts],
        inputs,
        list(results),
        equations,
        frozenset[Any]().union(*(equation.effects for equation in equations)),
        debug_info=jex_core.DebugInfo("halves", "half", None, None),
    )
    return jex_core.ClosedJaxpr(jaxpr, [value for _, value in consts])


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if isinstance(atom, jex_core.Var)]
