"""Follows facts about values through a program, from its inputs to its results."""

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .inside import Call, Cond, LinearSolve, Scan, ShardMap, While, inside
from .interpreter import interpret, settled
from .lines import source_line

Fact = TypeVar("Fact")


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
        scope: the name stack, including those of enclosing programs.
        line: the source line.
        times: how often an equation runs here, as far as shapes show.
        is_final: False while the facts about a loop's carry are still being found.
        path: the enclosing equations and the current one, to distinguish two calls of one program.
        loops: around it, and devices that each run it, outermost first.
        is_choice: whether it is in a branch of a choice.
        line_of: finds the source line of an equation, given the line of the enclosing equation.
    """

    scope: str = ""
    line: str = "unknown"
    times: int = 1
    is_final: bool = True
    path: tuple[int, ...] = ()
    loops: tuple[Loop, ...] = ()
    is_choice: bool = False
    line_of: Callable[[JaxprEqn, str], str] = lambda equation, _: source_line(equation)

    def at(self, equation: JaxprEqn) -> "Context":
        """The context of an equation; inside JAX's own functions no line is known."""
        info = equation.source_info
        line = self.line_of(equation, self.line) if info.traceback is not None else ""
        scope, path = f"{self.scope}/{info.name_stack}", (*self.path, id(equation))
        return self._replace(scope=scope, line=line or self.line, path=path)

    def turn(self, length: int | None) -> "Context":
        """The context of the body of the current loop."""
        loops = (*self.loops, Loop(self.path, length))
        return self._replace(times=self.times * (length or 1), loops=loops)


class Flow(abc.ABC, Generic[Fact]):
    """Follows facts through calls, loops, branches, derivative rules and `shard_map`.

    A subclass defines facts, and their rules for equations. All branches of a choice count, and one
    step of a `while` loop.

    Attributes:
        nothing: the fact about constants and literals.
    """

    nothing: Fact

    def __init__(self) -> None:
        self._known: dict[Any, list[Fact]] = {}

    @abc.abstractmethod
    def joined(self, facts: Sequence[Fact]) -> Fact:
        """The fact about a value that is any of several values, or computed from all of them.

        Above each fact there are finitely many others, so that facts about a loop's carry settle.
        """

    @abc.abstractmethod
    def equation(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about the results of an equation, without the programs that it holds."""

    def constant(self, value: Any) -> Fact:
        """The fact about a constant or a literal."""
        return self.nothing

    def steered(self, context: Context, by: Fact, results: list[Fact]) -> list[Fact]:
        """The facts about results that a condition chooses, or of a loop that it stops."""
        return results

    def program(self, program: ClosedJaxpr, inputs: Sequence[Fact], context: Context) -> list[Fact]:
        """The facts about a program's results."""
        # Nested loops are followed many times, mostly without new facts.
        key = program.jaxpr, tuple(inputs), context.path
        if context.is_final or key not in self._known:
            self._known[key] = interpret(
                program.jaxpr,
                [self.constant(value) for value in program.consts],
                inputs,
                lambda equation, inputs: self.holder(context.at(equation), equation, inputs),
                lambda literal: self.constant(literal.val),
            )
        return self._known[key]

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about an equation's results, including the programs that it holds."""
        match inside(equation):
            case Call(body=body):
                return self.program(body, inputs, context)
            case ShardMap() as spread:  # on so many devices, each with its own shapes
                return self.program(spread.body, inputs, context.turn(spread.num_devices))
            case Scan() as scan:
                return self.loop(context.turn(scan.length), scan.body, scan.split(inputs))
            case While() as loop:
                of_condition, of_body, carry = loop.split(inputs)
                turn = context.turn(None)
                carry = self.loop(turn, loop.body, [of_body, carry, []])
                (by,) = self.program(loop.condition, [*of_condition, *carry], turn)
                return self.steered(context, by, carry)
            case Cond() as cond:
                branch = context._replace(is_choice=True)
                found = [self.program(body, inputs[1:], branch) for body in cond.branches]
                joined = [self.joined(facts) for facts in zip(*found, strict=True)]
                return self.steered(context, inputs[0], joined)
            case LinearSolve() as system:
                return self.program(system.solve, system.split(inputs), context)
            case None:
                return self.equation(context, equation, inputs)

    def loop(self, context: Context, body: ClosedJaxpr, parts: Sequence[list[Fact]]) -> list[Fact]:
        """Follows a loop until the facts about its carry settle, and once more.

        The parts of its operands are constants, carry and slices.
        """
        consts, carry, slices = parts
        size, before = len(carry), context._replace(is_final=False)

        def step(carry: list[Fact], context: Context) -> list[Fact]:
            return self.program(body, [*consts, *carry, *slices], context)

        join = lambda start, end: self.joined([start, end])  # noqa: E731
        carry = settled(lambda carry: step(carry, before)[:size], carry, join)
        return [*carry, *step(carry, context)[size:]]
