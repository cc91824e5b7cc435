"""A walk along the flow of values through a jaxpr: what each one descends from.

What an equation makes of the facts about its inputs is up to a `Visitor`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.extend.core as jex_core
from jax.extend import source_info_util
from jax.extend.core.primitives import select_n_p

from ..programs import (
    Call,
    Cond,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    inside,
    interpret,
    programs_of,
    settled,
)
from .widths import Width


class Draw(NamedTuple):
    """Random bits that a program asks for.

    Attributes:
        where: the source line.
        bits: how many for each number.
        size: how many numbers.
    """

    where: str
    bits: int
    size: int


class Narrowest(NamedTuple):
    """The narrowest floating-point format that a value went through, and the line where it did."""

    width: Width
    where: str


class Facts(NamedTuple):
    """What is known of a value.

    Attributes:
        clipped: whether a sum of clipped gradients is in it that has no noise yet.
        draws: the random bits that it descends from; none where `clipped`.
        narrowest: what it went through since the draws; None without any, or without a float yet.
    """

    clipped: bool = False
    draws: frozenset[Draw] = frozenset()
    narrowest: Narrowest | None = None

    def narrowed(self, width: Width, where: str) -> "Facts":
        """The facts about a value of the given width that is made of one with these."""
        if not self.draws or (self.narrowest and not width.key < self.narrowest.width.key):
            return self
        return self._replace(narrowest=Narrowest(width, where))


NOTHING = Facts()


def joined(facts: Sequence[Facts]) -> Facts:
    """What is known of a value made of several. If some hold a clipped sum, only those count."""
    found = [one for one in facts if one.clipped] or list(facts)
    narrowest = [one.narrowest for one in found if one.narrowest is not None]
    return Facts(
        any(one.clipped for one in found),
        frozenset[Draw]().union(*(one.draws for one in found)),
        min(narrowest, key=lambda one: (one.width.key, one.where), default=None),
    )


class Here(NamedTuple):
    """Where the walk is.

    Attributes:
        scope: the name stack, that of the programs around included.
        where: the source line.
        times: how often an equation here runs, as far as shapes tell.
        recording: False while the facts about a loop's carry are still being found.
    """

    scope: str = ""
    where: str = "unknown"
    times: int = 1
    recording: bool = True

    def at(self, equation: jex_core.JaxprEqn) -> "Here":
        """The place of an equation."""
        info = equation.source_info
        where = source_info_util.summarize(info) if info.traceback is not None else ""
        return self._replace(scope=f"{self.scope}/{info.name_stack}", where=where or self.where)


@runtime_checkable
class Visitor(Protocol):
    """What is done on the way."""

    def equation(self, here: Here, equation: jex_core.JaxprEqn, inputs: list[Facts]) -> list[Facts]:
        """Looks at an equation that holds no program, and says what is known of its results."""
        ...

    def carried(self, here: Here, variable: Any, facts: Facts) -> None:
        """Looks at what a loop carries from step to step."""
        ...


class Walk:
    """One walk through a program."""

    def __init__(self, visitor: Visitor):
        self.visitor = visitor
        self._learned: dict[Any, list[Facts]] = {}

    def jaxpr(self, jaxpr: jex_core.Jaxpr, inputs: Sequence[Facts], here: Here) -> list[Facts]:
        """From what is known of the inputs to what is known of the outputs."""
        if here.recording:
            return self._equations(jaxpr, inputs, here)
        # Loops within loops are gone round many times, mostly with nothing new.
        key = id(jaxpr), tuple(inputs), here.scope, here.where
        if key not in self._learned:
            self._learned[key] = self._equations(jaxpr, inputs, here)
        return self._learned[key]

    def _equations(self, jaxpr: jex_core.Jaxpr, inputs: Sequence[Facts], here: Here) -> list[Facts]:
        return interpret(
            jaxpr,
            [NOTHING] * len(jaxpr.constvars),
            inputs,
            lambda equation, inputs: self._equation(equation, inputs, here.at(equation)),
            lambda _: NOTHING,
        )

    def _equation(
        self, equation: jex_core.JaxprEqn, inputs: list[Facts], here: Here
    ) -> list[Facts]:
        match inside(equation):
            case Call(body=body):
                return self.jaxpr(body.jaxpr, inputs, here)
            case ShardMap() as spread:  # on so many devices, each with shapes of its own
                times = here.times * spread.num_devices
                return self.jaxpr(spread.body.jaxpr, inputs, here._replace(times=times))
            case Scan() as scan:
                here = here._replace(times=here.times * scan.length)
                return self._loop(scan.body.jaxpr, *scan.split(inputs), here)
            case While() as loop:  # of unknown length: it counts as one step
                of_condition, of_body, carry = loop.split(inputs)
                carry = self._loop(loop.body.jaxpr, of_body, carry, [], here)
                self.jaxpr(loop.condition.jaxpr, [*of_condition, *carry], here)
                return carry
            case Cond() as cond:  # all branches count
                found = [self.jaxpr(branch.jaxpr, inputs[1:], here) for branch in cond.branches]
                return [joined(facts) for facts in zip(*found, strict=True)]
            case LinearSolve() as system:
                return self.jaxpr(system.solve.jaxpr, system.split(inputs), here)
            case None:
                return self._plain(equation, inputs, here)

    def _plain(self, equation: jex_core.JaxprEqn, inputs: list[Facts], here: Here) -> list[Facts]:
        """An equation without a program in it, or with one that looks like that of a call.

        Else nothing is known of it, and its results descend from all of its inputs. The program of
        a scatter says only how two numbers are put together.
        """
        programs = programs_of(equation)
        if equation.primitive is select_n_p and any(facts != NOTHING for facts in inputs[1:]):
            # A choice descends from what there is to choose, if anything is known of that.
            inputs = [NOTHING, *inputs[1:]]
        if not programs or "update_jaxpr" in equation.params:
            return self.visitor.equation(here, equation, inputs)
        sizes = (len(equation.invars), len(equation.outvars))
        if [(len(inner.invars), len(inner.outvars)) for inner in programs] == [sizes]:
            return self.jaxpr(programs[0], inputs, here)
        everything = joined(inputs)
        for inner in programs:
            outputs = self.jaxpr(inner, [everything] * len(inner.invars), here)
            everything = joined([everything, *outputs])
        return [everything] * len(equation.outvars)

    def _loop(
        self,
        body: jex_core.Jaxpr,
        consts: list[Facts],
        carry: list[Facts],
        slices: list[Facts],
        here: Here,
    ) -> list[Facts]:
        """Goes round a loop until nothing new is learned of what it carries; then records."""
        quiet = here._replace(recording=False)

        def step(carry: list[Facts]) -> list[Facts]:
            return self.jaxpr(body, [*consts, *carry, *slices], quiet)

        size = len(carry)
        carry = settled(lambda c: step(c)[:size], carry, lambda a, b: joined([a, b]))
        stacked = step(carry)[size:]
        if here.recording:
            self.jaxpr(body, [*consts, *carry, *slices], here)
            for variable, facts in zip(body.invars[len(consts) :], carry, strict=False):
                self.visitor.carried(here, variable, facts)
        return [*carry, *stacked]
