"""Evaluates a program equation by equation: on arrays, or on facts about arrays."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.extend import source_info_util

from .inside import Scan

Value = TypeVar("Value")
Extra = TypeVar("Extra")


def interpret(
    jaxpr: jex_core.Jaxpr,
    consts: Sequence[Value],
    inputs: Sequence[Value],
    of_equation: Callable[[jex_core.JaxprEqn, list[Value]], Sequence[Value]],
    of_literal: Callable[[jex_core.Literal], Value],
) -> list[Value]:
    """Evaluates a program from its inputs to its results."""
    values: dict[Any, Value] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )

    def read(atom: Any) -> Value:
        return of_literal(atom) if isinstance(atom, jex_core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = of_equation(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def literal_value(literal: jex_core.Literal) -> Any:
    """The value of a literal, in the current context."""
    value = literal.val
    # An array would keep its type, which names the mesh of its creation.
    return value.view() if isinstance(value, np.ndarray) else value


def settled(
    step: Callable[[list[Value]], list[Value]],
    start: list[Value],
    joined: Callable[[Value, Value], Value],
) -> list[Value]:
    """The facts about a loop's carry: the smallest that another step does not change.

    `joined` gives the fact about a value that may be either of two. There are finitely many facts
    above any, so the loop ends.
    """
    carry = start
    while True:
        after = [joined(a, b) for a, b in zip(carry, step(carry), strict=True)]
        if after == carry:
            return carry
        carry = after


def at(equation: jex_core.JaxprEqn) -> AbstractContextManager[Any]:
    """The context of an equation's line and named scopes.

    Errors and profiles then name the same line. Only the equation itself knows a scope around a
    jitted function, a scan or a jax.checkpoint.
    """
    source = equation.source_info
    scopes = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=scopes)


def evaluated(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one unchanged equation on the values of its operands, literals included."""
    context: Any = equation.ctx.manager
    with at(equation), context:
        return bound(equation, equation.params, inputs)


def bound(equation: jex_core.JaxprEqn, params: dict[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation with other parameters, in the current context."""
    primitive = equation.primitive
    found: Any = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return list(found) if primitive.multiple_results else [found]


# Equations that hold programs, rebuilt from functions. Each function `run` may return more than the
# program's results: trees of arrays, which are returned beside the equation's results.


def rematerialised(
    equation: jex_core.JaxprEqn,
    run: Callable[[list[Any], Extra], tuple[list[Any], Any]],
    inputs: list[Any],
    given: Extra,
) -> tuple[list[Any], Any]:
    """A `jax.checkpoint` of another function, with additional arguments.

    The additional results of the function are saved.
    """
    params = equation.params
    again = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return again(inputs, given)


def scanned(
    equation: jex_core.JaxprEqn,
    scan: Scan,
    run: Callable[[list[Any], Any], tuple[list[Any], Any]],
    inputs: list[Any],
    given: Any = None,
) -> tuple[list[Any], Any]:
    """A scan of another body, with slices of additional arguments.

    Constants among the operands may be anything, because they are closed over. The additional
    results of the steps are stacked.
    """
    consts, carry, slices = scan.split(inputs)

    def body(carry: list[Any], now: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        slices, given = now
        outputs, found = run([*consts, *carry, *slices], given)
        return outputs[: scan.num_carry], (outputs[scan.num_carry :], found)

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, (outputs, found) = jax.lax.scan(body, carry, (slices, given), **options)
    return [*carry, *outputs], found
