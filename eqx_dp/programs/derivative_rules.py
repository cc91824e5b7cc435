"""Derivative rules, which equations hold as Python code, as programs.

This file alone knows how `jax.custom_jvp` and `jax.custom_vjp` leave them in an equation. It was
written for JAX 0.10 and 0.11.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.extend.core as jex_core
import jax.extend.linear_util as lu
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .inside import closed, equations
from .interpreter import literal_value

JVP, FORWARD, BACKWARD = "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"

RULE_PARAMS = frozenset({JVP, FORWARD, BACKWARD, "out_trees"})
"""The names of the parameters that hold derivative rules."""


read_apart = jax.make_user_context(False)
"""`with read_apart(True):` programs are traced that share no derivative rule with any other.

To trace a rule of a `jax.custom_vjp` changes it: the equation keeps what the latest trace found,
and nothing if the rule raised, while JAX keeps programs of earlier traces, which need theirs. And
equations are shared, because JAX keeps the program of a jitted function. So a rule that is only
read, for operands that JAX may never differentiate, is read in a program of its own.
"""


class Rule(NamedTuple):
    """A derivative rule as a program.

    Attributes:
        program: from the arrays that the rule is called on to those that it returns.
        beside: what JAX wants to know beside them.
    """

    program: jex_core.ClosedJaxpr
    beside: Any = None


RuleOf: TypeAlias = Callable[[jex_core.JaxprEqn], Rule]
"""Traces one derivative rule of an equation, in the context at hand."""


def has_rules(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation holds derivative rules."""
    return not RULE_PARAMS.isdisjoint(equation.params)


def is_changed_by_reading(program: jex_core.ClosedJaxpr) -> bool:
    """Whether a program holds rules that are to be read in a program of their own."""
    return any(FORWARD in equation.params for equation in equations(program))


def with_rules(equation: jex_core.JaxprEqn, changed: Callable[[RuleOf], Rule]) -> dict[str, Any]:
    """The parameters of an equation that hold derivative rules, with others in their place.

    `changed` gets what traces a rule, and gives what is to stand in its place. It is called when
    JAX asks for the rule, in the context that JAX asks in.
    """
    asked: list[tuple[bool, ...]] = []

    def jvp(*zeros: bool) -> tuple[Any, ...]:
        rule = changed(lambda equation: _jvp(equation, zeros))
        return rule.program.jaxpr, rule.program.consts, rule.beside

    def forward(*perturbed: bool) -> tuple[Any, ...]:
        asked.append(perturbed)
        rule = changed(lambda equation: _forward(equation, perturbed))
        return rule.program.jaxpr, rule.program.consts

    def backward(*values: Any) -> Any:
        is_zero = [isinstance(value, SymbolicZero) for value in values]
        perturbed = asked[-1] if asked else ()
        rule = changed(lambda equation: _backward(equation, perturbed, is_zero))
        taken, structure = rule.beside
        run: Callable[..., list[Any]] = jex_core.jaxpr_as_fun(rule.program)
        found = jax.tree.unflatten(structure, run(*(values[i] for i in taken)))
        return found if len(found) > 1 else found[0]

    params = equation.params
    rules: dict[str, Any] = {
        name: lu.wrap_init(rule, debug_info=params[name].debug_info)
        for name, rule in {JVP: jvp, FORWARD: forward, BACKWARD: backward}.items()
        if name in params
    }
    if "out_avals" in params:  # types of another mesh, where the forward rule has run
        rules["out_avals"] = [jax.core.ShapedArray(x.shape, x.dtype) for x in params["out_avals"]]
    return rules


def _jvp(equation: jex_core.JaxprEqn, zeros: Sequence[bool]) -> Rule:
    """The rule for inputs of which some have no tangent; `beside` says which results have none."""
    jaxpr, consts, beside = equation.params[JVP].call_wrapped(*zeros)
    return Rule(jex_core.ClosedJaxpr(jaxpr, consts), beside)


def _forward(equation: jex_core.JaxprEqn, perturbed: Sequence[bool]) -> Rule:
    """The rule for inputs of which some are differentiated."""
    jaxpr, consts = equation.params[FORWARD].call_wrapped(*perturbed)
    return Rule(jex_core.ClosedJaxpr(jaxpr, consts))


def _backward(
    equation: jex_core.JaxprEqn, perturbed: Sequence[bool], is_zero: Sequence[bool]
) -> Rule:
    """The rule for what its forward rule leaves it, and cotangents of which some are zero.

    What the forward rule leaves as a constant the rule may read as a number while it is traced.
    `beside` says which residuals and cotangents the program takes, and the structure of its
    results: the cotangents, and in JAX 0.11 what the rule logs.
    """
    rule = equation.params[BACKWARD]
    residuals, constants = _residuals(equation, perturbed)
    avals: list[Any] = [
        *(variable.aval for variable in residuals),
        *(variable.aval.to_tangent_aval() for variable in equation.outvars),
    ]
    known = constants | {i: SymbolicZero(avals[i]) for i, zero in enumerate(is_zero) if zero}
    taken = [i for i in range(len(avals)) if i not in known]

    def run(*values: Any) -> Any:
        given = known | dict(zip(taken, values, strict=True))
        found = rule.call_wrapped(*(given[i] for i in range(len(avals))))
        cotangents, *logs = found if isinstance(found, tuple) else (found,)
        return (list(map(_dense, cotangents)), *logs)

    program, results = jax.make_jaxpr(run, return_shape=True)(*(avals[i] for i in taken))
    return Rule(closed(program), (taken, jax.tree.structure(results)))


def _residuals(
    equation: jex_core.JaxprEqn, perturbed: Sequence[bool]
) -> tuple[list[Any], dict[int, Any]]:
    """The variables that a backward rule is left, and the values of those that are constants."""
    params = equation.params
    values: dict[Any, Any] = {}
    if FORWARD in params:
        forward = _forward(equation, perturbed).program
        values = dict(zip(forward.jaxpr.constvars, forward.consts, strict=True))
        own = iter(forward.jaxpr.outvars)
        _, _, forwarded = params["out_trees"]()
        variables = [next(own) if i is None else equation.invars[i] for i in forwarded]
    else:  # the forward rule has run
        variables = list(equation.invars[: params["num_res"]])
    constants: dict[int, Any] = {}
    for i, variable in enumerate(variables):
        if isinstance(variable, jex_core.Literal):
            constants[i] = literal_value(variable)
        elif variable in values:
            constants[i] = values[variable]
    return variables, constants


def _dense(cotangent: Any) -> Any:
    """A cotangent as an array; of an integer, of the type that stands for there being none."""
    if not isinstance(cotangent, ad.Zero):
        return jnp.asarray(cotangent)
    aval: Any = cotangent.aval
    is_none = aval.dtype == jax.dtypes.float0
    return (np if is_none else jnp).zeros(aval.shape, aval.dtype)
