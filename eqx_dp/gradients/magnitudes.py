"""How large the values of a backward pass become: a walk through a pullback, on values.

A pullback is linear in the loss cotangent. What descends from that is multiplied by a loss scale;
what does not (a forward pass that is computed again) is not.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..programs import (
    Call,
    Cond,
    Scan,
    While,
    evaluated,
    inside,
    interpret,
    looped,
    scanned,
    settled,
    switched,
)

_NARROW = frozenset({"float16", "bfloat16"})
# They make nothing larger than what they are given, which was looked at already.
_REARRANGES = frozenset(
    {"broadcast_in_dim", "copy", "expand_dims", "neg", "pad", "reshape", "rev", "select_n"}
    | {"slice", "split", "squeeze", "transpose", "concatenate", "optimization_barrier"}
)


class Largest(NamedTuple):
    """The largest magnitudes among values that descend from the loss cotangent.

    Attributes:
        narrow: of those in float16 or bfloat16.
        wide: of those in other floating-point dtypes.
    """

    narrow: Float[Array, ""]
    wide: Float[Array, ""]


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is float16, or bfloat16, which stands for it in a probe."""
    return str(dtype) in _NARROW


def pulled_back(
    pullback: Callable[[Array], Any], cotangent: Float[Array, ""]
) -> tuple[Any, Largest]:
    """Evaluates a pullback, and says how large the values on the way are, cotangent included.

    Args:
        pullback: as of `jax.vjp`.
        cotangent: of the loss.

    Returns:
        What the pullback returns, and the magnitudes.
    """
    traced, shapes = jax.make_jaxpr(pullback, return_shape=True)(cotangent)
    outputs, _, seen = _evaluated(traced, [cotangent], [True])
    result = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
    return result, _largest([*_magnitudes([cotangent]), *seen])


class _Flagged(NamedTuple):
    """A value, and whether it descends from the loss cotangent."""

    value: Any
    scaled: bool


def _evaluated(
    program: jex_core.ClosedJaxpr, inputs: Sequence[Any], scaled: Sequence[bool]
) -> tuple[list[Any], list[bool], list[Largest]]:
    """Evaluates a program; `scaled` says which inputs descend from the loss cotangent.

    It returns the results, which of them descend so, and how large the values on the way are.
    """
    seen: list[Largest] = []

    def of_equation(equation: jex_core.JaxprEqn, operands: list[_Flagged]) -> list[_Flagged]:
        inputs, scaled = [x for x, _ in operands], [flag for _, flag in operands]
        if any(scaled):
            outputs, flags, its = _of_equation(equation, inputs, scaled)
            seen.extend(its)
        else:
            outputs = evaluated(equation, inputs)
            flags = [False] * len(outputs)
        return list(map(_Flagged, outputs, flags))

    found = interpret(
        program.jaxpr,
        [_Flagged(value, False) for value in program.consts],
        list(map(_Flagged, inputs, scaled)),
        of_equation,
        lambda literal: _Flagged(literal.val, False),
    )
    return [x for x, _ in found], [flag for _, flag in found], seen


def _of_equation(
    equation: jex_core.JaxprEqn, inputs: list[Any], scaled: list[bool]
) -> tuple[list[Any], list[bool], list[Largest]]:
    """The same of an equation, by going into the programs that it holds."""
    match inside(equation):
        case Call(wrapper, body):
            # What is computed again is not to be found equal to what was, and held.
            if wrapper == "remat" and equation.params["prevent_cse"]:
                inputs = list(jax.lax.optimization_barrier(inputs))
            return _evaluated(body, inputs, scaled)
        case Scan() as scan:
            consts, carry, slices = scan.split(scaled)
            carry = _carried(scan.body, consts, carry, slices)
            of_step = [*consts, *carry, *slices]
            outputs, of_steps = scanned(
                equation, scan, lambda now, _: _measured(scan.body, now, of_step), inputs
            )
            flags = [*carry, *_descend(scan.body, of_step)[scan.num_carry :]]
            return outputs, flags, [Largest(*(jnp.max(size, initial=0) for size in of_steps))]
        case While() as loop:
            _, consts, carry = loop.split(scaled)
            carry = _carried(loop.body, consts, carry, [])

            def run(inputs: list[Any], before: Largest) -> tuple[list[Any], Largest]:
                outputs, largest = _measured(loop.body, inputs, [*consts, *carry])
                return outputs, _largest([before, largest])

            outputs, largest = looped(loop, run, inputs, _largest([]))
            return outputs, carry, [largest]
        case Cond() as cond:
            outputs, largest = switched(
                cond, lambda branch, inputs: _measured(branch, inputs, scaled[1:]), inputs
            )
            of_branches = [_descend(branch, scaled[1:]) for branch in cond.branches]
            return outputs, [any(its) for its in zip(*of_branches, strict=True)], [largest]
        case _:
            outputs = evaluated(equation, inputs)
            is_new = equation.primitive.name not in _REARRANGES
            return outputs, [True] * len(outputs), _magnitudes(outputs if is_new else [])


def _measured(
    program: jex_core.ClosedJaxpr, inputs: list[Any], scaled: Sequence[bool]
) -> tuple[list[Any], Largest]:
    outputs, _, seen = _evaluated(program, inputs, scaled)
    return outputs, _largest(seen)


def _magnitudes(values: list[Any]) -> list[Largest]:
    """How large values are that descend from the loss cotangent."""
    found: list[Largest] = []
    for value in values:
        if jnp.issubdtype(value.dtype, jnp.floating):
            size = jnp.max(jnp.abs(value.astype(jnp.float32)), initial=0)
            zero = jnp.zeros_like(size)
            found.append(Largest(size, zero) if is_narrow(value.dtype) else Largest(zero, size))
    return found


def _largest(parts: Sequence[Largest]) -> Largest:
    """The largest of all; zero where there is nothing."""
    both = zip(*[Largest(jnp.zeros(()), jnp.zeros(())), *parts], strict=True)
    return Largest(*(jnp.max(jnp.stack(sizes)) for sizes in both))


def _descend(program: jex_core.ClosedJaxpr, scaled: Sequence[bool]) -> list[bool]:
    """Which results of a program descend so, with the programs inside it taken whole."""
    return interpret(
        program.jaxpr,
        [False] * len(program.consts),
        scaled,
        lambda equation, flags: [any(flags)] * len(equation.outvars),
        lambda _: False,
    )


def _carried(
    body: jex_core.ClosedJaxpr, consts: list[bool], carry: list[bool], rest: list[bool]
) -> list[bool]:
    """What of a loop's carry descends so, after any number of steps."""
    return settled(
        lambda carry: _descend(body, [*consts, *carry, *rest])[: len(carry)],
        carry,
        lambda a, b: a or b,
    )
