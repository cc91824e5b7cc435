"""Derivative rules, which equations hold as Python code, as programs.

This file alone knows how `jax.custom_jvp` and `jax.custom_vjp` leave them in an equation. It was
written for JAX 0.10 to 0.12.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex_core
import jax.extend.linear_util as lu
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .inside import closed
from .interpreter import literal_value

_JVP, _FORWARD, _BACKWARD = "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"

Rule: TypeAlias = tuple[jex_core.ClosedJaxpr, Any]
"""A derivative rule as a program, and what JAX needs besides it."""

RuleOf: TypeAlias = Callable[[jex_core.JaxprEqn], Rule]
"""Traces one derivative rule of an equation, in the current context."""


def has_rules(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation holds derivative rules."""
    return not {_JVP, _BACKWARD}.isdisjoint(equation.params)


def with_rules(equation: jex_core.JaxprEqn, changed: Callable[[RuleOf], Rule]) -> dict[str, Any]:
    """The parameters of an equation that hold derivative rules, with others in their place.

    `changed` gets the function that traces a rule, and returns its replacement. JAX calls it when
    it needs the rule, in its own context.
    """
    asked: list[tuple[bool, ...]] = []

    def jvp(*zeros: bool) -> tuple[Any, ...]:
        program, beside = changed(lambda equation: _traced(equation.params[_JVP], zeros))
        return program.jaxpr, program.consts, *beside

    def forward(*perturbed: bool) -> tuple[Any, ...]:
        asked.append(perturbed)
        program, _ = changed(lambda equation: _traced(equation.params[_FORWARD], perturbed))
        return program.jaxpr, program.consts

    def backward(*values: Any) -> Any:
        is_zero = [isinstance(value, SymbolicZero) for value in values]
        perturbed = asked[-1] if asked else ()
        rule = changed(lambda equation: _backward(equation, perturbed, is_zero))
        program, (taken, structure) = rule
        run: Callable[..., list[Any]] = jex_core.jaxpr_as_fun(program)
        found = jax.tree.unflatten(structure, run(*(values[i] for i in taken)))
        return found if len(found) > 1 else found[0]

    rules: dict[str, Any] = {
        name: lu.wrap_init(rule, debug_info=equation.params[name].debug_info)
        for name, rule in {_JVP: jvp, _FORWARD: forward, _BACKWARD: backward}.items()
        if name in equation.params
    }
    if "out_avals" in equation.params:  # types of another mesh, where the forward rule has run
        avals = equation.params["out_avals"]
        rules["out_avals"] = [jax.core.ShapedArray(x.shape, x.dtype) for x in avals]
    return rules


def _traced(rule: Any, flags: Sequence[bool]) -> Rule:
    jaxpr, consts, *beside = rule.call_wrapped(*flags)
    return jex_core.ClosedJaxpr(jaxpr, consts), beside


def _backward(
    equation: jex_core.JaxprEqn, perturbed: Sequence[bool], is_zero: Sequence[bool]
) -> Rule:
    """The rule for the residuals of its forward rule, and cotangents of which some are zero.

    If a residual is a constant, the rule may read it as a number while it is traced.

    Returns:
        The program; beside it, which residuals and cotangents it takes, and the structure of its
        results: the cotangents, and in JAX 0.11 what the rule logs.
    """
    values: dict[Any, Any] = {}
    if _FORWARD in equation.params:
        forward, _ = _traced(equation.params[_FORWARD], perturbed)
        values = dict(zip(forward.jaxpr.constvars, forward.consts, strict=True))
        own = iter(forward.jaxpr.outvars)
        _, _, forwarded = equation.params["out_trees"]()
        residuals = [next(own) if i is None else equation.invars[i] for i in forwarded]
    else:  # the forward rule has run
        residuals = equation.invars[: equation.params["num_res"]]
    avals: list[Any] = [
        *(variable.aval for variable in residuals),
        *(variable.aval.to_tangent_aval() for variable in equation.outvars),
    ]
    known = {i: SymbolicZero(avals[i]) for i, zero in enumerate(is_zero) if zero}
    for i, variable in enumerate(residuals):
        if isinstance(variable, jex_core.Literal):
            known[i] = literal_value(variable)
        elif variable in values:
            known[i] = values[variable]
    taken = [i for i in range(len(avals)) if i not in known]

    def run(*values: Any) -> Any:
        given = known | dict(zip(taken, values, strict=True))
        found = equation.params[_BACKWARD].call_wrapped(*(given[i] for i in range(len(avals))))
        cotangents, *logs = found if isinstance(found, tuple) else (found,)
        return (list(map(_dense, cotangents)), *logs)

    program, results = jax.make_jaxpr(run, return_shape=True)(*(avals[i] for i in taken))
    return closed(program), (taken, jax.tree.structure(results))


def _dense(cotangent: Any) -> Any:
    """A cotangent as an array; for an integer, of the type float0."""
    is_zero = isinstance(cotangent, ad.Zero)
    return ad.instantiate_zeros(cotangent) if is_zero else jnp.asarray(cotangent)
