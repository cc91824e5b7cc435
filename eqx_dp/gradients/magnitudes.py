"""How large the values of a backward pass become: a walk through a pullback, on values.

A pullback is linear in its seed. What descends from the seed is multiplied by a loss scale, what
does not (a forward pass that is computed again) is not.
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
    """The largest magnitudes among values that descend from the seed.

    Attributes:
        narrow: of those in float16 or bfloat16.
        wide: of those in other floating-point dtypes.
    """

    narrow: Float[Array, ""]
    wide: Float[Array, ""]


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is float16, or bfloat16, which stands for it in a probe."""
    return str(dtype) in _NARROW


def pulled_back(pullback: Callable[[Array], Any], seed: Float[Array, ""]) -> tuple[Any, Largest]:
    """Evaluates a pullback, and says how large the values on the way are, the seed included.

    Args:
        pullback: as of `jax.vjp`.
        seed: the cotangent of the loss.

    Returns:
        What the pullback returns, and the magnitudes.
    """
    traced, shapes = jax.make_jaxpr(pullback, return_shape=True)(seed)
    walk = _Walk()
    walk.look(seed)
    outputs, _ = walk.run(traced, [seed], [True])
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs), walk.largest()


class _Flagged(NamedTuple):
    """A value, and whether it descends from the seed."""

    value: Any
    scaled: bool


class _Walk:
    """One pass through a program, through the programs inside it."""

    def __init__(self, seen: Sequence[Largest] = ()):
        self.seen = list(seen)

    def largest(self) -> Largest:
        """The largest of all that was seen; zero where there was nothing."""
        nothing = Largest(jnp.zeros(()), jnp.zeros(()))
        parts = zip(*[nothing, *self.seen], strict=True)
        return Largest(*(jnp.max(jnp.stack(part)) for part in parts))

    def look(self, value: Any) -> None:
        """Notes how large a value is that descends from the seed."""
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return
        size = jnp.max(jnp.abs(value.astype(jnp.float32)), initial=0)
        zero = jnp.zeros_like(size)
        self.seen.append(Largest(size, zero) if is_narrow(value.dtype) else Largest(zero, size))

    def run(
        self, program: jex_core.ClosedJaxpr, inputs: Sequence[Any], scaled: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        """Evaluates a program; `scaled` says which inputs, and which results, descend so."""
        found = interpret(
            program.jaxpr,
            [_Flagged(value, False) for value in program.consts],
            list(map(_Flagged, inputs, scaled)),
            self.equation,
            lambda literal: _Flagged(literal.val, False),
        )
        return [x for x, _ in found], [flag for _, flag in found]

    def equation(self, equation: jex_core.JaxprEqn, operands: list[_Flagged]) -> list[_Flagged]:
        """Evaluates one equation: plainly, or by going into it."""
        inputs, scaled = [x for x, _ in operands], [flag for _, flag in operands]
        inner = inside(equation) if any(scaled) else None
        match inner:
            case Call("remat", body):
                # What is computed again is not to be found equal to what was, and held.
                if equation.params["prevent_cse"]:
                    inputs = list(jax.lax.optimization_barrier(inputs))
                outputs, flags = self.run(body, inputs, scaled)
            case Call(body=body):
                outputs, flags = self.run(body, inputs, scaled)
            case Scan() as scan:
                outputs, flags = self._scan(equation, scan, inputs, scaled)
            case While() as loop:
                outputs, flags = self._while(loop, inputs, scaled)
            case Cond() as cond:
                outputs, seen = switched(cond, _noting(scaled[1:]), inputs)
                self.seen.append(seen)
                flags = _any_of([_descend(branch, scaled[1:]) for branch in cond.branches])
            case _:
                outputs = evaluated(equation, inputs)
                flags = [any(scaled)] * len(outputs)
                if any(scaled) and equation.primitive.name not in _REARRANGES:
                    for output in outputs:
                        self.look(output)
        return list(map(_Flagged, outputs, flags))

    def _scan(
        self, equation: jex_core.JaxprEqn, scan: Scan, inputs: list[Any], scaled: list[bool]
    ) -> tuple[list[Any], list[bool]]:
        """How large values are comes out of every step."""
        consts, carry, slices = scan.split(scaled)
        carry = _carried(scan.body, consts, carry, slices)
        note = _noting([*consts, *carry, *slices])
        outputs, seen = scanned(equation, scan, lambda inputs, _: note(scan.body, inputs), inputs)
        self.seen.append(Largest(*(jnp.max(size, initial=0) for size in seen)))
        stacked = _descend(scan.body, [*consts, *carry, *slices])[scan.num_carry :]
        return outputs, [*carry, *stacked]

    def _while(
        self, loop: While, inputs: list[Any], scaled: list[bool]
    ) -> tuple[list[Any], list[bool]]:
        """A loop of unknown length carries how large values are."""
        _, consts, carry = loop.split(scaled)
        carry = _carried(loop.body, consts, carry, [])

        def run(inputs: list[Any], seen: Largest) -> tuple[list[Any], Largest]:
            return _noting([*consts, *carry], [seen])(loop.body, inputs)

        outputs, seen = looped(loop, run, inputs, _Walk().largest())
        self.seen.append(seen)
        return outputs, carry


def _noting(
    scaled: Sequence[bool], seen: Sequence[Largest] = ()
) -> Callable[[jex_core.ClosedJaxpr, list[Any]], tuple[list[Any], Largest]]:
    """Evaluates programs and says how large their values are."""

    def run(program: jex_core.ClosedJaxpr, inputs: list[Any]) -> tuple[list[Any], Largest]:
        walk = _Walk(seen)
        outputs, _ = walk.run(program, inputs, scaled)
        return outputs, walk.largest()

    return run


def _descend(program: jex_core.ClosedJaxpr, scaled: Sequence[bool]) -> list[bool]:
    """Which results of a program descend from the seed, programs inside it taken whole."""
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
    """What of a loop's carry descends from the seed, after any number of steps."""
    return settled(
        lambda carry: _descend(body, [*consts, *carry, *rest])[: len(carry)],
        carry,
        lambda a, b: a or b,
    )


def _any_of(flags: list[list[bool]]) -> list[bool]:
    return [any(its) for its in zip(*flags, strict=True)]
