"""A function that is run with its noise recorded: what noise was added to, and the noise."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex_core
from jaxtyping import Array

from ..precision.stages import stage_of
from ..programs import Call, at, equations, evaluated, inside, interpret, literal_value


class Recording(NamedTuple):
    """What a call gave.

    Attributes:
        result: what the function returned.
        sums: what the noise was added to, an entry for each addition, in the program's order.
        noise: what was added.
        in_loops: how many additions stand in loops or branches, and were not recorded.
    """

    result: Any
    sums: list[Array]
    noise: list[Array]
    in_loops: int


def recorded(fn: Callable[..., Any], gain: Any, args: Any, kwargs: Any) -> Recording:
    """Calls a function, and records every addition of noise by `gaussian_privatizer`.

    The function is traced, and its program evaluated equation by equation. Additions are known by
    the mark of their stage. Run it under a jit: the function's own jit is taken apart.

    The noise is multiplied by `gain` before it is added: 1 leaves it as it is.
    """
    program, shapes, others = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    arrays = jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))
    run = _Run(gain, [], [])
    results = run.program(program, arrays)
    in_loops = sum(map(_adds_noise, equations(program.jaxpr))) - len(run.sums)
    result = eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), results), others)
    return Recording(result, run.sums, run.noise, in_loops)


class _Run(NamedTuple):
    gain: Any
    sums: list[Any]
    noise: list[Any]

    def program(self, program: jex_core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        return interpret(program.jaxpr, program.consts, inputs, self._equation, literal_value)

    def _equation(self, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        match inside(equation):
            case Call("jit", body) if any(map(_adds_noise, equations(body))):
                return self.program(body, inputs)
            case _:
                pass
        with at(equation):
            if _adds_noise(equation):
                gradient, noise = inputs  # in the order in which the privatizer adds them
                self.sums.append(gradient)
                self.noise.append(noise)
                inputs = [gradient, noise * jax.numpy.asarray(self.gain, noise.dtype)]
            return evaluated(equation, inputs)


def _adds_noise(equation: jex_core.JaxprEqn) -> bool:
    is_addition = equation.primitive.name == "add"
    return is_addition and stage_of(str(equation.source_info.name_stack)) == "noise"
