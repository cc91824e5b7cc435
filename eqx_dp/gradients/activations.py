"""Roughly how much of a program's forward pass is held for its backward pass: shapes alone tell.

Counted are the arrays that the compiler keeps, each once:

- what derivatives need: both sides of a product of values that parameters have a part in, the
  operands or the result of a function that is not linear;
- what a contraction or a convolution multiplies to find a gradient, as it is multiplied.

What is cheap arithmetic on one array is computed again where it is needed, so the array counts in
its place. Where two arrays meet, the result is one of its own.

Measured on CPU, of gradients without privacy, from 2 to 4 examples at once: of 19 models that leave
more than 50 KiB an example (`tests/benchmarks`) the estimate is 0.8 to 1.35 of what compiled
programs take more, in the mean 0.98, and 0.8 to 1.2 of those that leave more than 2 MiB.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.extend.core as jex_core

from ..programs import (
    CHEAP,
    LINEAR,
    OF_RESULT,
    PRODUCTS,
    REARRANGED,
    Call,
    Scan,
    inside,
    interpret,
)
from .carried_back import operands_wanted
from .program import Program

_FOUND_AGAIN = REARRANGED | CHEAP
_NOT_OF_OPERANDS = LINEAR | OF_RESULT


def activation_bytes(program: Program, num_params: int, num_frozen: int) -> int:
    """An estimate of what one example's forward pass leaves behind for its backward pass.

    What follows from parameters and frozen arrays alone is there once, not once an example.

    Args:
        program: the loss of one example.
        num_params: how many of its inputs, the first, are trained.
        num_frozen: how many behind those are the same for every example.
    """
    jaxpr, found = program.jaxpr.jaxpr, _Arrays()
    shared = [True] * num_params + [False] * num_frozen
    examples = [_elsewhere(False) for _ in jaxpr.invars[len(shared) :]]
    found.run(jaxpr, [*shared, *examples])
    return found.total


class _Value(NamedTuple):
    """A value that depends on the example.

    Attributes:
        array: which array in memory it is found from: its own, or that of another value.
        is_trained: whether parameters have a part in it.
        is_formed: whether it has the entries of that array.
    """

    array: object
    is_trained: bool
    is_formed: bool = True


_Fact: TypeAlias = _Value | bool
"""Of a value that is the same for every example: whether parameters have a part in it."""


def _elsewhere(is_trained: bool) -> _Value:
    """A value whose array is no result of this program."""
    return _Value(object(), is_trained)


def _is_trained(fact: _Fact) -> bool:
    return fact.is_trained if isinstance(fact, _Value) else fact


class _Arrays:
    """The arrays of a program, their bytes, and those that are kept."""

    def __init__(self) -> None:
        self.bytes: dict[object, int] = {}
        self.kept: set[object] = set()
        self.again = 0  # of the largest program that is computed again

    @property
    def total(self) -> int:
        """Bytes of all that is kept."""
        return sum(self.bytes.get(array, 0) for array in self.kept) + self.again

    def run(self, jaxpr: jex_core.Jaxpr, inputs: Sequence[_Fact]) -> list[_Fact]:
        """The facts about a program's results, from those about its inputs."""
        consts: list[_Fact] = [False] * len(jaxpr.constvars)
        return interpret(jaxpr, consts, inputs, self.equation, lambda _: False)

    def new(self, variables: Sequence[Any], is_trained: bool) -> list[_Fact]:
        """Values with arrays of their own."""
        found = [_elsewhere(is_trained) for _ in variables]
        self.bytes |= {x.array: _bytes(v) for x, v in zip(found, variables, strict=True)}
        return [*found]

    def keep(self, facts: Sequence[_Fact]) -> None:
        """Notes that a derivative needs values, or what they are found from."""
        self.kept |= {fact.array for fact in facts if isinstance(fact, _Value)}

    def store(self, facts: Sequence[_Fact], variables: Sequence[Any]) -> None:
        """The same of values that are read as arrays: what is found from another is one, too."""
        for fact, variable in zip(facts, variables, strict=True):
            if isinstance(fact, _Value) and not fact.is_formed:
                formed = (fact.array, "formed")
                self.bytes[formed] = _bytes(variable)
                self.kept.add(formed)
            else:
                self.keep([fact])

    def equation(self, equation: jex_core.JaxprEqn, inputs: list[_Fact]) -> list[_Fact]:
        """The facts about an equation's results; notes what is kept for its derivative."""
        is_trained = any(map(_is_trained, inputs))
        if not any(isinstance(fact, _Value) for fact in inputs):
            return [is_trained] * len(equation.outvars)
        match inside(equation):
            case None:
                return self.plain(equation, inputs, is_trained)
            case Call("remat", body):  # computed again in the backward pass
                inner = self.within(body.jaxpr, inputs)
                self.again = max(self.again, inner.total)
            case Call("jit" | "custom_jvp" | "custom_vmap", body):
                return self.run(body.jaxpr, inputs)
            case Scan() as scan:  # a carry depends on the example a step later
                inner = self.within(scan.body.jaxpr, inputs, scan)
                steps = object()
                self.bytes[steps] = scan.length * (inner.total - inner.again)
                self.kept.add(steps)
                self.again = max(self.again, inner.again)
            case _:
                results = self.new(equation.outvars, is_trained)
                self.keep(results)
                self.store(inputs, equation.invars)
                return results
        self.store(inputs, equation.invars)
        return self.new(equation.outvars, is_trained)

    def within(
        self, jaxpr: jex_core.Jaxpr, inputs: list[_Fact], scan: Scan | None = None
    ) -> "_Arrays":
        """What is kept within a program whose inputs are there; the carry of a scan is made."""
        inner, is_trained = _Arrays(), any(map(_is_trained, inputs))
        given: list[_Fact] = [
            _elsewhere(x.is_trained) if isinstance(x, _Value) else x for x in inputs
        ]
        if scan is not None:
            consts, _, slices = scan.split(given)
            carry = inner.new(scan.split(jaxpr.invars)[1], is_trained)
            given = [*consts, *carry, *slices]
        inner.run(jaxpr, given)
        return inner

    def plain(
        self, equation: jex_core.JaxprEqn, inputs: list[_Fact], is_trained: bool
    ) -> list[_Fact]:
        """The same of an equation that holds no program."""
        name, variables = equation.primitive.name, equation.outvars
        is_trained &= any(operands_wanted(equation, [True] * len(variables)))
        arrays = {fact.array for fact in inputs if isinstance(fact, _Value)}
        if name in PRODUCTS:
            for side in range(2):
                if _is_trained(inputs[1 - side]):
                    self.store([inputs[side]], [equation.invars[side]])
            return self.new(variables, is_trained)
        if is_trained and name == "mul":
            self.keep([inputs[side] for side in range(2) if _is_trained(inputs[1 - side])])
        elif is_trained and name == "div":
            self.keep(inputs[1:] if _is_trained(inputs[1]) else [])
        elif is_trained and name not in _NOT_OF_OPERANDS:
            self.keep(inputs)
        if len(arrays) == 1 and name in _FOUND_AGAIN:
            was_formed = all(fact.is_formed for fact in inputs if isinstance(fact, _Value))
            found = _Value(arrays.pop(), is_trained, was_formed and name in REARRANGED)
            return [found for _ in variables]
        results = self.new(variables, is_trained)
        if is_trained and (name in OF_RESULT or (name == "div" and _is_trained(inputs[1]))):
            self.keep(results)
        return results


def _bytes(variable: Any) -> int:
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
