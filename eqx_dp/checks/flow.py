"""Facts about values, followed through a program: from those about its inputs to its results'."""

import abc
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..programs import (
    Call,
    Cond,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    inside,
    interpret,
    settled,
    source_line,
)

Fact = TypeVar("Fact")


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of what a variable or a literal holds; of what is no array, ()."""
    return tuple(getattr(variable.aval, "shape", ()))


def size_of(variable: Any) -> int:
    """How many entries it has."""
    return math.prod(shape_of(variable))


def dtype_of(variable: Any) -> Any:
    """Their dtype; None of what is no array."""
    return getattr(variable.aval, "dtype", None)


class Loop(NamedTuple):
    """A loop around an equation.

    Attributes:
        path: where it is.
        length: how many turns it takes; None if that is not known.
    """

    path: Hashable
    length: int | None


class Context(NamedTuple):
    """What is around an equation.

    Attributes:
        scope: the name stack, that of the programs around included.
        line: the source line.
        times: how often an equation runs here, as far as shapes tell.
        is_final: False while the facts about a loop's carry are still being found.
        path: the equations that led here and the one at hand, which tells apart two calls of one
            program.
        loops: around it, outermost first.
        is_branch: whether a choice is around it.
        axes: mesh axes of the devices that each run the equation on their own part.
        line_of: finds the source line of an equation, given that of what holds its program.
    """

    scope: str = ""
    line: str = "unknown"
    times: int = 1
    is_final: bool = True
    path: tuple[int, ...] = ()
    loops: tuple[Loop, ...] = ()
    is_branch: bool = False
    axes: frozenset[str] = frozenset()
    line_of: Callable[[JaxprEqn, str], str] = lambda equation, _: source_line(equation)

    def at(self, equation: JaxprEqn) -> "Context":
        """What is around an equation; JAX's own functions know no line inside."""
        info = equation.source_info
        line = self.line_of(equation, self.line) if info.traceback is not None else ""
        return self._replace(
            scope=f"{self.scope}/{info.name_stack}",
            line=line or self.line,
            path=(*self.path, id(equation)),
        )

    def turn(self, length: int | None) -> "Context":
        """What is around the body of the loop at hand."""
        loops = (*self.loops, Loop(self.path, length))
        return self._replace(times=self.times * (length or 1), loops=loops)


class Flow(abc.ABC, Generic[Fact]):
    """Follows facts through calls, loops, branches, derivative rules and `shard_map`.

    What a fact is, and what an equation makes of those about its operands, is up to a subclass. Of
    a choice all branches count, and of a `while` loop one step.

    Attributes:
        nothing: what is known of constants and literals.
    """

    nothing: Fact

    def __init__(self) -> None:
        self._known: dict[Any, list[Fact]] = {}

    @abc.abstractmethod
    def joined(self, facts: Sequence[Fact]) -> Fact:
        """What is known of a value that may be any of several, or is made of all of them.

        There are finitely many facts above any, so that those about a loop's carry settle.
        """

    @abc.abstractmethod
    def equation(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """What is known of the results of an equation, without a look at programs that it holds."""

    def constant(self, value: Any) -> Fact:
        """What is known of a constant or a literal."""
        return self.nothing

    def sliced(self, context: Context, fact: Fact) -> Fact:
        """What is known of a slice that a scan takes of what it goes over."""
        return fact

    def stacked(self, context: Context, fact: Fact) -> Fact:
        """What is known of the results of a scan's turns, side by side."""
        return fact

    def steered(self, context: Context, by: Fact, results: list[Fact]) -> list[Fact]:
        """What is known of results that a condition chooses, or of which it says how often."""
        return results

    def on_devices(self, context: Context, spread: ShardMap, inputs: list[Fact]) -> list[Fact]:
        """What is known of the results of a `shard_map`."""
        return self.program(spread.body, inputs, context)

    def program(self, program: ClosedJaxpr, inputs: Sequence[Fact], context: Context) -> list[Fact]:
        """What is known of a program's results."""
        if context.is_final:
            return self.equations(program, inputs, context)
        # Loops within loops are gone round many times, mostly with nothing new.
        key = program.jaxpr, tuple(inputs), context.path
        if key not in self._known:
            self._known[key] = self.equations(program, inputs, context)
        return self._known[key]

    def equations(
        self, program: ClosedJaxpr, inputs: Sequence[Fact], context: Context
    ) -> list[Fact]:
        """The same, equation by equation."""
        return interpret(
            program.jaxpr,
            [self.constant(value) for value in program.consts],
            inputs,
            lambda equation, inputs: self.holder(context.at(equation), equation, inputs),
            lambda literal: self.constant(literal.val),
        )

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """What is known of an equation's results, whatever it holds."""
        match inside(equation):
            case Call(body=body):
                return self.program(body, inputs, context)
            case ShardMap() as spread:  # on so many devices, each with shapes of its own
                axes, times = context.axes | spread.axes, context.times * spread.num_devices
                return self.on_devices(context._replace(times=times, axes=axes), spread, inputs)
            case Scan() as scan:
                return self.loop(context.turn(scan.length), scan.body, *scan.split(inputs))
            case While() as loop:
                of_condition, of_body, carry = loop.split(inputs)
                turn = context.turn(None)
                carry = self.loop(turn, loop.body, of_body, carry, [])
                (by,) = self.program(loop.condition, [*of_condition, *carry], turn)
                return self.steered(context, by, carry)
            case Cond() as cond:
                within = context._replace(is_branch=True)
                found = [self.program(branch, inputs[1:], within) for branch in cond.branches]
                joined = [self.joined(facts) for facts in zip(*found, strict=True)]
                return self.steered(context, inputs[0], joined)
            case LinearSolve() as system:
                return self.program(system.solve, system.split(inputs), context)
            case None:
                return self.equation(context, equation, inputs)

    def loop(
        self,
        context: Context,
        body: ClosedJaxpr,
        consts: list[Fact],
        carry: list[Fact],
        slices: list[Fact],
    ) -> list[Fact]:
        """Goes round a loop until nothing new is learned of what it carries, and once more."""
        size, before = len(carry), context._replace(is_final=False)
        slices = [self.sliced(context, fact) for fact in slices]

        def step(carry: list[Fact], context: Context) -> list[Fact]:
            return self.program(body, [*consts, *carry, *slices], context)

        carry = settled(
            lambda carry: step(carry, before)[:size], carry, lambda a, b: self.joined([a, b])
        )
        results = step(carry, context)
        return [*carry, *(self.stacked(context, fact) for fact in results[size:])]
