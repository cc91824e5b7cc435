"""Following one example through the differentiated program of its loss, before `vmap` maps it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.extend.core as jex_core

from ..programs import (
    Call,
    Cond,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    inside,
    interpret,
    own_line,
    settled,
)
from .facts import OWN, SHARED, SUM, Fact, Meeting, joined
from .mapping import may_unmap, stay_mapped
from .primitives import REDUCTIONS, REFERENCES, STATEFUL, is_engines, keeps_apart
from .steering import is_steering, stops


@dataclass
class Judge:
    """One pass over the program of one example.

    Guarantee: if a result is `OWN`, its entry for an example in the program that `vmap` makes does
        not depend on the other examples: the program holds only primitives that are known to keep
        examples apart, mapped by JAX's own batching rules, which leave no such value unmapped.

    | what may depend on other examples | is |
    |---|---|
    | the result of a primitive that is not known to keep examples apart | a meeting |
    | a result of one example that the batching rule of its primitive leaves unmapped | a meeting |
    | every value that depends on a meeting, also by a choice | the same meeting |
    | the conditions of loops of Equinox and its family | nothing: see `steering` |
    | whether Equinox's `error_if` stops the run | nothing: there is no result then |
    | a mutable array, a host function that may remember | a meeting, used or not |
    | a value of no example (such as a collective over parameters) | nothing |

    Attributes:
        trusts: whether reductions over examples by Equinox and its family only control loops.
        bound: names of axes that the program itself binds; collectives over others are meetings.
        remembered: the facts about values that outlive the example.
    """

    trusts: bool
    bound: frozenset[Any] = frozenset()
    remembered: list[Meeting] = field(default_factory=list[Meeting])
    _known: dict[Any, list[Fact]] = field(default_factory=dict[Any, list[Fact]])

    def program(self, program: jex_core.ClosedJaxpr, inputs: Sequence[Fact]) -> list[Fact]:
        """What a program's results depend on; its constants are shared."""
        jaxpr = program.jaxpr
        key = jaxpr, tuple(inputs), self.bound
        if key not in self._known:
            consts = [SHARED] * len(jaxpr.constvars)
            facts = list(map(_unless_empty, jaxpr.invars, inputs))
            self._known[key] = interpret(jaxpr, consts, facts, self.equation, lambda _: SHARED)
        return self._known[key]

    def equation(self, equation: jex_core.JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """What an equation's results depend on."""
        found = self._inside(equation, inputs) or self._result(equation, inputs)
        return [
            _unless_empty(variable, fact if fact in inputs else _with_line(fact, equation))
            for variable, fact in zip(equation.outvars, found, strict=True)
        ]

    def _result(self, equation: jex_core.JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about results of an equation whose programs are not followed."""
        name, count, fact = equation.primitive.name, len(equation.outvars), joined(inputs, equation)
        if name in REFERENCES | STATEFUL:
            self.remembered.append(Meeting(equation, own_line(equation)))
        if name in ("optimization_barrier", "device_put"):
            return inputs
        if fact == OWN and is_engines(equation):
            return [OWN, *[SUM] * (count - 1)]
        is_settled = fact == SHARED or isinstance(fact, Meeting)
        if name in REDUCTIONS and not is_settled and self.trusts and is_steering(equation):
            return [SHARED] * count
        is_kept = is_settled or keeps_apart(equation, self.bound)
        is_asked = is_kept and fact == OWN and may_unmap(equation)
        is_own = [its == OWN for its in inputs]
        mapped = stay_mapped(equation, is_own) if is_asked else [is_kept] * count
        return [fact if its else Meeting(equation) for its in mapped]

    def _inside(self, equation: jex_core.JaxprEqn, inputs: list[Fact]) -> list[Fact] | None:
        """The facts about results of an equation with programs; None for any other."""

        def either(one: Fact, other: Fact) -> Fact:
            return joined([one, other], equation)

        match inside(equation):
            case Call("custom_vmap" | "high") | None:
                return None
            case Call(body=body):
                return self.program(body, inputs)
            case LinearSolve() as system:
                return self.program(system.solve, system.split(inputs))
            case ShardMap() as spread:  # over its own axes: devices share the example
                return replace(self, bound=self.bound | spread.axes).program(spread.body, inputs)
            case Cond(branches=branches):
                index, *operands = inputs
                going_on = [branch for branch in branches if not stops(branch.jaxpr)]
                if isinstance(index, Meeting) and len(going_on) == 1:
                    branches, index = going_on, SHARED
                found = [self.program(branch, operands) for branch in branches]
                return [joined([index, *facts], equation) for facts in zip(*found, strict=True)]
            case Scan() as loop:
                consts, start, over = loop.split(inputs)

                def turn(carry: list[Fact]) -> list[Fact]:
                    return self.program(loop.body, [*consts, *carry, *over])

                carry = settled(lambda carry: turn(carry)[: loop.num_carry], start, either)
                return [*carry, *turn(carry)[loop.num_carry :]]
            case While() as loop:
                of_condition, of_body, start = loop.split(inputs)

                def step(carry: list[Fact]) -> list[Fact]:
                    (steering,) = self.program(loop.condition, [*of_condition, *carry])
                    found = self.program(loop.body, [*of_body, *carry])
                    return [either(fact, steering) for fact in found]

                return settled(step, start, either)


def _unless_empty(variable: Any, fact: Fact) -> Fact:
    """A value that holds no number depends on nothing."""
    return SHARED if 0 in getattr(variable.aval, "shape", ()) else fact


def _with_line(fact: Fact, equation: jex_core.JaxprEqn) -> Fact:
    """Adds the line where the user called a meeting equation; JAX's own functions have no line."""
    if not isinstance(fact, Meeting) or fact.line:
        return fact
    return replace(fact, line=own_line(fact.equation) or own_line(equation))
