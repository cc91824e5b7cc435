"""A program with other equations in the place of some, in loops and branches as well."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex_core

from .inside import open_jaxpr, with_programs

OfEquation: TypeAlias = Callable[[jex_core.JaxprEqn], Sequence[jex_core.JaxprEqn] | None]
"""The equations in place of one; None where it stays, but for the programs in it."""


def rewritten(program: jex_core.ClosedJaxpr, of_equation: OfEquation) -> jex_core.ClosedJaxpr:
    """A program of the same inputs and results; itself if there is nothing to do.

    Derivative rules that are not yet applied stay as they are.
    """
    return _Rewriting(of_equation).program(program)


class _Rewriting:
    """Rewrites each program once: what is called twice is compiled once, before and after."""

    def __init__(self, of_equation: OfEquation) -> None:
        self._new = of_equation
        self._done: dict[Any, Any] = {}

    def program(self, program: Any) -> Any:
        """A program, open or closed, with all that it calls; itself if there is nothing to do."""
        if program not in self._done:
            self._done[program] = self._rewritten(program)
        return self._done[program]

    def _rewritten(self, program: Any) -> Any:
        jaxpr = open_jaxpr(program)
        # In JAX 0.11 a closed program is an open one with constants, and both are one class.
        if jaxpr is not program:
            new = self.program(jaxpr)
            return program if new is jaxpr else jex_core.ClosedJaxpr(new, program.consts)
        rewritten = [new for equation in jaxpr.eqns for new in self._of_equation(equation)]
        is_same = all(new is old for new, old in zip(rewritten, jaxpr.eqns, strict=False))
        return jaxpr if is_same else jaxpr.replace(eqns=rewritten)

    def _of_equation(self, equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn]:
        new = self._new(equation)
        if new is not None:
            return new
        params = with_programs(equation, self.program)
        if all(params[name] is value for name, value in equation.params.items()):
            return [equation]
        return [equation.replace(params=params)]


def inlined(function: Callable[..., Any], equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
    """The equations of a function, in place of one with the same operands and the same result."""
    inner = jax.make_jaxpr(function)(*(variable.aval for variable in equation.invars)).jaxpr
    outer = dict(zip(inner.invars, equation.invars, strict=True))
    outer |= dict(zip(inner.outvars, equation.outvars, strict=True))

    def atom(x: Any) -> Any:
        return x if isinstance(x, jex_core.Literal) else outer.get(x, x)

    return [
        one.replace(
            invars=list(map(atom, one.invars)),
            outvars=list(map(atom, one.outvars)),
            source_info=equation.source_info,
            ctx=equation.ctx,
        )
        for one in inner.eqns
    ]
