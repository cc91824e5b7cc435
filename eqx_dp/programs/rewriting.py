"""Replaces equations of a program, in loops and branches as well."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex_core

from .inside import open_jaxpr, with_programs

OfEquation: TypeAlias = Callable[[jex_core.JaxprEqn], Sequence[jex_core.JaxprEqn] | None]
"""The replacement of one equation; None if only the programs in it change."""


def rewritten(program: jex_core.ClosedJaxpr, of_equation: OfEquation) -> jex_core.ClosedJaxpr:
    """A program of the same inputs and results; itself if there is nothing to do.

    Equations that no result and no effect needs are left out: some libraries evaluate a layer to
    learn the shape of its result. Derivative rules that are not yet applied stay as they are. Each
    program is rewritten once: what is called twice is compiled once, before and after.
    """

    @functools.cache
    def of_program(program: Any) -> Any:
        jaxpr = open_jaxpr(program)
        # In JAX 0.11 a closed program is an open one with constants, and both are one class.
        if jaxpr is not program:
            new = of_program(jaxpr)
            return program if new is jaxpr else jex_core.ClosedJaxpr(new, program.consts)
        equations, needed = list[jex_core.JaxprEqn](), variables(jaxpr.outvars)
        for equation in reversed([new for old in jaxpr.eqns for new in in_place_of(old)]):
            if equation.effects or not needed.isdisjoint(equation.outvars):
                equations.insert(0, equation)
                needed |= variables(equation.invars)
        return jaxpr if equations == list(jaxpr.eqns) else jaxpr.replace(eqns=equations)

    def variables(atoms: Sequence[Any]) -> set[Any]:
        return {atom for atom in atoms if isinstance(atom, jex_core.Var)}

    def in_place_of(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn]:
        if (new := of_equation(equation)) is not None:
            return new
        params = with_programs(equation, of_program)
        is_same = all(params[name] is value for name, value in equation.params.items())
        return [equation] if is_same else [equation.replace(params=params)]

    return of_program(program)


def inlined(function: Callable[..., Any], equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
    """The equations of a function, as a replacement with the same operands and result."""
    inner = jax.make_jaxpr(function)(*(variable.aval for variable in equation.invars)).jaxpr
    outer = dict(zip(inner.invars, equation.invars, strict=True))
    outer |= dict(zip(inner.outvars, equation.outvars, strict=True))

    def atoms(these: Sequence[Any]) -> list[Any]:
        return [x if isinstance(x, jex_core.Literal) else outer.get(x, x) for x in these]

    own = {"source_info": equation.source_info, "ctx": equation.ctx}
    return [
        one.replace(invars=atoms(one.invars), outvars=atoms(one.outvars), **own)
        for one in inner.eqns
    ]
