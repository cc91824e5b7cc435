"""Runs a step with fixed releases, and records sums, noise and the result."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..privacy import NoiseMark
from ..programs import (
    Call,
    at,
    equations,
    evaluated,
    inside,
    interpret,
    literal_value,
    mark_on,
    programs_of,
)


class Run(NamedTuple):
    """The record of a call.

    Attributes:
        result: what the function returned.
        sums: the arrays that noise was added to, in the program's order.
        noise: the noise on each of them.
    """

    result: Any
    sums: list[Array]
    noise: list[Array]


@eqx.filter_jit
def run_held(fn: Callable[..., Any], args: Any, kwargs: Any, held: list[Array] | None) -> Run:
    """Calls a function, and replaces its releases by `held`; None replaces nothing.

    The function is traced, and its program evaluated equation by equation. Noise is found by its
    mark, but not in loops and branches. The noise itself is the marked equation's result for zeros.
    """
    program, shapes, others = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    arrays = jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))
    sums, noise = list[Array](), list[Array]()

    def evaluate(program: jex_core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        return interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)

    def of_equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        if _adds_noise(equation):
            count = mark_on(equation).num_leaves
            leaves, stream, end = inputs[:count], inputs[count:], len(sums) + count
            zeros = [jnp.zeros_like(leaf) for leaf in leaves]
            sums.extend(leaves)
            noise.extend(evaluated(equation, [*zeros, *stream])[:count])
            found = evaluated(equation, inputs)
            return found if held is None else [*held[end - count : end], *found[count:]]
        if any(_adds_noise(one) for body in programs_of(equation) for one in equations(body)):
            called = inside(equation)
            if isinstance(called, Call):
                return evaluate(called.body, inputs)
        with at(equation):
            return evaluated(equation, inputs)

    results = evaluate(program, arrays)
    result = eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), results), others)
    return Run(result, sums, noise)


def _adds_noise(equation: jex_core.JaxprEqn) -> bool:
    return isinstance(mark_on(equation), NoiseMark)
